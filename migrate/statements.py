"""What the statements of a file add to the flow: definitions, assignments, loops, returns.

Each says that the values of an expression are among those of a variable, an attribute or an
element. They are said again, by `Flow`, until nothing is added.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import libcst as cst

from migrate.names import Slot, parameters
from migrate.source import Source
from migrate.syntax import method_name, receiver
from migrate.values import (
    Class,
    Function,
    Instance,
    Made,
    Values,
    identity,
    is_decorated,
    subscript_keys,
)

if TYPE_CHECKING:
    from migrate.flow import Flow

_LIST = re.compile(r"^(list|listcomp|torch\.nn\.ModuleList|collections\.deque)$")


class Statements:
    """The statements of one file."""

    def __init__(self, flow: Flow, source: Source) -> None:
        self.flow = flow
        self.source = source
        self.names = flow.names[source]

    def define(self) -> None:
        """Adds the functions and classes, which are what they are from the beginning."""
        for node in self.source.all(cst.FunctionDef):
            owner = self.source.parent(self.source.parent(node) or node)
            method_of = owner if isinstance(owner, cst.ClassDef) else None
            function, name = Function(self.source, node, method_of), node.name.value
            home = Slot(method_of, name) if method_of else self.names.slot(node, name)
            self.flow.add(home, [function])
            first = next(iter(parameters(node)), None)
            if method_of and first and not is_decorated(function, "staticmethod"):
                me = Instance(Class(self.source, method_of), self.source, None)
                self.flow.add(Slot(node, first.name.value), [me])
        for cls in self.source.all(cst.ClassDef):
            self.flow.add(self.names.slot(cls, cls.name.value), [Class(self.source, cls)])

    def run(self) -> None:
        """Adds what each statement gives, as far as that is known by now."""
        for assign in self.source.all(cst.Assign):
            for target in assign.targets:
                self._bind(target.target, self._of(assign.value), assign.value)
        for annotated in self.source.all(cst.AnnAssign):
            self._bind(annotated.target, self._of(annotated.value), annotated.value)
        for walrus in self.source.all(cst.NamedExpr):
            self._bind(walrus.target, self._of(walrus.value), walrus.value)
        for loop in self.source.all(cst.For):
            self._bind_loop(loop.target, loop.iter)
        for part in self.source.all(cst.CompFor):
            self._bind_loop(part.target, part.iter)
        for item in self.source.all(cst.WithItem):
            if item.asname is not None:
                self._bind(item.asname.name, self._of(item.item), None)
        self._results()
        for function in self.source.all(cst.FunctionDef):
            for parameter in parameters(function):
                if parameter.default is not None:
                    slot = Slot(function, parameter.name.value)
                    self.flow.add(slot, self._of(parameter.default))
        for call in self.source.all(cst.Call):
            self._of(call)  # binds the arguments
            if method_name(call) == "append" and len(call.args) == 1:
                self._append(call)

    def _of(self, node: cst.CSTNode | None) -> Values:
        return self.flow.of(self.source, node)

    def _append(self, call: cst.Call) -> None:
        """What is put into a list is one of its elements."""
        for base in self._of(receiver(call)):
            if isinstance(base, Made) and _LIST.search(base.name):
                self.flow.add(Slot(base.node, "[*]"), self._of(call.args[0].value))

    def _results(self) -> None:
        """What functions return and yield."""
        for returned in self.source.all(cst.Return):
            function = self.source.function_of(returned)
            if function is not None:
                self.flow.add(Slot(function, "return"), self._of(returned.value))
        for yielded in self.source.all(cst.Yield):
            function = self.source.function_of(yielded)
            if function is not None and isinstance(yielded.value, cst.BaseExpression):
                self.flow.add(Slot(function, "[*]"), self._of(yielded.value))

    def _bind(self, target: cst.CSTNode, values: Values, value: cst.CSTNode | None) -> None:
        match target:
            case cst.Name():
                self.flow.add(self.names.slot(target, target.value), values)
            case cst.Attribute():
                slots = [
                    self.flow.attribute_slot(base, target.attr.value)
                    for base in self._of(target.value)
                ]
                for slot in filter(None, slots):
                    self.flow.add(slot, values)
            case cst.Subscript():
                for base in self._of(target.value):
                    for name in subscript_keys(target):
                        self.flow.add(Slot(identity(base), name), values)
            case cst.Tuple() | cst.List():
                self._bind_elements(target, values, value)

    def _bind_elements(
        self, target: cst.Tuple | cst.List, values: Values, value: cst.CSTNode | None
    ) -> None:
        for index, element in enumerate(target.elements):
            if isinstance(value, cst.Tuple) and index < len(value.elements):
                each = self._of(value.elements[index].value)
            else:
                each = self.flow.elements(values, f"[{index}]")
            self._bind(element.value, each, None)

    def _bind_loop(self, target: cst.CSTNode, iterable: cst.CSTNode) -> None:
        func = iterable.func if isinstance(iterable, cst.Call) else None
        called = self.flow.qualified(self.source, func)
        if isinstance(iterable, cst.Call) and called in ("enumerate", "zip"):
            if not isinstance(target, cst.Tuple | cst.List):
                return
            skip = called == "enumerate"
            for element, arg in zip(target.elements[skip:], iterable.args, strict=False):
                self._bind_loop(element.value, arg.value)
            return
        if isinstance(iterable, cst.Call) and method_name(iterable) in ("items", "values"):
            held = self.flow.elements(self._of(receiver(iterable)))
            if method_name(iterable) == "values":
                self._bind(target, held, None)
            elif isinstance(target, cst.Tuple) and len(target.elements) == 2:
                self._bind(target.elements[1].value, held, None)
        self._bind(target, self.flow.elements(self._of(iterable)), None)
