"""Who comes to a place: the main process alone, some processes, or all of them.

Scripts that are half moved let the process's number decide who does what. There are two questions
about a place in them:

- `is_by_rank`: does the number decide who comes? Then the script has arranged that itself, and
  nothing is added; and a call that needs all processes must not be put there.
- `only_main`: do the others certainly stay away? Then a call that needs all of them hangs.

A condition is answered twice, for the main process and for any other one, from the little that is
known of their numbers: 0, and at least 1. Which variables hold such numbers is told by their names
where the flow does not tell it; this is the only room that knows these names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import libcst as cst

from migrate.source import Source
from migrate.syntax import block_statements, child_nodes, dotted, literal, string_value

if TYPE_CHECKING:
    from migrate.facts.program import Facts

_NUMBER = re.compile(
    r"(^|_)(?<!low_)(?<!lora_)(?<!dt_)(?<!matrix_)(local|global|world|my|node|proc)?rank"
    r"(_?(id|idx|index|num|number))?$|(^|_)proc(ess)?_?(id|idx|index)$"
)
_IS_MAIN = re.compile(
    r"(^|_)is_?([a-z0-9]+_)*(main|master|chief)_?(proc|process|rank|node|worker|device|ordinal)?$"
    r"|(^|_)(?<!from_)(?<!for_)(?<!on_)(?<!not_)(main|master)_?proc(ess)?$"
    r"|(^|_)rank_?(0|zero)$|(^|_)is_\w*(process|global|local)_zero$"
)
_WORLD = re.compile(r"(^|_)(world_?size|num_(replicas|processes)|process_count)$")
_HAS_GROUP = re.compile(r"^torch\.distributed\.is_(initialized|available)$")
_CONVERTS = frozenset({"int", "bool", "str", "any", "all"})
_SETS = (cst.Assign, cst.AnnAssign, cst.NamedExpr)
_EXITS = frozenset({"sys.exit", "exit", "quit", "os._exit"})
_DEPTH = 3
"""How many variables and functions a condition is followed through."""
_Place = tuple[Source, cst.BaseExpression]


class _Range(NamedTuple):
    """What is known of a number: its least and its greatest value."""

    low: float
    high: float


_MAIN = _Range(0, 0)
_OTHERS = _Range(1, math.inf)
_SEVERAL = _Range(2, math.inf)


class _Limit(NamedTuple):
    """A condition, and what it must be for a process to come to a place."""

    test: cst.BaseExpression
    value: bool


# Names


def _words(name: str) -> str:
    """`local_rank` for `LOCAL_RANK`, `localRank` and `local_rank_`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


def _is_number(name: str) -> bool:
    return bool(_NUMBER.search(_words(name)))


def _tells_main(name: str) -> bool:
    return bool(_IS_MAIN.search(_words(name)))


def is_rank_name(name: str) -> bool:
    """Whether a name is that of a process's number, or of the answer whether it is the main one."""
    return _is_number(name) or _tells_main(name)


def names_rank(source: Source, node: cst.CSTNode) -> bool:
    """Whether a piece of code names the process's number in any way: in a path, in a seed."""
    keywords = {arg.keyword for arg in source.inside(node, cst.Arg) if arg.keyword}
    names = (name.value for name in source.inside(node, cst.Name) if name not in keywords)
    texts = (string_value(text) or "" for text in source.inside(node, cst.SimpleString))
    return any(map(is_rank_name, (*names, *texts)))


def _name(node: cst.CSTNode) -> str:
    """`m` in `m`, `a.m`, `m()` and `a.m()`."""
    if isinstance(node, cst.Call):
        node = node.func
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


def _key(node: cst.CSTNode) -> str:
    """The text by which something is looked up: `environ["RANK"]`, `getattr(args, "rank", 0)`."""
    if isinstance(node, cst.Subscript):
        index = node.slice[0].slice
        return string_value(index.value) or "" if isinstance(index, cst.Index) else ""
    if isinstance(node, cst.Call) and _name(node) in ("get", "getenv", "getattr", "pop"):
        return next(filter(None, (string_value(arg.value) for arg in node.args)), "")
    return ""


# Places


class MainProcess:
    """The conditions on the process's number in one program."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._by_rank: dict[cst.FunctionDef, bool] = {}
        self._asking: dict[cst.CSTNode, bool] = {}
        self._answers: dict[tuple[cst.CSTNode, _Range], bool | None] = {}

    def is_by_rank(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether the process's number decides who comes to a place, as the script arranged it.

        By a condition around it or a way out above it, or around all calls of its function.
        """
        if any(self._decides(source, limit) for limit in _limits(source, node)):
            return True
        function = source.function_of(node)
        if function is None:
            return False
        if function not in self._by_rank:
            self._by_rank[function] = False  # for a function that calls itself
            calls = self.facts.callers.get(function, [])
            by_rank = bool(calls) and all(self.is_by_rank(user, call) for user, call in calls)
            self._by_rank[function] = by_rank
        return self._by_rank[function]

    def only_main(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether, in the function around a place, only the main process comes there for sure."""
        limits = list(_limits(source, node))
        is_for_main = not any(self._excludes(source, limit, _MAIN) for limit in limits)
        return is_for_main and any(self._excludes(source, limit, _OTHERS) for limit in limits)

    def without_processes(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether a place is for programs that run alone: `if local_rank == -1:`."""
        return any(
            self._excludes(source, limit, _MAIN)
            and self._excludes(source, limit, _OTHERS)
            and self.asks(source, limit.test)
            for limit in _limits(source, node)
        )

    def _decides(self, source: Source, limit: _Limit) -> bool:
        """Whether a condition is on the number, and does not let everybody come."""
        answers = (self._answer(source, limit.test, who) for who in (_MAIN, _OTHERS))
        return self.asks(source, limit.test) and any(a is not limit.value for a in answers)

    def _excludes(self, source: Source, limit: _Limit, who: _Range) -> bool:
        return self._answer(source, limit.test, who) is (not limit.value)

    # Conditions

    def asks(self, source: Source, test: cst.BaseExpression) -> bool:
        """Whether a condition, or what the variables in it stand for, asks for the number.

        Not where something else is only given the number, as in `train(model, rank) > best`.
        """
        if test not in self._asking:
            self._asking[test] = self._asks(source, test, 0)
        return self._asking[test]

    def _asks(self, source: Source, node: cst.CSTNode, depth: int) -> bool:
        if any(map(is_rank_name, (self._name(source, node), _key(node)))):
            return True
        if isinstance(node, cst.SimpleString):
            return is_rank_name(string_value(node) or "")
        parts = list(child_nodes(node))
        if isinstance(node, cst.Call):
            parts = [arg.value for arg in node.args] if _name(node) in _CONVERTS else []
        elif isinstance(node, cst.Attribute):
            parts = []
        return any(self._asks(source, part, depth) for part in parts) or any(
            self._asks(home, value, depth + 1) for home, value in self._behind(source, node, depth)
        )

    def _answer(self, source: Source, test: cst.BaseExpression, who: _Range) -> bool | None:
        """What `_holds` says; a condition is asked for every place under it."""
        if (test, who) not in self._answers:
            self._answers[test, who] = self._holds(source, test, who)
        return self._answers[test, who]

    def _holds(
        self, source: Source, test: cst.BaseExpression, who: _Range, depth: int = 0
    ) -> bool | None:
        """Whether a condition holds for a process; None if that cannot be seen."""
        match test:
            case cst.UnaryOperation(operator=cst.Not()):
                return _not(self._holds(source, test.expression, who, depth))
            case cst.BooleanOperation():
                sides = [self._holds(source, side, who, depth) for side in (test.left, test.right)]
                if isinstance(test.operator, cst.Or):
                    return _any(sides)
                return _not(_any(_not(side) for side in sides))
            case cst.Comparison(comparisons=[target]):
                return self._compared(source, test.left, target, who, depth)
            case cst.Name(value="True" | "False"):
                return test.value == "True"
        if _tells_main(self._name(source, test)):
            return who is _MAIN
        func = test.func if isinstance(test, cst.Call) else None
        if func is not None and _HAS_GROUP.match(self.facts.flow.qualified(source, func) or ""):
            return True
        number = self._number(source, test, who, depth)
        if number is not None:
            return _not(_equal(number, _MAIN))
        behind = self._behind(source, test, depth)
        answers = {self._holds(home, value, who, depth + 1) for home, value in behind}
        return answers.pop() if len(answers) == 1 else None

    def _compared(
        self,
        source: Source,
        left: cst.BaseExpression,
        target: cst.ComparisonTarget,
        who: _Range,
        depth: int,
    ) -> bool | None:
        operator, right = target.operator, target.comparator
        if isinstance(operator, cst.In | cst.NotIn) and is_rank_name(string_value(left) or ""):
            return isinstance(operator, cst.In)  # `"RANK" in os.environ`: it is, in all processes
        number = self._number(source, left, who, depth)
        if isinstance(operator, cst.In | cst.NotIn):
            elements = [element.value for element in getattr(right, "elements", ())]
            numbers = [self._number(source, element, who, depth) for element in elements]
            found = _any(_equal(number, other) for other in numbers) if numbers else None
            return found if isinstance(operator, cst.In) else _not(found)
        if isinstance(operator, cst.Equal | cst.Is | cst.NotEqual | cst.IsNot):
            other = self._number(source, right, who, depth)
            is_none = number is not None and literal(right) is None
            same = False if is_none else _equal(number, other)
            return same if isinstance(operator, cst.Equal | cst.Is) else _not(same)
        return _ordered(number, operator, self._number(source, right, who, depth))

    def _number(
        self, source: Source, node: cst.BaseExpression, who: _Range, depth: int
    ) -> _Range | None:
        """What is known of a number that has to do with processes, or stands in the text."""
        value = literal(node)
        if isinstance(value, int) and not isinstance(value, bool):
            return _Range(value, value)
        match node:
            case cst.UnaryOperation(operator=cst.Minus()):
                inner = self._number(source, node.expression, who, depth)
                return _Range(-inner.high, -inner.low) if inner else None
            case cst.NamedExpr():
                return self._number(source, node.value, who, depth)
            case cst.Call(func=cst.Name(value="int"), args=[arg, *_]):
                return self._number(source, arg.value, who, depth)
            case cst.BinaryOperation(operator=cst.Modulo()):
                number = self._number(source, node.left, who, depth)
                return number if number is who else None  # its number on its own machine
        name = self._name(source, node)
        if _is_number(name) or _is_number(_key(node)):
            return who
        if _WORLD.search(_words(name)):
            return _SEVERAL
        behind = self._behind(source, node, depth)
        found = {self._number(home, value, who, depth + 1) for home, value in behind}
        return found.pop() if len(found) == 1 else None

    def _name(self, source: Source, node: cst.CSTNode) -> str:
        """The last name of what is read or called, also where it was imported under another."""
        called = self.facts.flow.qualified(source, node.func) if isinstance(node, cst.Call) else ""
        return called.rpartition(".")[2] if called else _name(node)

    def _behind(self, source: Source, node: cst.CSTNode, depth: int) -> list[_Place]:
        """All that a variable is set to, or that a function of the program returns, if seen."""
        if depth >= _DEPTH:
            return []
        if isinstance(node, cst.Name) and source.is_variable(node):
            bindings = self.facts.reaching[source].of(node)
            set_to = [b.node for b in bindings if not b.path and isinstance(b.node, _SETS)]
            values = [(source, item.value) for item in set_to if item.value is not None]
            return values if len(values) == len(bindings) else []
        if isinstance(node, cst.Call):
            functions = self.facts.flow.callees.get(node, ())
            returned = [
                (function.source, item.value)
                for function in functions
                for item in function.source.inside(function.node.body, cst.Return)
                if item.value is not None
            ]
            return returned if len(returned) == len(functions) else []
        return []


def _limits(source: Source, node: cst.CSTNode) -> Iterator[_Limit]:
    """The conditions that decide, in its function, whether a process comes to a place."""
    inner = node
    for item in source.ancestors(node):
        match item:
            case cst.FunctionDef():
                return
            case cst.If() | cst.IfExp() if inner is item.body or inner is item.orelse:
                yield from _parts(item.test, inner is item.body)
            case cst.BooleanOperation() if inner is item.right:
                yield from _parts(item.left, isinstance(item.operator, cst.And))
            case cst.IndentedBlock() | cst.Module():
                for statement in item.body:
                    if statement is inner:
                        break
                    yield from _sends_away(statement)
        inner = item


def _parts(test: cst.BaseExpression, value: bool) -> Iterator[_Limit]:
    """The conditions that all have to be so if `test` has a value: `a` and `b` of `a and b`."""
    match test:
        case cst.UnaryOperation(operator=cst.Not()):
            yield from _parts(test.expression, not value)
        case cst.BooleanOperation() if isinstance(test.operator, cst.And) is value:
            yield from _parts(test.left, value)
            yield from _parts(test.right, value)
        case _:
            yield _Limit(test, value)


def _sends_away(statement: cst.CSTNode) -> Iterator[_Limit]:
    """What must be so for a process to get past a statement: `if rank != 0: return`."""
    if not isinstance(statement, cst.If):
        return
    if _leaves(statement.body):
        yield from _parts(statement.test, False)
        if statement.orelse is not None:
            yield from _sends_away(statement.orelse)
    elif isinstance(statement.orelse, cst.Else) and _leaves(statement.orelse.body):
        yield from _parts(statement.test, True)


def _leaves(block: cst.BaseSuite) -> bool:
    """Whether a block ends with a way out; not with an error, which is none that is arranged."""
    last = block_statements(block)[-1]
    if not isinstance(last, cst.SimpleStatementLine | cst.SimpleStatementSuite):
        return False
    match last.body[-1]:
        case cst.Return() | cst.Continue() | cst.Break():
            return True
        case cst.Expr(value=cst.Call(func=func)):
            return dotted(func) in _EXITS
    return False


# Arithmetic with what is known


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _any(values: Iterable[bool | None]) -> bool | None:
    known = set(values)
    return True if True in known else None if None in known else False


def _less(left: _Range, right: _Range) -> bool | None:
    if left.high < right.low:
        return True
    return False if left.low >= right.high else None


def _equal(left: _Range | None, right: _Range | None) -> bool | None:
    if left is None or right is None:
        return None
    if left.low == left.high == right.low == right.high:
        return True
    return False if left.high < right.low or left.low > right.high else None


def _ordered(left: _Range | None, operator: cst.BaseCompOp, right: _Range | None) -> bool | None:
    if left is None or right is None:
        return None
    match operator:
        case cst.LessThan():
            return _less(left, right)
        case cst.GreaterThan():
            return _less(right, left)
        case cst.LessThanEqual():
            return _not(_less(right, left))
        case cst.GreaterThanEqual():
            return _not(_less(left, right))
    return None
