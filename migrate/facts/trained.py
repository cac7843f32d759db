"""What the trained loss is computed from: the variables and expressions behind `backward()`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import libcst as cst

from migrate.facts.program import Facts
from migrate.source import Source
from migrate.syntax import dotted, method_name, receiver
from migrate.values import Function, Instance, Made

SAME_VALUE = frozenset(
    [
        "item",
        "tolist",
        "detach",
        "cpu",
        "cuda",
        "float",
        "double",
        "half",
        "to",
        "type",
        "clone",
        "numpy",
        "data",
        "view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "contiguous",
        "requires_grad_",
        "long",
        "int",
        "scale",
        "backward",
    ]
)


class Trained:
    """Follows what `backward()` is called on back through the program."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.flow = facts.flow
        self.reaching = facts.reaching

    def is_trained(self, source: Source, target: cst.CSTNode) -> bool:
        """Whether a variable is a part of what `backward()` is called on."""
        if isinstance(target, cst.Subscript):
            target = target.value
        if isinstance(target, cst.Name):
            return self.facts.slot(source, target) in self._trained
        return (source, dotted(target)) in self._trained

    @property
    def _trained(self) -> set[object]:
        return self._training[0]

    @property
    def trained_expressions(self) -> list[tuple[Source, cst.CSTNode]]:
        """The expressions that what `backward()` is called on is computed by."""
        return self._training[1]

    def is_in_model(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether code runs inside a wrapped model, which had a part of the batch before."""
        cls = source.class_of(node)
        return cls is not None and cls in self._wrapped_classes

    @cached_property
    def _wrapped_classes(self) -> set[cst.CSTNode]:
        """The classes of wrapped models, and of the modules that they make."""
        found: set[cst.CSTNode] = set()
        queue = [value.cls for value in self.facts.wrapped if isinstance(value, Instance)]
        while queue:
            cls = queue.pop()
            if cls.node in found:
                continue
            for item in self.flow.bases(cls)[0]:
                found.add(item.node)
                for call in item.source.inside(item.node, cst.Call):
                    made = self.flow.of(item.source, call)
                    queue += [v.cls for v in made if isinstance(v, Instance) and v.node is call]
        return found

    @cached_property
    def _training(self) -> tuple[set[object], list[tuple[Source, cst.CSTNode]]]:
        """The variables and expressions that the receivers of `backward()` are computed from."""
        visited: list[tuple[Source, cst.CSTNode]] = []
        found: set[object] = set()
        seen: set[cst.CSTNode] = set()
        queue: list[tuple[Source, cst.CSTNode]] = []
        for source, call in self.facts.backwards:
            queue += [
                (source, node) for node in (receiver(call), *(a.value for a in call.args)) if node
            ]
        while queue:
            source, node = queue.pop()
            visited.append((source, node))
            queue += self._callee_returns(source, node, seen)
            for name in source.inside(node, cst.Name):
                if name.value in ("self",) or source.parent(name) is None:
                    continue
                slot = self.facts.slot(source, name)
                if slot in found:
                    continue
                found.add(slot)
                bindings = self.reaching[source].bindings.get(slot, [])
                values = [
                    getattr(b.node, "value", None) for b in bindings if _is_assignment(b.node)
                ]
                queue += [(source, value) for value in values if value is not None]
                queue += self._appended(source, slot)
            for attribute in source.inside(node, cst.Attribute):
                text = dotted(attribute) or ""
                if text.startswith("self.") and (source, text) not in found:
                    found.add((source, text))
                    assigned = self._assigned_in_class(source, attribute, text)
                    queue += [(source, item.value) for item in assigned]
        return found, visited

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
        return self._kept.get((source, slot), [])

    @cached_property
    def _kept(self) -> dict[tuple[Source, object], list[tuple[Source, cst.CSTNode]]]:
        """For each variable, what is appended to it or added."""
        found: dict[tuple[Source, object], list[tuple[Source, cst.CSTNode]]] = {}
        for source in self.facts.project.sources:
            for call in source.all(cst.Call):
                owner = receiver(call)
                keeps = method_name(call) in ("append", "extend", "update", "add")
                if keeps and isinstance(owner, cst.Name):
                    items = found.setdefault((source, self.facts.slot(source, owner)), [])
                    items += [(source, arg.value) for arg in call.args]
        return found

    def _is_scalar(self, source: Source, node: cst.Name) -> bool:
        """Whether a part of the trained loss is one number: it has `.item()` or `.backward()`."""
        slot = self.facts.slot(source, node)
        return slot in self._scalars and self.is_trained(source, node)

    @cached_property
    def _scalars(self) -> set[object]:
        found: set[object] = set()
        for source, call in self.facts.calls():
            is_method = method_name(call) in ("item", "backward")
            first: cst.CSTNode | None = (
                receiver(call) if is_method else (call.args[0].value if call.args else None)
            )
            if is_method or dotted(call.func) == "float" or method_name(call) == "scale":
                first = without_conversions(first)
                if isinstance(first, cst.Name):
                    found.add(self.facts.slot(source, first))
        for source in self.facts.project.sources:
            for shown in source.all(cst.FormattedStringExpression):
                if isinstance(shown.expression, cst.Name) and shown.format_spec:
                    found.add(self.facts.slot(source, shown.expression))
        return found

    def _assigned_in_class(self, source: Source, node: cst.CSTNode, text: str) -> list[cst.Assign]:
        return self._attributes.get((source.class_of(node), text), [])

    @cached_property
    def _attributes(self) -> dict[tuple[cst.ClassDef | None, str], list[cst.Assign]]:
        """For each class and attribute, `self.x`, the assignments to it in the class."""
        found: dict[tuple[cst.ClassDef | None, str], list[cst.Assign]] = {}
        for source in self.facts.project.sources:
            for cls in source.all(cst.ClassDef):
                for assign in source.inside(cls, cst.Assign):
                    for text in {dotted(target.target) or "" for target in assign.targets}:
                        found.setdefault((cls, text), []).append(assign)
        return found

    def _called(self, source: Source, call: cst.Call) -> Iterable[Function]:
        found = set(self.flow.callees.get(call, ()))
        values = set(self.flow.of(source, call.func))
        for wrap in self.facts.wraps:
            if any(isinstance(value, Made) and value.node is wrap.call for value in values):
                values |= wrap.inner
        for value in values:
            if isinstance(value, Instance):
                function = self.flow.method(value.cls, "forward")
                found |= {function} if function else set()
        return found


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
