"""Which values reach which variable, across functions, classes and files.

A points-to analysis in the style of Andersen: every assignment, loop, return and call says that
the values of one expression are among those of a variable, and that is repeated until nothing is
added. Order of execution is not considered, objects are told apart by the call that made them, and
attributes by the class they belong to. So the answer is what *may* be there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import libcst as cst

from migrate.names import Names, Slot, parameters
from migrate.project import Project
from migrate.source import Source
from migrate.statements import Statements
from migrate.syntax import argument, dotted, method_name, receiver, string_value
from migrate.values import (
    NOTHING,
    Class,
    External,
    File,
    Function,
    Instance,
    Made,
    Method,
    Value,
    Values,
    identity,
    is_decorated,
    owner_name,
    subscript_keys,
)  # fmt: skip

_MAX_ROUNDS, _MAX_OWNERS = 12, 6
MADE_BY = "loader()"
"""The name of what a project's function gives that returns a DataLoader, for each call of it."""
SAME_OBJECT = frozenset(
    (
        "cuda", "cpu", "to", "train", "eval", "half", "float", "double", "bfloat16",
        "requires_grad_", "apply", "share_memory", "to_empty", "type", "module",
    )
)  # fmt: skip
"""Methods and attributes of a model that give the model, for all that matters here."""
_SAME_AS_ARGUMENT = {
    "torch.compile", "torch.jit.script", "list", "tuple", "getattr", "functools.partial",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm", "apex.parallel.convert_syncbn_model",
}  # fmt: skip
_WRITTEN_SAME = {"main_process_first", "from_main_process", "compute_in"}  # of an earlier run
_FOLLOWED = frozenset(
    {
        cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.IfExp, cst.BooleanOperation,
        cst.NamedExpr, cst.Await,
        cst.Tuple, cst.List, cst.Dict, cst.ListComp, cst.DictComp, cst.Set,
    }
)  # fmt: skip
"""The types of expressions that have values to be followed; not numbers, texts and arithmetic."""


class Flow:
    """The values of every expression of a project. Built once; after that it is only asked."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.names = {source: Names(source) for source in project.sources}
        self.slots: defaultdict[Slot, set[Value]] = defaultdict(set)
        self.callees: defaultdict[cst.Call, set[Function]] = defaultdict(set)
        self._cache: dict[cst.CSTNode, Values] = {}
        self._changed = True
        files = [Statements(self, source) for source in project.sources]
        for statements in files:
            statements.define()
        for _ in range(_MAX_ROUNDS):
            if not self._changed:
                break
            self._changed = False
            self._cache.clear()
            for statements in files:
                statements.run()
        self._cache.clear()

    # What is asked

    def of(self, source: Source, node: cst.CSTNode | None) -> Values:
        """The values that an expression can have."""
        if node is None or type(node) not in _FOLLOWED:
            return NOTHING
        known = self._cache.get(node)
        if known is None:
            self._cache[node] = NOTHING  # a recursive question finds nothing new
            known = self._cache[node] = frozenset(self._evaluate(source, node))
        return known

    def made_by(self, source: Source, node: cst.CSTNode | None) -> list[Made]:
        """The external results among an expression's values."""
        return [value for value in self.of(source, node) if isinstance(value, Made)]

    def qualified(self, source: Source, node: cst.CSTNode | None) -> str | None:
        """The full name of something external: `torch.nn.DataParallel` for `nn.DataParallel`."""
        names = [v.name for v in self.of(source, node) if type(v) is External]
        return names[0] if len(names) == 1 else None

    def elements(self, values: Values, key: str = "[*]") -> Values:
        """What containers hold, at the key `['train']` or `[0]`, or anywhere."""
        found: set[Value] = set()
        for value in values:
            owner = identity(value)
            exact = self.slots.get(Slot(owner, key), set())
            found |= exact or self.slots.get(Slot(owner, "[*]"), set())
        return frozenset(found)

    def keys(self, value: Value) -> set[str]:
        """The string keys under which something is put into a dict."""
        owner = identity(value)
        names = [slot.name for slot in self.slots if slot.owner is owner]
        return {name[2:-2] for name in names if name.startswith(("['", '["'))}

    def bases(self, cls: Class) -> tuple[list[Class], set[str]]:
        """A class and its bases in the project, nearest first; the names of its external bases."""
        classes: list[Class] = []
        names: set[str] = set()
        queue = [cls]
        while queue:
            item = queue.pop(0)
            if item not in classes:
                classes.append(item)
                values = [self.of(item.source, base.value) for base in item.node.bases]
                queue += [v for each in values for v in each if isinstance(v, Class)]
                names |= {v.name for each in values for v in each if isinstance(v, External)}
        return classes, names

    def method(self, cls: Class, name: str) -> Function | None:
        """A method by its name, looked up in the class and its bases."""
        for item in self.bases(cls)[0]:
            for value in self.slots.get(Slot(item.node, name), ()):
                if isinstance(value, Function):
                    return value
        return None

    # What is added

    def add(self, slot: Slot, values: Iterable[Value]) -> None:
        """Says that values are among those of a variable."""
        known = self.slots[slot]
        before = len(known)
        known.update(values)
        self._changed |= len(known) != before

    def attribute_slot(self, base: Value, name: str) -> Slot | None:
        """The variable that an attribute of a value is; None where it has none of its own."""
        if isinstance(base, File):
            return Slot(base.source.module, name)
        if isinstance(base, External | Function | Method):
            return None
        if isinstance(base, Instance | Class):
            cls = base.cls if isinstance(base, Instance) else base
            for item in self.bases(cls)[0][1:]:  # an attribute lives where a base class sets it
                if self.slots.get(Slot(item.node, name)):
                    return Slot(item.node, name)
        return Slot(identity(base), name)

    # Expressions

    def _evaluate(self, source: Source, node: cst.CSTNode) -> Iterator[Value]:
        match node:
            case cst.Name():
                yield from self._name(source, node)
            case cst.Attribute():
                if isinstance(node.value, cst.Call) and dotted(node.value.func) == "super":
                    yield from self._of_super(source, node)
                for base in self.of(source, node.value):
                    yield from self._attribute(base, node.attr.value)
            case cst.Call():
                yield from self._call(source, node)
            case cst.Subscript():
                yield from self._subscript(source, node)
            case cst.IfExp():
                yield from self.of(source, node.body) | self.of(source, node.orelse)
            case cst.BooleanOperation():
                yield from self.of(source, node.left) | self.of(source, node.right)
            case cst.NamedExpr():
                yield from self.of(source, node.value)
            case cst.Await():
                yield from self.of(source, node.expression)
            case _:
                yield self._container(source, node)

    def _name(self, source: Source, node: cst.Name) -> Iterator[Value]:
        names = self.names[source]
        slot = names.slot(node, node.value)
        yield from self.slots.get(slot, ())
        if node.value in names.imports:
            yield from self._imported(source, node.value)
        elif slot.owner is source.module and slot not in self.slots:
            starred = list(self._starred(source, node.value))
            yield from starred
            if not starred and node.value not in names.module_names:
                yield External(node.value)  # a builtin

    def _imported(
        self, source: Source, name: str, seen: frozenset[Source] = frozenset()
    ) -> Iterator[Value]:
        item = self.names[source].imports[name]
        module = self.project.imported(source, item.module, item.level)
        if item.name is None:
            found = self.project.module(module)
            yield File(found) if found else External(module)
            return
        submodule = self.project.module(f"{module}.{item.name}".lstrip("."))
        home = self.project.module(module)
        values = list(self._exported(home, item.name, seen | {source})) if home else []
        if values:
            yield from values
        elif submodule is not None:
            yield File(submodule)
        else:
            yield External(f"{module}.{item.name}")

    def _exported(self, home: Source, name: str, seen: frozenset[Source]) -> Iterator[Value]:
        """What `name` is in a file, for those who import it; not through the files in `seen`."""
        known = self.slots.get(Slot(home.module, name), ())
        yield from known
        if known or home in seen:
            return
        if name in self.names[home].imports:
            yield from self._imported(home, name, seen)
        else:
            yield from self._starred(home, name, seen)

    def _starred(
        self, source: Source, name: str, seen: frozenset[Source] = frozenset()
    ) -> Iterator[Value]:
        for item in self.names[source].starred:
            home = self.project.module(self.project.imported(source, item.module, item.level))
            if home is not None and home is not source:
                yield from self._exported(home, name, seen | {source})

    def _attribute(self, base: Value, name: str) -> Iterator[Value]:
        if isinstance(base, External):
            yield External(f"{base.name}.{name}")
            return
        if isinstance(base, File):
            if not self.slots.get(Slot(base.source.module, name)):
                yield from self._exported(base.source, name, frozenset())
            modules = self.project.modules
            below = [
                modules.get(f"{full}.{name}") for full, s in modules.items() if s is base.source
            ]
            yield from (File(found) for found in below if found is not None)
        if isinstance(base, Instance):
            found_method = self.method(base.cls, name)
            if found_method is not None and is_decorated(found_method, "property"):
                yield from self.slots.get(Slot(found_method.node, "return"), ())
                return
            if found_method is not None:
                yield Method(found_method, base)
                return
        if isinstance(base, Instance | Made) and name in SAME_OBJECT:
            yield from self._inner(base) if name == "module" else (base,)
        slot = self.attribute_slot(base, name)
        if slot is not None:
            yield from self.slots.get(slot, ())

    def _of_super(self, source: Source, node: cst.Attribute) -> Iterator[Value]:
        """`super().m`: the method of the nearest base class that has it."""
        around = source.class_of(node)
        if around is not None:
            me = Instance(Class(source, around), source, None)
            for base in self.bases(me.cls)[0][1:]:
                found = self.method(base, node.attr.value)
                if found is not None:
                    yield Method(found, me)
                    return

    def _inner(self, base: Instance | Made) -> Values:
        """`.module` of a wrapper: what was wrapped; of anything else: the thing itself."""
        if isinstance(base.node, cst.Call) and base.node.args:
            inner = self.of(base.source, base.node.args[0].value)
            if isinstance(base, Made) and base.name.endswith("DataParallel") and inner:
                return inner
        return frozenset([base])

    def _subscript(self, source: Source, node: cst.Subscript) -> Iterator[Value]:
        for base in self.of(source, node.value):
            if isinstance(base, External):
                yield External(f"{base.name}[]")
            else:
                yield from self.elements(frozenset([base]), subscript_keys(node)[0])

    def _container(self, source: Source, node: cst.CSTNode) -> Made:
        made = Made(source, node, type(node).__name__.lower())
        if isinstance(node, cst.ListComp):
            self.add(Slot(node, "[*]"), self.of(source, node.elt))
        elif isinstance(node, cst.DictComp):
            self.add(Slot(node, "[*]"), self.of(source, node.value))
        for index, element in enumerate(getattr(node, "elements", ())):
            key = string_value(element.key) if isinstance(element, cst.DictElement) else None
            values = self.of(source, element.value)
            self.add(Slot(node, f"[{index if key is None else key!r}]"), values)
            self.add(Slot(node, "[*]"), values)
        return made

    # Calls

    def _call(self, source: Source, call: cst.Call) -> Iterator[Value]:
        for callee in self.of(source, call.func):
            yield from self._called(source, call, callee)
        name = method_name(call)
        if name and name not in SAME_OBJECT:
            owners = {owner_name(base) for base in self.of(source, receiver(call))} - {None}
            for owner in owners if len(owners) <= _MAX_OWNERS else ("",):
                yield Made(source, call, f"{owner}().{name}")

    def _called(self, source: Source, call: cst.Call, callee: Value) -> Iterator[Value]:
        match callee:
            case External():
                yield from self._external(source, call, callee.name)
            case Function() if callee.node.name.value.rstrip("_") in _WRITTEN_SAME and call.args:
                self._enter(source, call, callee, None)
                yield from self.of(source, call.args[0].value)
            case Function():
                yield from self._enter(source, call, callee, None)
            case Method():
                yield from self._enter(source, call, callee.function, callee.instance)
            case Class():
                instance = Instance(callee, source, call)
                yield instance
                self._enter_method(source, call, instance, "__init__")
            case Instance():
                if method_name(call) in SAME_OBJECT:
                    yield callee
                    return
                yield from self._enter_method(source, call, callee, "__call__")
                yield Made(source, call, "forward")
            case Made():
                yield callee if method_name(call) in SAME_OBJECT else Made(source, call, "forward")

    def _enter_method(
        self, source: Source, call: cst.Call, instance: Instance, name: str
    ) -> Values:
        function = self.method(instance.cls, name)
        return self._enter(source, call, function, instance) if function else NOTHING

    def _external(self, source: Source, call: cst.Call, name: str) -> Iterator[Value]:
        first = call.args[0].value if call.args else None
        if name in _SAME_AS_ARGUMENT and first is not None:
            yield from self.of(source, first)
        elif name == "apex.amp.initialize" and first is not None:
            values = [self.of(source, arg.value) for arg in call.args[:2]]
            for index, each in enumerate(values):
                self.add(Slot(call, f"[{index}]"), each)
            yield Made(source, call, name)
            yield from values[0]
        else:
            if name == "dict":
                for arg in call.args:
                    key = f"[{arg.keyword.value!r}]" if arg.keyword else "[*]"
                    self.add(Slot(call, key), self.of(source, arg.value))
            yield Made(source, call, name)

    def _enter(
        self, source: Source, call: cst.Call, function: Function, instance: Instance | None
    ) -> Values:
        """Binds the arguments; gives what the function returns."""
        self.callees[call].add(function)
        names = [p.name.value for p in parameters(function.node)]
        is_static = is_decorated(function, "staticmethod")
        if instance is not None and names and not is_static:
            self.add(Slot(function.node, names[0]), [instance])
            names = names[1:]
        elif is_decorated(function, "classmethod"):
            names = names[1:]
        for index, arg in enumerate(call.args):
            name = arg.keyword.value if arg.keyword else None
            name = names[index] if not (name or arg.star) and index < len(names) else name
            if name is not None:
                self.add(Slot(function.node, name), self.of(source, arg.value))
        found = set(self.slots.get(Slot(function.node, "return"), ()))
        if Slot(function.node, "[*]") in self.slots:
            found.add(Made(function.source, function.node, "generator"))
        return frozenset(found | self._made_loaders(source, call, found))

    def _made_loaders(self, source: Source, call: cst.Call, found: Iterable[Value]) -> set[Value]:
        """What stands for the loaders that this call of a function gives, alone or in a tuple."""
        made = Made(source, call, MADE_BY)
        added: set[Value] = set()
        results = [value for value in found if isinstance(value, Made)]
        if any(value.name.endswith(("DataLoader", MADE_BY)) for value in results):
            added.add(made)
        tuples = [value.node for value in results if isinstance(value.node, cst.Tuple)]
        for node, index in [(item, i) for item in tuples for i in range(len(item.elements))]:
            values = self.slots.get(Slot(node, f"[{index}]"), set())
            if any(isinstance(v, Made) and v.name.endswith("DataLoader") for v in values):
                self.add(Slot(call, f"[{index}]"), {*values, made})
                added.add(Made(source, call, "tuple"))
        return added


def call_arguments(call: cst.Call, function: Function, name: str) -> cst.Arg | None:
    """The argument of `call` that becomes the parameter `name` of `function`."""
    names = [p.name.value for p in parameters(function.node)]
    if function.owner is not None and not is_decorated(function, "staticmethod"):
        names = names[1:]
    return argument(call, name, names.index(name) if name in names else None)
