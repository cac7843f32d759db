"""What a training program consists of: wraps, models, optimizers, loaders, steps.

Every fact is found once, for the whole program, and is a place in the original text. Facts say what
is there; what should be there is a rule's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import libcst as cst

from migrate.definitions import Definitions
from migrate.facts.loading import Loader, Loading
from migrate.facts.main_process import MainProcess
from migrate.facts.reaching import Reaching
from migrate.flow import Flow
from migrate.names import Slot
from migrate.project import Project, main_guard
from migrate.source import Source
from migrate.syntax import argument, dotted, method_name, receiver
from migrate.values import Class, External, Function, Instance, Made, Value, Values

DATA_PARALLEL = re.compile(r"^torch\.nn\.(parallel\.)?(data_parallel\.)?DataParallel$")
FUNCTIONAL = re.compile(r"^torch\.nn\.(parallel\.)?(data_parallel\.)?data_parallel$")
DISTRIBUTED = re.compile(
    r"(^|\.)(DistributedDataParallel|DistributedDataParallelCPU|fully_shard|FullyShardedDataParallel)$"
)
_OPTIMIZER = re.compile(
    r"(Adam|SGD|Rprop|RMSprop|Adagrad|Adadelta|LBFGS|Adafactor|Optimizer|LAMB|create_optimizer)"
)
_READS = frozenset({"parameters", "named_parameters", "state_dict", "modules", "children"})


@dataclass(frozen=True, eq=False)
class Wrap:
    """A call that makes a model parallel.

    Attributes:
        model: the expression that is wrapped.
        inner: what that can be.
        functional: `data_parallel(model, inputs)`, which wraps for one forward.
        distributed: it is DistributedDataParallel or FSDP already.
        custom: the project class, if it is a subclass of DataParallel.
    """

    source: Source
    call: cst.Call
    model: cst.BaseExpression | None
    inner: Values
    functional: bool = False
    distributed: bool = False
    custom: Class | None = None


class Facts:
    """The facts of one project, found when they are first asked for."""

    def __init__(self, project: Project, flow: Flow, files: tuple[str, ...]) -> None:
        self.project = project
        self.flow = flow
        self.definitions = {s: Definitions(s, flow.names[s], files) for s in project.sources}

    def calls(self) -> list[tuple[Source, cst.Call]]:
        """Every call of the program, without those in definitions an earlier run wrote."""
        return self._calls

    @cached_property
    def _calls(self) -> list[tuple[Source, cst.Call]]:
        return [
            (source, call)
            for source in self.project.sources
            for call in source.all(cst.Call)
            if not self.definitions[source].is_own(call)
        ]

    @cached_property
    def _callees(self) -> dict[str, list[tuple[Source, cst.Call]]]:
        """The calls of external things by their full name."""
        found: dict[str, list[tuple[Source, cst.Call]]] = {}
        for source, call in self._calls:
            found.setdefault(self.callee(source, call) or "", []).append((source, call))
        return found

    def calls_of(self, pattern: str) -> list[tuple[Source, cst.Call]]:
        """The calls of something external whose full name matches `pattern`."""
        found = re.compile(pattern)
        return [
            place
            for name, places in self._callees.items()
            if found.search(name)
            for place in places
        ]

    def callee(self, source: Source, call: cst.Call) -> str | None:
        """The full name of what is called, if it is external: `torch.save`."""
        return self.flow.qualified(source, call.func)

    def uses_own(self, source: Source, name: str) -> list[cst.Call]:
        """The calls, outside itself, of a definition an earlier run wrote."""
        own = self.definitions[source]
        written = own.name(name)
        if written not in own.own_names:
            return []
        calls = source.find(cst.Call, lambda call: dotted(call.func) == written)
        return [call for call in calls if not own.is_own(call)]

    # Models

    @cached_property
    def wraps(self) -> list[Wrap]:
        """The wraps, in the order of the files."""
        return [wrap for source, call in self.calls() if (wrap := self._wrap(source, call))]

    def _wrap(self, source: Source, call: cst.Call) -> Wrap | None:
        arg = argument(call, "module", 0) or argument(call, "model", 0)
        model = arg.value if arg else None
        for callee in self.flow.of(source, call.func):
            name = callee.name if isinstance(callee, External) else ""
            custom = None
            if isinstance(callee, Class):
                names = self.flow.bases(callee)[1]
                custom = callee
                name = next(
                    (n for n in names if DATA_PARALLEL.match(n) or DISTRIBUTED.search(n)), ""
                )
            if not (
                DATA_PARALLEL.match(name) or FUNCTIONAL.match(name) or DISTRIBUTED.search(name)
            ):
                continue
            is_functional = bool(FUNCTIONAL.match(name))
            is_done = bool(DISTRIBUTED.search(name))
            inner = self.flow.of(source, model)
            return Wrap(source, call, model, inner, is_functional, is_done, custom)
        return None

    @cached_property
    def own_wraps(self) -> list[tuple[Source, cst.Call]]:
        """Calls of the wrapping functions that an earlier run wrote."""
        return [
            (source, call)
            for source in self.project.sources
            for name in ("wrap_model", "shard_model")
            if name in self.definitions[source].available
            for call in self.uses_own(source, name)
        ]

    @cached_property
    def wrapped(self) -> Values:
        """Every value that is a wrapper or is put into one."""
        found: set[Value] = set()
        for wrap in self.wraps:
            if wrap.functional:
                continue
            found |= {v for v in wrap.inner if isinstance(v, Instance | Made)}
            found.add(Made(wrap.source, wrap.call, self.callee(wrap.source, wrap.call) or ""))
        for source, call in self.own_wraps:
            found |= self.flow.of(source, call) | self.flow.of(source, call.args[0].value)
        return frozenset(found)

    def may_be_wrapped(self, source: Source, node: cst.CSTNode | None) -> bool:
        """Whether an expression may be a wrapped model, or the model inside a wrapper."""
        return bool(self.flow.of(source, node) & self.wrapped)

    def is_module(self, value: Value) -> bool:
        """Whether a value is a torch module, or is called through `data_parallel` as one."""
        if value in self._called_parallel:
            return True
        if isinstance(value, Instance):
            return any(
                "Module" in n or n.startswith("torch.nn.") for n in self.flow.bases(value.cls)[1]
            )
        return isinstance(value, Made) and bool(
            value.name.startswith(("torch.nn.", "torchvision.models", "timm.", "transformers."))
            or DATA_PARALLEL.match(value.name)
        )

    @cached_property
    def _called_parallel(self) -> Values:
        inner = [wrap.inner for wrap in self.wraps if wrap.functional]
        return frozenset(v for values in inner for v in values if isinstance(v, Instance | Made))

    def models_in(self, source: Source, node: cst.CSTNode) -> Values:
        """The modules whose parameters, modules or state an expression reads."""
        found: set[Value] = set()
        for call in source.inside(node, cst.Call):
            if method_name(call) in _READS:
                values = self.flow.of(source, receiver(call))
                found |= {v for v in values if self.is_module(v) or v in self.wrapped}
        return frozenset(found)

    @cached_property
    def optimizers(self) -> list[tuple[Source, cst.Call]]:
        """The calls that make an optimizer."""
        pattern = r"^(torch\.optim|apex\.optimizers|transformers(\.\w+)*|timm\.optim)\.\w+$"
        return [
            (source, call)
            for source, call in self.calls_of(pattern)
            if "lr_scheduler" not in (self.callee(source, call) or "")
            and _OPTIMIZER.search(self.callee(source, call) or "")
        ]

    def is_optimizer(self, source: Source, node: cst.CSTNode | None) -> bool:
        """Whether an expression may be an optimizer."""
        made = {call for _, call in self.optimizers}
        return any(value.node in made for value in self.flow.made_by(source, node))

    # Steps

    @cached_property
    def backwards(self) -> list[tuple[Source, cst.Call]]:
        """The `.backward()` calls."""
        return [
            (s, c) for s, c in self.calls() if method_name(c) in ("backward", "manual_backward")
        ]

    @cached_property
    def callers(self) -> dict[cst.FunctionDef, list[tuple[Source, cst.Call]]]:
        """For each function of the project, the calls of it."""
        found: dict[cst.FunctionDef, list[tuple[Source, cst.Call]]] = {}
        for source, call in self.calls():
            for function in self.flow.callees.get(call, ()):
                found.setdefault(function.node, []).append((source, call))
        return found

    @cached_property
    def training_functions(self) -> frozenset[cst.FunctionDef]:
        """The functions in which `backward()` is called, directly or through others."""
        found: set[cst.FunctionDef] = set()
        queue = [source.function_of(call) for source, call in self.backwards]
        while queue:
            function = queue.pop()
            if function is None or function in found:
                continue
            found.add(function)
            queue += [source.function_of(call) for source, call in self.callers.get(function, ())]
        return frozenset(found)

    def reaches_backward(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether running `node` calls `backward()`, directly or through project functions."""
        if any(s is source and source.contains(node, call) for s, call in self.backwards):
            return True
        return any(
            function.node in self.training_functions
            for call in source.inside(node, cst.Call)
            for function in self.flow.callees.get(call, ())
        )

    def loops_around(self, source: Source, node: cst.CSTNode) -> list[cst.For | cst.While]:
        """The loops around a node in its function, the nearest first."""
        found = []
        function = source.function_of(node)
        for item in source.ancestors(node):
            if item is function:
                break
            if isinstance(item, cst.For | cst.While):
                found.append(item)
        return found

    # Data

    @cached_property
    def loading(self) -> Loading:
        """Where loaders are made and read."""
        return Loading(self)

    @cached_property
    def loaders(self) -> list[Loader]:
        """The calls that make a DataLoader."""
        return self.loading.loaders()

    def loaders_of(self, source: Source, node: cst.CSTNode | None) -> set[cst.Call]:
        """The DataLoader calls whose batches an iterable gives, through enumerate, tqdm, iter …"""
        made = {loader.call for loader in self.loaders}
        return self.loading.loaders_of(source, node) & made

    # The process

    @property
    def entry(self) -> Source:
        """The file that is started."""
        return self.project.entry

    @property
    def main_guard(self) -> cst.If | None:
        """The entry's `if __name__ == "__main__":`."""
        return main_guard(self.entry)

    @cached_property
    def process_groups(self) -> list[tuple[Source, cst.Call]]:
        """The calls of `init_process_group`, without those an earlier run wrote."""
        return self.calls_of(r"(^|\.)init_process_group$|(^|\.)init_distributed$")

    @cached_property
    def reaching(self) -> dict[Source, Reaching]:
        """For each file, which assignments a name can have its value from."""
        return {source: Reaching(source, names) for source, names in self.flow.names.items()}

    @cached_property
    def main_process(self) -> MainProcess:
        """Where the process's number decides who comes."""
        return MainProcess(self)

    def slot(self, source: Source, node: cst.Name) -> Slot:
        """The variable a name stands for."""
        return self.flow.names[source].slot(node, node.value)

    def reads_of(self, source: Source, name: cst.Name) -> list[cst.Name]:
        """The other places of the file where the same variable is named."""
        slot = self.slot(source, name)
        nodes = [n for n in source.all(cst.Name) if n.value == name.value and n is not name]
        return [n for n in nodes if source.is_variable(n) and self.slot(source, n) == slot]

    def functions(self) -> Iterator[Function]:
        """Every function of the project, without those an earlier run wrote."""
        for source in self.project.sources:
            own = self.definitions[source]
            for node in source.all(cst.FunctionDef):
                if not own.is_own(node):
                    owner = source.parent(source.parent(node) or node)
                    yield Function(source, node, owner if isinstance(owner, cst.ClassDef) else None)
