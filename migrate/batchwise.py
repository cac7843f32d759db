"""What an expression has to do with the batch: a mean over it, a sum over it, or nothing.

After the rewrite a process has a part of the batch. A mean over the parts is the whole batch's mean,
a sum of sums its sum; this file tells which of them a number is, by its arithmetic. It also tells
which loops the batch comes from, for only training loops deal batches out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import libcst as cst

from migrate.facts import Facts
from migrate.flow import call_arguments
from migrate.losses import loss_reduction
from migrate.reaching import Binding, Reaching
from migrate.source import Source
from migrate.syntax import dotted, literal, method_name, receiver
from migrate.values import Function, Instance


class Kind(Enum):
    """How a value depends on the batch."""

    PLAIN = "the same in every process"
    DATA = "one value per sample"
    MEAN = "a mean over the batch"
    RATIO = "a mean over a count that depends on the data"
    SUM = "a sum over the batch"
    COUNT = "the number of samples in the batch"
    INVERSE = "one over a number of samples"
    METRIC = "a number of the batch that is neither mean nor sum"
    UNKNOWN = "not known"


@dataclass(frozen=True)
class Batch:
    """What an expression has to do with the batch.

    Attributes:
        origins: the loops and calls of `next` that the batch comes from.
        number: it is a Python number, not a tensor.
        assumed: that it is a mean is likely, not proven.
        parts: a wrapped model gave one value for each device.
    """

    kind: Kind
    origins: frozenset[cst.CSTNode] = frozenset()
    number: bool = False
    assumed: bool = False
    parts: bool = False

    @property
    def is_mean(self) -> bool:
        """A mean over the process's part."""
        return self.kind in (Kind.MEAN, Kind.RATIO)

    @property
    def is_sum(self) -> bool:
        """A sum over the process's part, or the number of its samples."""
        return self.kind in (Kind.SUM, Kind.COUNT)

    @property
    def is_local(self) -> bool:
        """One number that can differ from process to process."""
        return self.is_mean or self.is_sum


PLAIN = Batch(Kind.PLAIN, number=True)
UNKNOWN = Batch(Kind.UNKNOWN)
NUMBERS = frozenset({"item", "tolist", "numpy"})
SAME_VALUE = frozenset(
    "item tolist detach cpu cuda float double half to type clone numpy data view reshape squeeze "
    "unsqueeze contiguous requires_grad_ long int scale backward".split()
)
_DIVIDES = {"div", "div_", "true_divide", "divide"}
_ARITHMETIC = {"add": "+", "add_": "+", "sub": "-", "mul": "*", "mul_": "*", "sub_": "-"}
_COLLECTIVE = ("all_reduce", "all_gather", "reduce", "all_gather_object", "all_gather_into_tensor")


class Batchwise:
    """Answers, for every expression of a program, what it has to do with the batch."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.flow = facts.flow
        self.reaching = {s: Reaching(s, self.flow.names[s]) for s in facts.project.sources}
        self._cache: dict[cst.CSTNode, Batch] = {}
        self._loaders = {id(loop.node): item for item in facts.loaders for loop in item.loops}

    # What is asked

    def of(self, source: Source, node: cst.CSTNode | None) -> Batch:
        """The answer for one expression."""
        if node is None:
            return PLAIN
        if node not in self._cache:
            self._cache[node] = Batch(Kind.PLAIN)  # a variable that is made of itself adds nothing
            self._cache[node] = self._evaluate(source, node)
        return self._cache[node]

    def dealt_out(self, origin: cst.CSTNode) -> bool | None:
        """Whether a loop's batches are parts: True or False where its loader is known."""
        loader = self._loaders.get(id(origin))
        return None if loader is None else loader.trains

    # Expressions

    def _evaluate(self, source: Source, node: cst.CSTNode) -> Batch:
        match node:
            case cst.Integer() | cst.Float() | cst.SimpleString():
                return PLAIN
            case cst.Name():
                return self._name(source, node)
            case cst.Attribute():
                return self._attribute(source, node)
            case cst.Subscript():
                return self._subscript(source, node)
            case cst.Call():
                return self._call(source, node)
            case cst.BinaryOperation():
                left, right = self.of(source, node.left), self.of(source, node.right)
                return combine(type(node.operator), left, right)
            case cst.UnaryOperation():
                return self.of(source, node.expression)
            case cst.IfExp():
                return join([self.of(source, node.body), self.of(source, node.orelse)])
            case cst.NamedExpr():
                return self.of(source, node.value)
            case cst.Comparison():
                parts = [node.left, *(item.comparator for item in node.comparisons)]
                return _elementwise([self.of(source, part) for part in parts])
            case cst.Tuple() | cst.List() | cst.Dict():
                return _container([self.of(source, element.value) for element in node.elements])
            case cst.GeneratorExp() | cst.ListComp():
                return self.of(source, node.elt)
            case _:
                return UNKNOWN

    def _name(self, source: Source, node: cst.Name) -> Batch:
        bindings = self.reaching[source].of(node)
        if not bindings or self._reduced_in_place(source, node):
            return Batch(Kind.PLAIN)
        value = join([self._binding(source, node, binding) for binding in bindings])
        if value.kind is Kind.PLAIN and any(_is_empty(getattr(b.node, "value", None)) for b in bindings):
            kept = self._appended(source, self.facts.slot(source, node))
            return join([PLAIN, *(self._appended_value(source, item) for _, item in kept)])
        is_plain_tensor = value.kind is Kind.PLAIN and not value.number
        is_open = value.kind in (Kind.DATA, Kind.UNKNOWN) or is_plain_tensor
        if is_open and self._is_scalar(source, node):
            return Batch(Kind.MEAN, value.origins, assumed=True)
        return value

    def _appended_value(self, source: Source, node: cst.CSTNode) -> Batch:
        value = self.of(source, node)
        return PLAIN if self.is_reduced_here(source, node, value) else value

    def _is_scalar(self, source: Source, node: cst.Name) -> bool:
        """Whether a part of the trained loss is one number: `.item()` or `.backward()` is called."""
        slot = self.facts.slot(source, node)
        return slot in self._scalars and self.is_trained(source, node)

    @cached_property
    def _scalars(self) -> set[object]:
        found: set[object] = set()
        for source, call in self.facts.calls():
            is_method = method_name(call) in ("item", "backward")
            first = receiver(call) if is_method else (call.args[0].value if call.args else None)
            if is_method or dotted(call.func) == "float" or method_name(call) == "scale":
                first = without_conversions(first)
                if isinstance(first, cst.Name):
                    found.add(self.facts.slot(source, first))
        for source in self.facts.project.sources:
            for shown in source.all(cst.FormattedStringExpression):
                if isinstance(shown.expression, cst.Name) and shown.format_spec:
                    found.add(self.facts.slot(source, shown.expression))
        return found

    def _binding(self, source: Source, read: cst.Name, binding: Binding) -> Batch:
        node = binding.node
        match node:
            case cst.For() | cst.CompFor():
                return self._loop(source, node, binding)
            case cst.Param():
                return self._parameter(source, node)
            case cst.AugAssign():
                return self._accumulated(source, node)
            case cst.Assign() | cst.AnnAssign() | cst.NamedExpr():
                if isinstance(node, cst.Assign) and own_sum(node) is not None:
                    return self._accumulated(source, node)
                value = self.element(source, node.value, binding.path)
                is_taken_apart = binding.path and not isinstance(node.value, cst.Tuple)
                if not is_taken_apart and value.is_mean and self.is_reduced_here(source, node, value):
                    is_kept = isinstance(node, cst.Assign) and self.keeps_loss(source, node)
                    return PLAIN if value.number or is_kept else value
                return value
            case _:
                return UNKNOWN

    def keeps_loss(self, source: Source, node: cst.Assign) -> bool:
        """`best = loss`, `value = loss.detach()`: the trained loss goes into another variable."""
        inner = without_conversions(node.value)
        target = node.targets[0].target
        return (
            isinstance(inner, cst.Name)
            and isinstance(target, cst.Name)
            and self.of(source, node.value).is_mean
            and self.is_trained(source, inner)
            and not self.is_trained(source, target)
        )

    def is_reduced_here(self, source: Source, node: cst.CSTNode, value: Batch) -> bool:
        """Whether a number of a part of the batch is taken at `node`, and not further out.

        In a function that only helps, such as one that computes an accuracy, it is not: what its
        callers give it may be whole.
        """
        dealt = {self.dealt_out(origin) for origin in value.origins}
        if not (value.is_local or value.kind is Kind.METRIC) or False in dealt:
            return False
        function = source.function_of(node)
        if not dealt:
            return value.is_mean and self.in_step(source, node)
        is_home = any(
            origin in source.spans and source.function_of(origin) is function
            for origin in value.origins
        )
        return is_home or function in self.facts.training_functions

    def in_step(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether the innermost loop, or the function where there is none, makes training steps."""
        loops = self.facts.loops_around(source, node)
        function = source.function_of(node)
        if not loops:
            return any(s is source and source.function_of(c) is function for s, c in self.facts.backwards)
        body = loops[0].body
        inner = [*source.inside(body, cst.For), *source.inside(body, cst.While)]
        return self.facts.reaches_backward(source, body) and not any(
            self.facts.reaches_backward(source, loop.body) for loop in inner
        )

    def is_whole(self, value: Batch) -> bool:
        """Whether the batch is known not to be dealt out: evaluation."""
        return bool(value.origins) and all(self.dealt_out(o) is False for o in value.origins)

    def _accumulated(self, source: Source, node: cst.AugAssign | cst.Assign) -> Batch:
        """A sum over steps: already global, unless it is a part of the loss that is trained."""
        target = node.target if isinstance(node, cst.AugAssign) else node.targets[0].target
        added = node.value if isinstance(node, cst.AugAssign) else own_sum(node)
        value = self.of(source, added)
        if not self.is_trained(source, target) and self.is_reduced_here(source, node, value):
            return PLAIN
        return value

    def element(self, source: Source, node: cst.CSTNode | None, path: tuple[int, ...]) -> Batch:
        """One element of a value that is taken apart."""
        if path and isinstance(node, cst.Tuple | cst.List) and path[0] < len(node.elements):
            return self.element(source, node.elements[path[0]].value, path[1:])
        if path and isinstance(node, cst.Call):
            returned = self._returned(source, node, path)
            if returned is not None:
                return returned
        return self.of(source, node)

    def _loop(self, source: Source, node: cst.For | cst.CompFor, binding: Binding) -> Batch:
        name = dotted(node.iter.func) if isinstance(node.iter, cst.Call) else None
        if binding.path == (0,) and _enumerates(node.iter):
            return PLAIN
        if id(node) in self._loaders:
            return Batch(Kind.DATA, frozenset([node]))
        if self._counts(source, node.iter):
            return PLAIN
        value = self.of(source, node.iter)
        if isinstance(node.iter, cst.Call) and name in ("enumerate", "zip", "tqdm"):
            value = join([self.of(source, arg.value) for arg in node.iter.args])
        if value.kind is Kind.PLAIN and isinstance(node, cst.For) and self._is_batch_loop(source, node):
            return Batch(Kind.DATA, frozenset([node]))
        return value

    def _counts(self, source: Source, node: cst.CSTNode) -> bool:
        """`range(n)`, also behind a progress bar and a variable."""
        if isinstance(node, cst.Name):
            values = [getattr(b.node, "value", None) for b in self.reaching[source].of(node)]
            return bool(values) and all(isinstance(v, cst.Call) and self._counts(source, v) for v in values)
        if not isinstance(node, cst.Call):
            return False
        name = (dotted(node.func) or "").rpartition(".")[2]
        return name in ("range", "trange", "count") or any(
            isinstance(arg.value, cst.Call) and self._counts(source, arg.value) for arg in node.args
        )

    def _is_batch_loop(self, source: Source, node: cst.For) -> bool:
        """A loop over something unknown, right around `backward()`."""
        is_list = isinstance(node.iter, cst.List | cst.Tuple | cst.Dict)
        if is_list or not self.facts.reaches_backward(source, node.body):
            return False
        inner = [loop for loop in source.inside(node.body, cst.For)]
        return not any(self.facts.reaches_backward(source, loop.body) for loop in inner)

    def _parameter(self, source: Source, node: cst.Param) -> Batch:
        function = source.around(node, cst.FunctionDef)
        if function is None:
            return UNKNOWN
        owner = source.parent(source.parent(function) or function)
        method_of = owner if isinstance(owner, cst.ClassDef) else None
        found = []
        for user, call in self.facts.callers.get(function, []):
            arg = call_arguments(call, Function(source, function, method_of), node.name.value)
            if arg is not None:
                found.append(self.of(user, arg.value))
        if not found and function.name.value == "forward":
            return Batch(Kind.DATA)
        return join(found) if found else Batch(Kind.PLAIN)

    def _attribute(self, source: Source, node: cst.Attribute) -> Batch:
        base = self.of(source, node.value)
        name = node.attr.value
        if name in SAME_VALUE:
            return base
        if base.kind is Kind.DATA:
            is_loss = name == "loss" or name.endswith("_loss")
            return replace(base, kind=Kind.MEAN, assumed=True) if is_loss else base
        if base.is_local:
            return base
        text = dotted(node) or ""
        if text.startswith("self."):
            values = [self.of(source, a.value) for a in self._assigned_in_class(source, node, text)]
            return join(values) if values else Batch(Kind.PLAIN)
        return Batch(Kind.PLAIN)

    def _assigned_in_class(self, source: Source, node: cst.CSTNode, text: str) -> list[cst.Assign]:
        cls = source.class_of(node)
        return [
            assign
            for assign in (source.inside(cls, cst.Assign) if cls else ())
            if any(dotted(target.target) == text for target in assign.targets)
        ]

    def _subscript(self, source: Source, node: cst.Subscript) -> Batch:
        base = self.of(source, node.value)
        index = node.slice[0].slice if len(node.slice) == 1 else None
        first = isinstance(index, cst.Index) and literal(index.value) == 0
        shape = isinstance(node.value, cst.Attribute) and node.value.attr.value == "shape"
        size = isinstance(node.value, cst.Call) and method_name(node.value) == "size"
        if (shape or size) and base.kind in (Kind.DATA, Kind.COUNT):
            return Batch(Kind.COUNT, base.origins, number=True) if first else PLAIN
        legacy = isinstance(node.value, cst.Attribute) and node.value.attr.value == "data"
        if base.is_local:
            return replace(base, number=base.number or (legacy and first))
        if isinstance(index, cst.Index) and isinstance(literal(index.value), int):
            position = literal(index.value)
            if isinstance(node.value, cst.Name) and isinstance(position, int):
                return self._element_of_name(source, node.value, position, base)
        return base

    def _element_of_name(self, source: Source, name: cst.Name, index: int, base: Batch) -> Batch:
        """`outputs[0]`, where `outputs` is what a function of the project returned."""
        found = []
        for binding in self.reaching[source].of(name):
            value = getattr(binding.node, "value", None)
            if isinstance(value, cst.Call | cst.Tuple) and not binding.path and index >= 0:
                found.append(self.element(source, value, (index,)))
            else:
                found.append(base)
        return join(found) if found else base

    # Calls

    def _call(self, source: Source, call: cst.Call) -> Batch:
        name = method_name(call)
        full = self.facts.callee(source, call) or ""
        values = [self.of(source, arg.value) for arg in call.args]
        if self.is_reduced_by(source, call):
            return PLAIN
        reduction = loss_reduction(self.flow, source, call)
        if reduction is not None:
            return self._loss(reduction, values)
        if full:
            value = self._function(source, call, full.rpartition(".")[2], values)
            return replace(value, number=True) if full.startswith("numpy.") and value.is_local else value
        base = self.of(source, receiver(call)) if name else UNKNOWN
        if base.kind is Kind.PLAIN and name in SAME_VALUE:
            return base
        if name and (base.kind in (Kind.DATA, Kind.METRIC) or base.is_local):
            return self._method(call, name, base, values)
        returned = self._returned(source, call, ())
        if returned is not None:
            return returned
        if name == "scale" and values:  # a GradScaler's
            return values[0]
        if name == "mean" and base.origins:
            return replace(base, kind=Kind.MEAN, assumed=True)
        return _elementwise([base, *values] if name else values)

    def _loss(self, reduction: str, values: list[Batch]) -> Batch:
        kind = {"sum": Kind.SUM, "none": Kind.DATA, "ratio": Kind.RATIO}.get(reduction, Kind.MEAN)
        return Batch(kind, _origins(values))

    def _function(self, source: Source, call: cst.Call, name: str, values: list[Batch]) -> Batch:
        first = values[0] if values else PLAIN
        if values and isinstance(call.args[0].value, cst.List | cst.Tuple):
            first = join([self.of(source, e.value) for e in call.args[0].value.elements])
        if name in ("float", "int", "round"):
            return replace(first, number=True)
        if name in ("len", "numel"):
            is_data = first.kind is Kind.DATA
            return Batch(Kind.COUNT, first.origins, number=True) if is_data else PLAIN
        if name in ("mean", "sum", "average") and values:
            return _over_batch(call, name, first, skip=1)
        if name in ("tensor", "as_tensor", "stack", "array", "cat", "Variable", "asarray"):
            return first
        if name == "accuracy_score":
            return Batch(Kind.MEAN, _origins(values), number=True)
        if (self.facts.callee(source, call) or "").startswith("sklearn.metrics."):
            return Batch(Kind.METRIC, _origins(values), number=True)
        if name == "next":
            return Batch(Kind.DATA, frozenset([call]))
        if name in ("range", "isinstance", "hasattr"):
            return PLAIN
        if name in ("add", "sub", "mul", "div") and len(values) > 1:
            kind = {"add": cst.Add, "sub": cst.Subtract, "mul": cst.Multiply, "div": cst.Divide}[name]
            return combine(kind, values[0], values[1])
        return _elementwise(values)

    def _method(self, call: cst.Call, name: str, base: Batch, values: list[Batch]) -> Batch:
        if base.kind is Kind.DATA:
            if name in ("size", "numel", "nelement"):
                index = literal(call.args[0].value) if call.args else 0
                return Batch(Kind.COUNT, base.origins, number=True) if index == 0 else PLAIN
            if name in ("mean", "sum"):
                return _over_batch(call, name, base, skip=0)
            if name in ("dim", "get_device"):
                return PLAIN
            return base if name not in ("max", "min", "norm", "item") or call.args else UNKNOWN
        if name in ("mean", "sum"):
            return _over_batch(call, name, base, skip=0)
        if name in SAME_VALUE:
            return replace(base, number=base.number or name in NUMBERS)
        if name in _DIVIDES or name in _ARITHMETIC:
            operators = {"+": cst.Add, "-": cst.Subtract, "*": cst.Multiply}
            operator = operators.get(_ARITHMETIC.get(name, ""), cst.Divide)
            return combine(operator, base, values[0] if values else UNKNOWN)
        return replace(base, kind=Kind.UNKNOWN)

    def _returned(self, source: Source, call: cst.Call, path: tuple[int, ...]) -> Batch | None:
        """What a function of the project gives, its batch being that of this call's arguments."""
        found = []
        for function in self._called(source, call):
            for statement in function.source.inside(function.node.body, cst.Return):
                own = function.source.function_of(statement) is function.node
                if own and statement.value is not None:
                    found.append(self._result(function.source, statement.value, path))
        if not found:
            return None
        value = join(found)
        values = [self.of(source, arg.value) for arg in call.args]
        base = self.of(source, receiver(call)) if method_name(call) else PLAIN
        origins = _origins([*values, base])
        is_gathered = self.facts.may_be_wrapped(source, call.func)
        return replace(value, origins=origins or value.origins, parts=is_gathered)

    def _result(self, source: Source, node: cst.BaseExpression, path: tuple[int, ...]) -> Batch:
        """What is left of a returned value after numbers in it were reduced."""
        if isinstance(node, cst.Tuple):
            if path and path[0] < len(node.elements):
                return self._result(source, node.elements[path[0]].value, path[1:])
            return _container([self._result(source, element.value, ()) for element in node.elements])
        value = self.element(source, node, path)
        is_extracted = value.number and not isinstance(node, cst.Name) and value.kind is not Kind.COUNT
        return PLAIN if is_extracted and self.is_reduced_here(source, node, value) else value

    def _called(self, source: Source, call: cst.Call) -> Iterable[Function]:
        found = set(self.flow.callees.get(call, ()))
        for value in self.flow.of(source, call.func):
            if isinstance(value, Instance):
                function = self.flow.method(value.cls, "forward")
                found |= {function} if function else set()
        return found

    def is_own_helper(self, source: Source, call: cst.Call) -> bool:
        """Whether a call is of a definition that an earlier run wrote."""
        own = self.facts.definitions[source].own
        name = dotted(call.func)
        return any(node.name.value == name for node in own)  # type: ignore[attr-defined]

    def is_reduced_by(self, source: Source, call: cst.Call) -> bool:
        """Whether a call gives a number of all processes: ours, or a function with a collective."""
        if self.is_own_helper(source, call):
            return True
        return any(self._reduces(function) for function in self.flow.callees.get(call, ()))

    def _reduces(self, function: Function) -> bool:
        if method_of_module(function):
            return False
        return any(
            (self.facts.callee(function.source, call) or "").startswith("torch.distributed.")
            and (self.facts.callee(function.source, call) or "").endswith(_COLLECTIVE)
            for call in function.source.inside(function.node, cst.Call)
        )

    def _reduced_in_place(self, source: Source, node: cst.Name) -> bool:
        """`dist.all_reduce(x)` before this read of `x`."""
        slot = self.facts.slot(source, node)
        for call in source.all(cst.Call):
            full = self.facts.callee(source, call) or ""
            if not (full.startswith("torch.distributed.") and full.endswith(_COLLECTIVE)):
                continue
            first = call.args[0].value if call.args else None
            if isinstance(first, cst.Name) and self.facts.slot(source, first) == slot:
                return source.span(call).start < source.span(node).start
        return False

    # The trained loss

    def is_trained(self, source: Source, target: cst.CSTNode) -> bool:
        """Whether a variable is a part of what `backward()` is called on."""
        if isinstance(target, cst.Subscript):
            target = target.value
        if isinstance(target, cst.Name):
            return self.facts.slot(source, target) in self._trained
        return (source, dotted(target)) in self._trained

    @cached_property
    def _trained(self) -> set[object]:
        """The variables that the receivers of `backward()` are computed from."""
        found: set[object] = set()
        seen: set[cst.CSTNode] = set()
        queue: list[tuple[Source, cst.CSTNode]] = []
        for source, call in self.facts.backwards:
            queue += [(source, node) for node in (receiver(call), *(a.value for a in call.args)) if node]
        while queue:
            source, node = queue.pop()
            queue += self._callee_returns(source, node, seen)
            for name in source.inside(node, cst.Name):
                if name.value in ("self",) or source.parent(name) is None:
                    continue
                slot = self.facts.slot(source, name)
                if slot in found:
                    continue
                found.add(slot)
                bindings = self.reaching[source].bindings.get(slot, [])
                queue += [(source, b.node.value) for b in bindings if _is_assignment(b.node)]
                queue += self._appended(source, slot)
            for attribute in source.inside(node, cst.Attribute):
                text = dotted(attribute) or ""
                if text.startswith("self.") and (source, text) not in found:
                    found.add((source, text))
                    assigned = self._assigned_in_class(source, attribute, text)
                    queue += [(source, item.value) for item in assigned]
        return found

    def _callee_returns(
        self, source: Source, node: cst.CSTNode, seen: set[cst.CSTNode]
    ) -> list[tuple[Source, cst.CSTNode]]:
        found: list[tuple[Source, cst.CSTNode]] = []
        for call in source.inside(node, cst.Call):
            for function in self._called(source, call):
                for item in function.source.inside(function.node.body, cst.Return):
                    if item.value is not None and item not in seen:
                        seen.add(item)
                        found.append((function.source, item.value))
        return found

    def _appended(self, source: Source, slot: object) -> list[tuple[Source, cst.CSTNode]]:
        found: list[tuple[Source, cst.CSTNode]] = []
        for call in source.all(cst.Call):
            owner = receiver(call)
            if method_name(call) in ("append", "extend", "update", "add") and isinstance(owner, cst.Name):
                if self.facts.slot(source, owner) == slot:
                    found += [(source, arg.value) for arg in call.args]
        return found


def _is_empty(node: cst.CSTNode | None) -> bool:
    """`[]`, `list()`."""
    is_list = isinstance(node, cst.List) and not node.elements
    return is_list or (isinstance(node, cst.Call) and dotted(node.func) == "list" and not node.args)


def _enumerates(node: cst.CSTNode) -> bool:
    """`enumerate(x)`, `tqdm(enumerate(x))`."""
    while isinstance(node, cst.Call):
        if dotted(node.func) == "enumerate":
            return True
        if not node.args:
            return False
        node = node.args[0].value
    return False


def method_of_module(function: Function) -> bool:
    """Whether a function is a method: those of models and trainers do more than reduce a number."""
    return function.owner is not None


def without_conversions(node: cst.CSTNode | None) -> cst.CSTNode | None:
    """`x` in `x.detach().cpu()` and `x.data`."""
    while True:
        func = node.func if isinstance(node, cst.Call) else node
        if not isinstance(func, cst.Attribute) or func.attr.value not in SAME_VALUE:
            return node
        node = func.value


def _is_assignment(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Assign | cst.AnnAssign | cst.AugAssign | cst.NamedExpr) and (
        node.value is not None
    )


def own_sum(node: cst.Assign) -> cst.BaseExpression | None:
    """`e` in `x = x + e` and in `x = e + x`."""
    target, value = node.targets[0].target, node.value
    if len(node.targets) != 1 or not isinstance(value, cst.BinaryOperation):
        return None
    if not isinstance(value.operator, cst.Add | cst.Subtract):
        return None
    if value.left.deep_equals(target):
        return value.right
    is_sum = isinstance(value.operator, cst.Add)
    return value.left if is_sum and value.right.deep_equals(target) else None


def join(values: list[Batch]) -> Batch:
    """What may be any of `values`."""
    if not values:
        return PLAIN
    kinds = {value.kind for value in values}
    kinds -= {Kind.PLAIN} if len(kinds) > 1 else set()
    if kinds == {Kind.MEAN, Kind.RATIO}:
        kinds = {Kind.RATIO}
    if kinds == {Kind.SUM, Kind.COUNT}:
        kinds = {Kind.SUM}
    kind = kinds.pop() if len(kinds) == 1 else Kind.UNKNOWN
    relevant = [v for v in values if v.kind is not Kind.PLAIN] or values
    numbers = bool(relevant) and all(value.number for value in relevant)
    return Batch(kind, _origins(values), numbers, any(value.assumed for value in values))


def _container(values: list[Batch]) -> Batch:
    """Several values together: not one number that could be reduced."""
    value = join(values)
    is_simple = value.kind in (Kind.PLAIN, Kind.DATA)
    return value if is_simple else Batch(Kind.UNKNOWN, value.origins)


def combine(operator: type[cst.CSTNode], left: Batch, right: Batch) -> Batch:
    """The result of arithmetic."""
    kinds = (left.kind, right.kind)
    both = Batch(Kind.UNKNOWN, left.origins | right.origins, left.number and right.number,
                 left.assumed or right.assumed)  # fmt: skip
    if left.kind is Kind.PLAIN and right.is_local:
        both = replace(both, number=right.number)
    if right.kind is Kind.PLAIN and left.is_local:
        both = replace(both, number=left.number)
    if Kind.DATA in kinds:
        return replace(both, kind=Kind.DATA, number=False)
    if kinds == (Kind.PLAIN, Kind.PLAIN):
        return replace(both, kind=Kind.PLAIN)
    if issubclass(operator, cst.Add | cst.Subtract):
        return replace(both, kind=_added(left, right))
    if issubclass(operator, cst.Multiply):
        return replace(both, kind=_multiplied(left.kind, right.kind))
    if issubclass(operator, cst.Divide):
        return replace(both, kind=_divided(left.kind, right.kind))
    if issubclass(operator, cst.Modulo) and left.kind is Kind.PLAIN:
        return replace(both, kind=Kind.UNKNOWN)
    return both


def _added(left: Batch, right: Batch) -> Kind:
    if left.is_mean or right.is_mean:
        if left.is_sum or right.is_sum or Kind.METRIC in (left.kind, right.kind):
            return Kind.METRIC
        if Kind.UNKNOWN in (left.kind, right.kind):
            return Kind.UNKNOWN
        return Kind.RATIO if Kind.RATIO in (left.kind, right.kind) else Kind.MEAN
    if left.is_sum and right.is_sum:
        return Kind.COUNT if left.kind is right.kind is Kind.COUNT else Kind.SUM
    if Kind.METRIC in (left.kind, right.kind):
        return Kind.METRIC
    if Kind.COUNT in (left.kind, right.kind):
        return Kind.UNKNOWN
    return Kind.METRIC if left.is_sum or right.is_sum else Kind.UNKNOWN


def _multiplied(left: Kind, right: Kind) -> Kind:
    if Kind.PLAIN in (left, right):
        return left if right is Kind.PLAIN else right
    pair = {left, right}
    if pair == {Kind.MEAN, Kind.COUNT} or pair == {Kind.RATIO, Kind.COUNT}:
        return Kind.SUM
    if pair == {Kind.SUM, Kind.INVERSE}:
        return Kind.MEAN
    return Kind.PLAIN if pair == {Kind.COUNT, Kind.INVERSE} else Kind.UNKNOWN


def _divided(left: Kind, right: Kind) -> Kind:
    if right is Kind.PLAIN:
        return left
    if right is Kind.COUNT:
        return {Kind.SUM: Kind.MEAN, Kind.COUNT: Kind.PLAIN, Kind.PLAIN: Kind.INVERSE}.get(
            left, Kind.UNKNOWN
        )
    if right is Kind.SUM and left in (Kind.SUM, Kind.COUNT):
        return Kind.RATIO
    return Kind.UNKNOWN


def _over_batch(call: cst.Call, name: str, base: Batch, skip: int) -> Batch:
    """`.mean()` and `.sum()`, over everything, over the batch, or over other dimensions."""
    if base.parts and base.is_local:
        return replace(base, kind=Kind.SUM if name == "sum" else Kind.MEAN, parts=False)
    if base.kind is not Kind.DATA:
        return base
    arg = next((a for a in call.args[skip:] if a.keyword is None or a.keyword.value in ("dim", "axis")), None)
    given = literal(arg.value) if arg is not None else 0
    if arg is not None and isinstance(arg.value, cst.Tuple | cst.List):
        given = 0 if any(literal(e.value) == 0 for e in arg.value.elements) else 1
    if given != 0 and given is not None:
        return base
    return replace(base, kind=Kind.SUM if name == "sum" else Kind.MEAN)


def _elementwise(values: list[Batch]) -> Batch:
    """A function of unknown effect on some values."""
    origins = _origins(values)
    if any(value.kind is Kind.DATA for value in values):
        return Batch(Kind.DATA, origins)
    if all(value.kind is Kind.PLAIN for value in values):
        return Batch(Kind.PLAIN)
    return Batch(Kind.UNKNOWN, origins)


def _origins(values: Iterable[Batch]) -> frozenset[cst.CSTNode]:
    return frozenset().union(*(value.origins for value in values)) if values else frozenset()

