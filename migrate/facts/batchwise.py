"""What an expression has to do with the batch: a mean over it, a sum over it, or nothing.

After the rewrite a process has a part of the batch. A mean over the parts is the whole batch's
mean, a sum of sums its sum; this file tells which of them a number is, by its arithmetic. Which
numbers are of a part at all, and where they are reduced, is in `reduced`.
"""

from __future__ import annotations

from dataclasses import replace

import libcst as cst

from migrate.facts.kinds import (
    PLAIN,
    UNKNOWN,
    Batch,
    Kind,
    combine,
    container,
    elementwise,
    join,
    origins_of,
    over_batch,
)  # fmt: skip
from migrate.facts.losses import loss_reduction
from migrate.facts.program import Facts
from migrate.facts.reaching import Binding
from migrate.facts.reduced import Reduced
from migrate.facts.trained import SAME_VALUE, own_sum, without_conversions
from migrate.flow import call_arguments
from migrate.once import once
from migrate.source import Source
from migrate.syntax import dotted, literal, method_name, receiver
from migrate.values import Function

NUMBERS = frozenset({"item", "tolist", "numpy"})
_OPERATORS: dict[type[cst.CSTNode], str] = {
    cst.Add: "+", cst.Subtract: "-", cst.Multiply: "*", cst.Divide: "/",
}  # fmt: skip
_METHODS = {"add": "+", "add_": "+", "sub": "-", "sub_": "-", "mul": "*", "mul_": "*", "div": "/",
            "div_": "/", "true_divide": "/", "divide": "/"}  # fmt: skip


class Batchwise(Reduced):
    """Answers, for every expression of a program, what it has to do with the batch."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._cache: dict[cst.CSTNode, Batch] = {}
        self._taken: dict[tuple[cst.CSTNode, tuple[int, ...]], Batch] = {}

    # What is asked

    def of(self, source: Source, node: cst.CSTNode | None) -> Batch:
        """The answer for one expression."""
        if node is None:
            return PLAIN
        if node not in self._cache:
            self._cache[node] = Batch(Kind.PLAIN)  # a variable that is made of itself adds nothing
            self._cache[node] = self._evaluate(source, node)
        return self._cache[node]

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
                return combine(_OPERATORS.get(type(node.operator), ""), left, right)
            case cst.UnaryOperation():
                return self.of(source, node.expression)
            case cst.IfExp():
                return join([self.of(source, node.body), self.of(source, node.orelse)])
            case cst.NamedExpr():
                return self.of(source, node.value)
            case cst.Comparison():
                parts = [node.left, *(item.comparator for item in node.comparisons)]
                return elementwise([self.of(source, part) for part in parts])
            case cst.Tuple() | cst.List() | cst.Dict():
                return container([self.of(source, element.value) for element in node.elements])
            case cst.GeneratorExp() | cst.ListComp():
                return self.of(source, node.elt)
            case _:
                return UNKNOWN

    def _name(self, source: Source, node: cst.Name) -> Batch:
        bindings = self.reaching[source].of(node)
        if not bindings or self.is_reduced_in_place(source, node):
            return Batch(Kind.PLAIN)
        value = join([self._binding(source, node, binding) for binding in bindings])
        if value.kind is Kind.PLAIN and any(
            _is_empty(getattr(b.node, "value", None)) for b in bindings
        ):
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
                if (
                    not is_taken_apart
                    and value.is_mean
                    and self.is_reduced_here(source, node, value)
                ):
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
        if not path or not isinstance(node, cst.Call):
            return self.of(source, node)
        if (node, path) not in self._taken:
            self._taken[node, path] = PLAIN  # a function that returns what it gives itself
            returned = self._returned(source, node, path)
            self._taken[node, path] = self.of(source, node) if returned is None else returned
        return self._taken[node, path]

    def _loop(self, source: Source, node: cst.For | cst.CompFor, binding: Binding) -> Batch:
        name = dotted(node.iter.func) if isinstance(node.iter, cst.Call) else None
        if binding.path == (0,) and _enumerates(node.iter):
            return PLAIN
        if node in self.loops:
            return Batch(Kind.DATA, frozenset([node]))
        if self._counts(source, node.iter):
            return PLAIN
        value = self.of(source, node.iter)
        if isinstance(node.iter, cst.Call) and name in ("enumerate", "zip", "tqdm"):
            value = join([self.of(source, arg.value) for arg in node.iter.args])
        if (
            value.kind is Kind.PLAIN
            and isinstance(node, cst.For)
            and self._is_batch_loop(source, node)
        ):
            return Batch(Kind.DATA, frozenset([node]))
        return value

    def _counts(self, source: Source, node: cst.CSTNode) -> bool:
        """`range(n)`, also behind a progress bar and a variable."""
        if isinstance(node, cst.Name):
            values = [getattr(b.node, "value", None) for b in self.reaching[source].of(node)]
            return bool(values) and all(
                isinstance(v, cst.Call) and self._counts(source, v) for v in values
            )
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
        inner = list(source.inside(node.body, cst.For))
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
        if self.is_own_helper(source, call) and values and values[0].is_sum:
            is_mean = (dotted(call.func) or "").startswith("global_mean")
            return Batch(Kind.COUNT) if is_mean else PLAIN  # the average of the parts' counts
        if self.is_reduced_by(source, call):
            return PLAIN
        reduction = loss_reduction(self.flow, source, call)
        if reduction is not None:
            return self._loss(reduction, values)
        if full:
            value = self._function(source, call, full.rpartition(".")[2], values)
            return (
                replace(value, number=True)
                if full.startswith("numpy.") and value.is_local
                else value
            )
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
        return elementwise([base, *values] if name else values)

    def _loss(self, reduction: str, values: list[Batch]) -> Batch:
        kind = {"sum": Kind.SUM, "none": Kind.DATA, "ratio": Kind.RATIO}.get(reduction, Kind.MEAN)
        return Batch(kind, origins_of(values))

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
            return over_batch(call, name, first, skip=1)
        if name in ("tensor", "as_tensor", "stack", "array", "cat", "Variable", "asarray"):
            return first
        if name == "accuracy_score":
            return Batch(Kind.MEAN, origins_of(values), number=True)
        if (self.facts.callee(source, call) or "").startswith("sklearn.metrics."):
            return Batch(Kind.METRIC, origins_of(values), number=True)
        if name == "next":
            return Batch(Kind.DATA, frozenset([call]))
        if name in ("range", "isinstance", "hasattr"):
            return PLAIN
        if name in ("add", "sub", "mul", "div") and len(values) > 1:
            return combine(_METHODS[name], values[0], values[1])
        return elementwise(values)

    def _method(self, call: cst.Call, name: str, base: Batch, values: list[Batch]) -> Batch:
        if base.kind is Kind.DATA:
            if name in ("size", "numel", "nelement"):
                index = literal(call.args[0].value) if call.args else 0
                return Batch(Kind.COUNT, base.origins, number=True) if index == 0 else PLAIN
            if name in ("mean", "sum"):
                return over_batch(call, name, base, skip=0)
            if name in ("dim", "get_device"):
                return PLAIN
            return base if name not in ("max", "min", "norm", "item") or call.args else UNKNOWN
        if name in ("mean", "sum"):
            return over_batch(call, name, base, skip=0)
        if name in SAME_VALUE:
            return replace(base, number=base.number or name in NUMBERS)
        if name in _METHODS:
            return combine(_METHODS[name], base, values[0] if values else UNKNOWN)
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
        origins = origins_of([*values, base])
        is_gathered = self.facts.may_be_wrapped(source, call.func)
        return replace(value, origins=origins or value.origins, parts=is_gathered)

    def _result(self, source: Source, node: cst.BaseExpression, path: tuple[int, ...]) -> Batch:
        """What is left of a returned value after numbers in it were reduced."""
        if isinstance(node, cst.Tuple):
            if path and path[0] < len(node.elements):
                return self._result(source, node.elements[path[0]].value, path[1:])
            return container([self._result(source, element.value, ()) for element in node.elements])
        value = self.element(source, node, path)
        is_extracted = (
            value.number and not isinstance(node, cst.Name) and value.kind is not Kind.COUNT
        )
        return PLAIN if is_extracted and self.is_reduced_here(source, node, value) else value


@once
def batchwise(facts: Facts) -> Batchwise:
    """The evaluator of a program, shared by the rules."""
    return Batchwise(facts)


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
