"""Questions that the rules about hazards share: forwards of parallel models, and what runs when."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from weakref import WeakKeyDictionary

import libcst as cst

from migrate.facts.batchwise import Batchwise
from migrate.facts.batchwise import batchwise as shared_batchwise
from migrate.facts.leaving import Reductions
from migrate.facts.models import bare_models
from migrate.facts.program import DATA_PARALLEL, DISTRIBUTED, FUNCTIONAL
from migrate.facts.reaching import Binding
from migrate.facts.state import bare_values
from migrate.flow import SAME_OBJECT
from migrate.rule import Context
from migrate.source import Source
from migrate.syntax import child_nodes, dotted, method_name, receiver
from migrate.values import Class, Function, Instance, Made, Value, Values

_NO_GRAPH = frozenset({"detach", "item", "numpy", "tolist", "size", "argmax", "backward", "shape"})
_QUIET = re.compile(r"no_grad|inference_mode|set_grad_enabled\(False\)")
_KNOWN: WeakKeyDictionary[Context, Training] = WeakKeyDictionary()


def training(context: Context) -> Training:
    """The answers for one program, found once."""
    if context not in _KNOWN:
        _KNOWN[context] = Training(context)
    return _KNOWN[context]


class Training:
    """Which calls run a parallel model, what depends on them, and what runs after the wrap."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.facts = context.facts
        self.flow = context.flow
        self.models: Values = context.facts.wrapped | bare_values(context)
        self.reaching = context.facts.reaching

    @cached_property
    def batchwise(self) -> Batchwise:
        """What the numbers of the program have to do with the batch."""
        return shared_batchwise(self.facts)

    @cached_property
    def reduced(self) -> dict[cst.CSTNode, Source]:
        """The numbers that are made those of the whole batch (MG401)."""
        return {
            item.node: item.source
            for item in Reductions(self.facts, self.batchwise).all()
            if not item.obstacle
        }

    # Forwards

    def is_model(self, source: Source, node: cst.CSTNode | None) -> bool:
        """Whether an expression may be a parallel model."""
        return bool(self.flow.of(source, node) & self.models)

    def is_wrapper(self, source: Source, node: cst.CSTNode | None) -> bool:
        """Whether an expression may be a wrapper, the script's own or one that is written."""
        values = self.flow.of(source, node)
        if values & bare_values(self.context):
            return self.context.target.has_wrapper
        made = [v.name for v in values if isinstance(v, Made)]
        return any(DATA_PARALLEL.match(n) or DISTRIBUTED.search(n) for n in made)

    def model_of(self, source: Source, call: cst.Call) -> Values:
        """The parallel models that a call may run forward."""
        func: cst.BaseExpression = call.func
        if isinstance(func, cst.Attribute):
            if func.attr.value == "forward":
                func = func.value
            elif func.attr.value in SAME_OBJECT and func.attr.value != "module":
                return frozenset()
        found = self.flow.of(source, func) & self.models
        if not found and call.args and FUNCTIONAL.match(self.facts.callee(source, call) or ""):
            found = self.flow.of(source, call.args[0].value) & self.models
        found |= frozenset(v for value in found for v in self._inner.get(value, ()))
        return frozenset(v for v in found if isinstance(v, Instance | Made))

    @cached_property
    def _inner(self) -> dict[Value, Values]:
        """For each wrapper, what it may wrap."""
        found: dict[Value, Values] = {}
        for wrap in self.facts.wraps:
            for value in self.flow.of(wrap.source, wrap.call):
                found[value] = found.get(value, frozenset()) | (wrap.inner & self.models)
        return found

    def forwards(self, source: Source, root: cst.CSTNode) -> list[cst.Call]:
        """The forward passes of parallel models in a piece of code."""
        return [call for call in source.inside(root, cst.Call) if self.model_of(source, call)]

    def behind(self, source: Source, node: cst.CSTNode) -> dict[cst.Call, Values]:
        """The forwards, in the same function, whose graph an expression's value belongs to."""
        found: dict[cst.Call, Values] = {}
        self._behind(source, node, found, set())
        return found

    def calls_behind(self, source: Source, node: cst.CSTNode) -> set[cst.CSTNode]:
        """The calls, in the same function, that an expression's value comes from."""
        seen: set[cst.CSTNode] = set()
        self._behind(source, node, {}, seen)
        return {item for item in seen if isinstance(item, cst.Call)}

    def _behind(
        self,
        source: Source,
        node: cst.CSTNode,
        found: dict[cst.Call, Values],
        seen: set[cst.CSTNode],
    ) -> None:
        if node in seen:
            return
        seen.add(node)
        if isinstance(node, cst.Arg):
            self._behind(source, node.value, found, seen)
            return
        if isinstance(node, cst.Attribute):
            if node.attr.value in (*_NO_GRAPH, "data"):
                return
            self._behind(source, node.value, found, seen)
            return
        if isinstance(node, cst.Call):
            if method_name(node) in _NO_GRAPH:
                return
            models = self.model_of(source, node)
            if models and not without_gradients(source, node):
                found[node] = models
        if isinstance(node, cst.Name):
            for binding in self.reaching[source].of(node):
                self._bound(source, binding, found, seen)
            return
        for child in child_nodes(node):
            self._behind(source, child, found, seen)

    def _bound(
        self,
        source: Source,
        binding: Binding,
        found: dict[cst.Call, Values],
        seen: set[cst.CSTNode],
    ) -> None:
        """What the value of a binding depends on."""
        node = binding.node
        if isinstance(node, cst.AugAssign):
            self._behind(source, node.target, found, seen)
        if isinstance(node, cst.Assign | cst.AnnAssign | cst.AugAssign | cst.NamedExpr):
            value: cst.BaseExpression | None = node.value
            for index in binding.path:
                if isinstance(value, cst.Tuple) and index < len(value.elements):
                    value = value.elements[index].value
            if value is not None and not without_gradients(source, node):
                self._behind(source, value, found, seen)
        elif isinstance(node, cst.WithItem):
            self._behind(source, node.item, found, seen)
        elif isinstance(node, cst.For | cst.CompFor):
            self._behind(source, node.iter, found, seen)

    # When something runs

    @cached_property
    def _places(self) -> list[tuple[Source, cst.CSTNode]]:
        """The statements after which models are parallel."""
        places: list[tuple[Source, cst.CSTNode]] = [
            (w.source, w.call)
            for w in self.facts.wraps
            if not (w.functional or self.facts.main_process.without_processes(w.source, w.call))
        ]
        places += self.facts.own_wraps
        places += [(b.source, b.statement) for b in bare_models(self.facts)]
        for source, place in places:  # grows: who calls a function that wraps has a wrapped model
            function = source.function_of(place)
            calls = self.facts.callers.get(function, []) if function is not None else []
            places += [call for call in calls if call not in places]
        return places

    def is_after_wrap(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether a place runs when a model is parallel: below a wrap, or called from below one."""
        return self._after(source, node, set())

    def _after(self, source: Source, node: cst.CSTNode, seen: set[cst.CSTNode]) -> bool:
        function = source.function_of(node)
        start = source.span(node).start
        for home, place in self._places:
            if home is source and source.function_of(place) is function:
                below = source.span(place).stop <= start
                if below and not are_exclusive(source, place, node):
                    return True
        if function is None or function in seen:
            return False
        seen.add(function)
        if self.is_called_by_wrapper(source, function):
            return True
        return any(
            self._after(user, call, seen) for user, call in self.calls_of(source, function)
        ) or self._is_other_method(source, function)

    def _is_other_method(self, source: Source, function: cst.FunctionDef) -> bool:
        """Whether a method of a class whose `__init__` makes its model parallel runs after it."""
        cls = source.class_of(function)
        if cls is None or function.name.value == "__init__":
            return False
        for home, place in self._places:
            maker = home.function_of(place) if home is source else None
            if maker is not None and maker.name.value == "__init__" and home.class_of(maker) is cls:
                return function not in self.called_by(source, maker)
        return False

    def called_by(self, source: Source, root: cst.CSTNode) -> set[cst.FunctionDef]:
        """The functions that a piece of code calls, directly or through others."""
        found: set[cst.FunctionDef] = set()
        queue: list[tuple[Source, cst.CSTNode]] = [(source, root)]
        while queue:
            home, node = queue.pop()
            for call in home.inside(node, cst.Call):
                for callee in self.flow.callees.get(call, ()):
                    if callee.node not in found:
                        found.add(callee.node)
                        queue.append((callee.source, callee.node.body))
        return found

    def is_called_by_wrapper(self, source: Source, function: cst.FunctionDef) -> bool:
        """Whether it is a `train()` or `forward()` of a module of the project."""
        if function.name.value not in ("train", "eval", "forward"):
            return False
        cls = source.class_of(function)
        values = self.flow.of(source, cls.name) if cls is not None else frozenset[Value]()
        return any(
            self.facts.is_module(Instance(v, source, None)) for v in values if isinstance(v, Class)
        )

    def calls_of(self, source: Source, function: cst.FunctionDef) -> list[tuple[Source, cst.Call]]:
        """The calls of a function, and those of `model.apply(function)`."""
        return [*self.facts.callers.get(function, ()), *self._applied.get(function, ())]

    @cached_property
    def _applied(self) -> dict[cst.FunctionDef, list[tuple[Source, cst.Call]]]:
        found: dict[cst.FunctionDef, list[tuple[Source, cst.Call]]] = {}
        for source, call in self.facts.calls():
            if method_name(call) == "apply" and len(call.args) == 1:
                for value in self.flow.of(source, call.args[0].value):
                    if isinstance(value, Function):
                        found.setdefault(value.node, []).append((source, call))
        return found

    def runs_each_step(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether a place runs inside a loop that trains, or is called from inside one."""
        return self._each_step(source, node, set())

    def _each_step(self, source: Source, node: cst.CSTNode, seen: set[cst.CSTNode]) -> bool:
        loops = self.facts.loops_around(source, node)
        if any(self.facts.reaches_backward(source, loop.body) for loop in loops):
            return True
        function = source.function_of(node)
        makes = any(
            wrap.source is source and source.function_of(wrap.call) is function
            for wrap in self.facts.wraps
        )
        if function is None or function in seen or makes:
            return False
        seen.add(function)
        return any(self._each_step(s, call, seen) for s, call in self.calls_of(source, function))


def without_gradients(source: Source, node: cst.CSTNode) -> bool:
    """Whether a node runs under `no_grad`, by `with` or by a decorator of its function."""
    for item in source.ancestors(node):
        if isinstance(item, cst.With) and any(
            _QUIET.search(source.code(i.item)) for i in item.items
        ):
            return True
        if isinstance(item, cst.FunctionDef):
            return any(_QUIET.search(source.code(d.decorator)) for d in item.decorators)
    return False


def are_exclusive(source: Source, first: cst.CSTNode, second: cst.CSTNode) -> bool:
    """Whether two places are in different branches of one `if`."""
    above = dict(_path(source, first))
    for item, inner in _path(source, second):
        if item in above:
            return isinstance(item, cst.If | cst.IfExp | cst.Try) and above[item] is not inner
    return False


def _path(source: Source, node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    inner = node
    for item in source.ancestors(node):
        yield item, inner
        inner = item


def base_of(node: cst.BaseExpression | None) -> str:
    """The text of `model` in `model.module`."""
    while isinstance(node, cst.Attribute) and node.attr.value == "module":
        node = node.value
    return dotted(node) or ""


def parameters_of(call: cst.CSTNode | None) -> cst.BaseExpression | None:
    """`m` in `m.parameters()`, `m.named_parameters()`, `m.modules()`, also inside `list(…)`."""
    while isinstance(call, cst.Call) and call.args and method_name(call) is None:
        call = call.args[0].value
    if isinstance(call, cst.Call) and method_name(call) in (
        "parameters", "named_parameters", "modules", "named_modules", "children", "named_children",
    ):  # fmt: skip
        return receiver(call)
    return None
