"""The condition under which a turn of a loop takes a step, said earlier in the same turn."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from migrate.facts.kinds import Kind
from migrate.rules._accumulating import Choice, NotEdited
from migrate.rules._training import Training
from migrate.source import Source
from migrate.syntax import assigned_targets, dotted, flat_targets, string_value

_BAR = re.compile(r"(^|\.)tqdm$")
_PURE = frozenset({"len", "int", "bool", "min", "max", "float"})


@dataclass(frozen=True, eq=False)
class Now:
    """A condition and where it is evaluated in the script.

    Attributes:
        test: the expression, which a name in the `if` may stand for.
        text: what is to be written.
    """

    choice: Choice
    test: cst.BaseExpression
    text: str


def condition(know: Training, choice: Choice) -> Now:
    """When a turn takes a step, as an expression without effects.

    Raises:
        NotEdited: it has effects, or may differ between processes.
    """
    source, test = choice.source, choice.node.test
    if isinstance(test, cst.Name):
        bound = know.reaching[source].of(test)
        values = [getattr(b.node, "value", None) for b in bound if not b.path]
        if len(values) == 1 and source.contains(choice.loop.body, bound[0].node):
            test = values[0] or test
    code = source.one_line(test)
    if "#" in source.code(test):
        raise NotEdited(f"{code} has a comment in it")
    for call in source.inside(test, cst.Call):
        if dotted(call.func) not in _PURE:
            raise NotEdited(f"{source.one_line(call)} is called to know it")
    if any(source.inside(test, kind) for kind in (cst.NamedExpr, cst.Await)):
        raise NotEdited(f"{code} has effects")
    for part in source.inside(test, cst.Subscript):
        index = part.slice[0].slice if len(part.slice) == 1 else None
        if not isinstance(index, cst.Index) or string_value(index.value) is None:
            raise NotEdited(f"{source.one_line(part)} may change")
    for name in source.inside(test, cst.Name):
        value = know.batchwise.of(source, name) if source.is_variable(name) else None
        if value is not None and value.origins and value.kind is not Kind.PLAIN:
            raise NotEdited(f"{name.value} may differ between processes")
    return Now(choice, test, _negated(source, test) if choice.leaves else code)


def _negated(source: Source, test: cst.BaseExpression) -> str:
    code = source.one_line(test)
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        (part,) = test.comparisons
        if isinstance(part.operator, cst.NotEqual):
            left, right = source.span(test).start, source.span(part.operator).start
            before = source.data[left:right].decode()
            after = source.data[source.span(part.operator).stop : source.span(test).stop].decode()
            return " ".join(f"{before}=={after}".split())
    if isinstance(test, cst.BinaryOperation):
        return f"({code}) == 0"
    return f"not ({code})"


def changed(know: Training, now: Now, first: cst.CSTNode) -> str | None:
    """What of a condition changes in a turn between a statement and where the script evaluates it.

    The statement itself counts; functions that are called are looked into.
    """
    source = now.choice.source
    start, stop = source.span(first).start, source.span(now.test).start
    texts = {source.code(part) for part in _parts(source, now.test)}
    attributes = {part.attr.value for part in source.inside(now.test, cst.Attribute)}
    for kind in (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.For, cst.CompFor, cst.NamedExpr,
                 cst.WithItem):  # fmt: skip
        for node in source.inside(now.choice.loop.body, kind):
            targets = [x for target in assigned_targets(node) for x in flat_targets(target)]
            for target in targets:
                is_between = start <= source.span(target).start < stop
                if is_between and source.code(target) in texts:
                    return source.code(target)
    own = source.function_of(now.choice.node)
    for function in know.called_by(source, now.choice.loop.body):
        home = next(s for s in know.context.sources if function in s.spans)
        for assign in (*home.inside(function, cst.Assign), *home.inside(function, cst.AugAssign)):
            for target in (x for t in assigned_targets(assign) for x in flat_targets(t)):
                if isinstance(target, cst.Attribute) and target.attr.value in attributes:
                    return home.code(target)
        names = {item.name.value for g in home.inside(function, cst.Global) for item in g.names}
        names |= {i.name.value for g in home.inside(function, cst.Nonlocal) for i in g.names}
        if function is not own and names & texts:
            return min(names & texts)
    return None


def _parts(source: Source, test: cst.CSTNode) -> list[cst.CSTNode]:
    names = [name for name in source.inside(test, cst.Name) if source.is_variable(name)]
    return [*names, *source.inside(test, cst.Attribute), *source.inside(test, cst.Subscript)]


def ends_with_the_loop(now: Now) -> bool:
    """Whether the last turn takes a step in any case: `… or i + 1 == len(loader)`.

    Nothing may leave the loop before, as `break` does.
    """
    source, loop = now.choice.source, now.choice.loop
    if not isinstance(loop, cst.For) or not isinstance(loop.iter, cst.Call) or now.choice.leaves:
        return False
    for kind in (cst.Break, cst.Return):
        for node in source.inside(loop.body, kind):
            if not now.choice.covers(source, node):
                return False
    if not isinstance(loop.target, cst.Tuple) or dotted(loop.iter.func) != "enumerate":
        return False
    if len(loop.iter.args) != 1:
        return False
    number = source.code(loop.target.elements[0].value)
    loader = loop.iter.args[0].value
    if isinstance(loader, cst.Call) and loader.args and _BAR.search(dotted(loader.func) or ""):
        loader = loader.args[0].value
    size = "".join(f"len({source.code(loader)})".split())
    ends = {f"{number}+1=={size}", f"({number}+1)=={size}", f"{number}=={size}-1",
            f"{number}==({size}-1)"}  # fmt: skip
    return any(part in ends for part in _alternatives(source, now.test))


def _alternatives(source: Source, test: cst.BaseExpression) -> list[str]:
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.Or):
        return [*_alternatives(source, test.left), *_alternatives(source, test.right)]
    return ["".join(source.code(test).split())]
