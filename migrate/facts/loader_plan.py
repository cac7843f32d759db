"""What becomes of each training loader: which of its arguments decide the samples of a process.

The rules about loaders share this, so that a loader's samples, its batch size and its order change
together or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import libcst as cst

from migrate.facts.branches import can_run, known_arguments
from migrate.facts.loading import Loader, Loop
from migrate.facts.phases import Unknown, trained_keys
from migrate.once import once
from migrate.rule import Context
from migrate.source import Source
from migrate.syntax import argument, literal, method_name, receiver
from migrate.values import Class, External, Instance, Made, Values

POSITIONS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers",
             "collate_fn", "pin_memory", "drop_last")  # fmt: skip
_SENSITIVE = frozenset(
    {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
)
_PARAMETERS = frozenset(POSITIONS) | {
    "timeout", "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor",
    "persistent_workers", "pin_memory_device", "in_order",
}  # fmt: skip
_DISTRIBUTED = ("DistributedSampler", "DistributedWeightedSampler", "DistributedBatchSampler")
_OWN = ("ShardedSampler", "ShardedBatchSampler", "ShardedIterable")


class Way(Enum):
    """How a training loader is dealt out over the processes."""

    DONE = "it is already"
    SHUFFLE = "a sampler instead of shuffle="
    PLAIN_SAMPLER = "its RandomSampler or SequentialSampler becomes another"
    SAMPLER = "its sampler is wrapped"
    BATCH_SAMPLER = "its batch sampler is wrapped"
    ITERABLE = "its dataset is wrapped"
    KEYWORDS = "the dict of its arguments is converted"
    MANUAL = "not by an edit"


@dataclass(frozen=True, eq=False)
class Plan:
    """What becomes of one loader.

    Attributes:
        condition: an expression that is true where the call makes the loader that trains, if the
            same call makes others too.
        sampler: the RandomSampler or SequentialSampler call that can be changed.
        optional: the sampler can be None, under a condition of the script.
        problem: why there is no edit; `advice` is what to do.
    """

    loader: Loader
    way: Way
    condition: str = ""
    sampler: cst.Call | None = None
    optional: bool = False
    problem: str = ""
    advice: str = ""

    @property
    def source(self) -> Source:
        """The file of the loader."""
        return self.loader.source

    @property
    def call(self) -> cst.Call:
        """The call that makes the loader."""
        return self.loader.call

    def argument(self, name: str) -> cst.Arg | None:
        """An argument of the loader by its name."""
        return loader_argument(self.call, name)

    @property
    def edited(self) -> bool:
        """Whether the samples of this loader are dealt out by an edit of this run."""
        return self.way not in (Way.DONE, Way.MANUAL)


def loader_argument(call: cst.Call, name: str) -> cst.Arg | None:
    """An argument of a DataLoader call by its name."""
    return argument(call, name, POSITIONS.index(name) if name in POSITIONS else None)


@once
def plans(context: Context) -> tuple[Plan, ...]:
    """What becomes of every loader that trains."""
    every = (_Planner(context, loader).plan() for loader in context.facts.loaders if loader.trains)
    return tuple(plan for plan in every if plan is not None)


class _NotTraining(Exception):
    """What a call makes is trained on nowhere, once its callers are told apart."""


class _Planner:
    def __init__(self, context: Context, loader: Loader) -> None:
        self.context = context
        self.loader = loader
        self.source, self.call = loader.source, loader.call
        self.flow = context.flow

    def plan(self) -> Plan | None:
        """The plan for this loader; None if the calls for training never get to it."""
        condition, mixed = "", ""
        try:
            condition = self._condition()
        except _NotTraining:
            return None
        except Unknown as unknown:
            mixed = str(unknown)
        if self._is_done():
            return Plan(self.loader, Way.DONE)
        odd = self._odd_signature()
        if odd or mixed:
            return self._manual(odd or mixed, "" if odd else "make them in two calls, or ")
        way, sampler, problem = self._way()
        if problem:
            return self._manual(problem, "")
        if condition and way not in (Way.SHUFFLE, Way.SAMPLER, Way.BATCH_SAMPLER):
            return self._manual("one call makes loaders for training and for evaluation", "")
        optional = way is Way.SAMPLER and self._may_be_none()
        return Plan(self.loader, way, condition, sampler, optional)

    def _manual(self, problem: str, first: str) -> Plan:
        advice = (
            f"{first}give the loader that trains sampler=DistributedSampler(dataset, shuffle=…) "
            "and its part of the batch size, and call its set_epoch(epoch) in every epoch"
        )
        return Plan(self.loader, Way.MANUAL, problem=problem, advice=advice)

    def _argument(self, name: str) -> cst.Arg | None:
        return loader_argument(self.call, name)

    def _values(self, name: str) -> Values:
        arg = self._argument(name)
        return self.flow.of(self.source, arg.value if arg else None)

    def _is_done(self) -> bool:
        values = set(
            self._values("sampler") | self._values("batch_sampler") | self._values("dataset")
        )
        for arg in self.call.args:
            if arg.star == "**" and self._is_own_call(arg.value, "sharded_arguments"):
                return True
            if arg.star == "**":
                given = self.flow.of(self.source, arg.value)
                values |= self.flow.elements(given, "['sampler']")
        return any(
            (isinstance(v, Made) and v.name.endswith(_DISTRIBUTED))
            or (isinstance(v, Instance) and self._is_distributed_class(v.cls))
            for v in values
        )

    def _is_distributed_class(self, cls: Class) -> bool:
        own = self.context.facts.definitions[cls.source]
        if cls.node in own.own:
            return cls.node.name.value.rstrip("_") in _OWN
        return cls.node.name.value.startswith("Distributed") or any(
            name.endswith(_DISTRIBUTED) for name in self.flow.bases(cls)[1]
        )

    def _is_own_call(self, node: cst.CSTNode, name: str) -> bool:
        return any(call is node for call in self.context.facts.uses_own(self.source, name))

    def _odd_signature(self) -> str:
        """Why the arguments cannot be read as those of torch's DataLoader, if so."""
        for callee in self.flow.of(self.source, self.call.func):
            if isinstance(callee, Class) and self._own_init(callee):
                return f"{callee.node.name.value} has an __init__ of its own"
            if isinstance(callee, External) and not callee.name.startswith("torch.utils.data."):
                names = [arg.keyword.value for arg in self.call.args if arg.keyword]
                known = callee.name.startswith(("torch_geometric.", "monai.data.")) or (
                    callee.name.endswith("DataLoader") and set(names) <= _PARAMETERS
                )
                if not known or len(self.call.args) - len(names) > 3:
                    return f"{callee.name} is not torch's DataLoader"
        if any(arg.star == "*" for arg in self.call.args):
            return "its arguments are hidden behind a *"
        if self._argument("dataset") is None:
            return "its dataset cannot be seen"
        return ""

    def _own_init(self, cls: Class) -> bool:
        init = self.flow.method(cls, "__init__")
        if init is None:
            return False
        params = init.node.params
        return not (isinstance(params.star_arg, cst.Param) and params.star_kwarg) or bool(
            params.params[1:] or params.kwonly_params
        )

    # Which samples

    def _way(self) -> tuple[Way, cst.Call | None, str]:
        """The way, the sampler call to change if any, and the problem if there is one."""
        keywords = self._keywords()
        if isinstance(keywords, str):
            return Way.MANUAL, None, keywords
        if keywords:
            return self._keywords_way(keywords)
        if self._is_given("batch_sampler"):
            return Way.BATCH_SAMPLER, None, ""
        problem = self._batch_problem()
        if problem:
            return Way.MANUAL, None, problem
        if self._is_iterable():
            return Way.ITERABLE, None, ""
        if self._is_given("sampler"):
            call = self._plain_sampler()
            return (Way.PLAIN_SAMPLER, call, "") if call else (Way.SAMPLER, None, "")
        return Way.SHUFFLE, None, ""

    def _is_given(self, name: str) -> bool:
        arg = self._argument(name)
        return arg is not None and literal(arg.value) is not None

    def _batch_problem(self) -> str:
        arg = self._argument("batch_size")
        size = literal(arg.value) if arg else 1
        if size is None:
            return "batch_size=None: its dataset makes the batches"
        is_one = size == 1 and self.context.options.batch == "global"
        return "a batch of one sample cannot be split over processes" if is_one else ""

    def _is_iterable(self) -> bool:
        for value in self._values("dataset"):
            if isinstance(value, Instance):
                names = self.flow.bases(value.cls)[1]
                if any(name.endswith(("IterableDataset", "IterDataPipe")) for name in names):
                    return True
        return False

    def _plain_sampler(self) -> cst.Call | None:
        """The call of a RandomSampler or SequentialSampler that only this loader uses."""
        arg = self._argument("sampler")
        values = self._values("sampler")
        if arg is not None and isinstance(arg.value, cst.Name) and len(values) > 1:
            bound = self.context.facts.reaching[self.source].of(arg.value)
            nodes = [b.node.value for b in bound if isinstance(b.node, cst.Assign) and not b.path]
            if len(nodes) == len(bound) == 1:
                values = self.flow.of(self.source, nodes[0])
        if len(values) != 1:
            return None
        (value,) = values
        if not isinstance(value, Made) or not isinstance(value.node, cst.Call):
            return None
        is_plain = value.name.endswith((".RandomSampler", ".SequentialSampler"))
        if not is_plain or len(value.node.args) != 1 or value.source is not self.source:
            return None
        users = [
            loader
            for loader in self.context.facts.loaders
            for arg in [loader_argument(loader.call, "sampler")]
            if arg and value in self.flow.of(loader.source, arg.value)
        ]
        is_shared = len(values) == len(self._values("sampler")) and len(users) > 1
        return None if is_shared else value.node

    def _may_be_none(self) -> bool:
        """Whether the sampler is None under some condition."""
        arg = self._argument("sampler")
        node = arg.value if arg else None
        values = self.context.facts.loading.assigned(self.source, node) if isinstance(
            node, cst.Name) else []  # fmt: skip
        for value in [node, *values]:
            ends = [value.body, value.orelse] if isinstance(value, cst.IfExp) else [value]
            if any(literal(end) is None for end in ends):
                return True
        return False

    # Arguments in a dict

    def _keywords(self) -> set[str] | str:
        """The keys of `**arguments` that matter here; a text if they cannot be seen."""
        found: set[str] = set()
        for arg in self.call.args:
            if arg.star != "**":
                continue
            keys = self._keys(arg.value)
            if keys is None:
                return f"**{self.source.code(arg.value)} hides its arguments"
            found |= keys & _SENSITIVE
        return found

    def _keys(self, node: cst.BaseExpression) -> set[str] | None:
        values = self.flow.of(self.source, node)
        if not values:
            return None
        found: set[str] = set()
        for value in values:
            keys = _written_keys(value)
            if keys is None:
                return None
            found |= keys | self.flow.keys(value)
        for source, call in self.context.facts.calls():
            if method_name(call) not in ("update", "setdefault"):
                continue
            if self.flow.of(source, receiver(call)) & values:
                more = [self._update_keys(source, arg) for arg in call.args]
                if None in more or method_name(call) == "setdefault":
                    return None
                found = found.union(*(keys or set() for keys in more))
        return found

    def _update_keys(self, source: Source, arg: cst.Arg) -> set[str] | None:
        if arg.keyword is not None:
            return {arg.keyword.value}
        found: set[str] = set()
        values = self.flow.of(source, arg.value)
        for value in values:
            keys = _written_keys(value)
            if keys is None:
                return None
            found |= keys | self.flow.keys(value)
        return found if values else None

    def _keywords_way(self, keys: set[str]) -> tuple[Way, cst.Call | None, str]:
        given = {name for name in _SENSITIVE - {"dataset"} if self._argument(name)}
        stars = [arg for arg in self.call.args if arg.star]
        if keys & {"sampler", "batch_sampler", "dataset"} or given or len(stars) > 1:
            return Way.MANUAL, None, f"its arguments come from {self.source.code(stars[0].value)}"
        if self._is_iterable() or self.context.options.batch == "per-rank":
            return Way.MANUAL, None, f"its arguments come from {self.source.code(stars[0].value)}"
        return Way.KEYWORDS, None, ""

    # One call for several phases

    def _condition(self) -> str:
        """When the call makes the loader that trains; empty if it always does."""
        inner = self.source.around(self.call, cst.DictComp, cst.FunctionDef, cst.ClassDef)
        if isinstance(inner, cst.DictComp):
            return self._comprehension_condition(inner)
        others = [loop for loop in self.loader.loops if not loop.trains and _evaluates(loop)]
        function = self.source.function_of(self.call)
        callers = self.context.facts.callers.get(function, []) if function else []
        if not others or function is None or len(callers) < 2:
            return ""
        return self._parameter_condition(function, callers)

    def _comprehension_condition(self, comp: cst.DictComp) -> str:
        loops = [loop for loop in self.loader.loops if loop.trains]
        keys = trained_keys(self.context, loops)
        every = self.context.facts.loading.strings(self.source, comp.key) if isinstance(
            comp.key, cst.Name) else []  # fmt: skip
        if not every:
            return ""
        if set(every) <= keys:
            return ""
        name = self.source.code(comp.key)
        if len(keys) == 1:
            return f"{name} == {_quoted(self.source, next(iter(keys)))}"
        inside = ", ".join(_quoted(self.source, key) for key in every if key in keys)
        return f"{name} in ({inside})"

    def _parameter_condition(
        self, function: cst.FunctionDef, callers: list[tuple[Source, cst.Call]]
    ) -> str:
        """A parameter that tells the calls that want a training loader from the others."""
        training: list[dict[str, object]] = []
        others: list[dict[str, object]] = []
        reached: list[Loop] = []
        loops = self.context.facts.loading.loops_of
        for _, call in callers:
            callee = next(f for f in self.flow.callees[call] if f.node is function)
            known = known_arguments(call, callee, {})
            if not can_run(self.source, self.call, known):
                continue
            its = loops.get(call, [])
            trains = any(loop.trains for loop in its)
            reached += its
            (training if trains else others).append(known)
        if not reached:
            raise Unknown(f"{function.name.value} makes loaders for training and evaluation")
        if not training:
            raise _NotTraining
        self.loader = Loader(self.source, self.call, tuple(dict.fromkeys(reached)))
        for name in training[0] if training and others else ():
            wanted = training[0][name]
            same = all(known.get(name, ...) == wanted for known in training)
            apart = all(known.get(name, wanted) != wanted for known in others)
            if same and apart and isinstance(wanted, bool | str):
                if isinstance(wanted, bool):
                    return name if wanted else f"not {name}"
                return f"{name} == {_quoted(self.source, wanted)}"
        if others:
            raise Unknown(f"{function.name.value} makes loaders for training and evaluation")
        return ""


def _written_keys(value: object) -> set[str] | None:
    """The keys of a dict that is written out without `**`; None if it is something else."""
    node = value.node if isinstance(value, Made) else None
    if isinstance(node, cst.Dict):
        keys = [literal(e.key) if isinstance(e, cst.DictElement) else ... for e in node.elements]
        return {key for key in keys if isinstance(key, str)} if ... not in keys else None
    is_dict = isinstance(value, Made) and value.name == "dict"
    if is_dict and isinstance(node, cst.Call) and all(arg.keyword for arg in node.args):
        return {arg.keyword.value for arg in node.args if arg.keyword}
    return None


def _evaluates(loop: Loop) -> bool:
    """Whether a loop that does not train is more than handing batches on."""
    return isinstance(loop.node, cst.For | cst.CompFor) and not loop.source.inside(
        loop.node, cst.Yield
    )


def _quoted(source: Source, text: str) -> str:
    """A string in the quotes that the file prefers."""
    double = source.text.count('"') > source.text.count("'")
    return f'"{text}"' if double else f"'{text}'"


def evaluating_loops(loader: Loader) -> list[Loop]:
    """The loops in which a training loader is read without training."""
    return [loop for loop in loader.loops if not loop.trains and _evaluates(loop)]
