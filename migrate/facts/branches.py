"""Which branches can run when some variables are known, such as `if train:` in `f(train=False)`."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst

from migrate.names import parameters
from migrate.source import Source
from migrate.syntax import literal
from migrate.values import Function

Known = Mapping[str, object]


def can_run(source: Source, node: cst.CSTNode, known: Known) -> bool:
    """Whether `node` can run in its function, where the variables in `known` have those values."""
    inner = node
    for item in source.ancestors(node):
        if isinstance(item, cst.FunctionDef):
            break
        if isinstance(item, cst.If):
            truth = _truth(source, item.test, known)
            if (inner is item.body and truth is False) or (inner is item.orelse and truth is True):
                return False
        inner = item
    return True


def known_arguments(call: cst.Call, function: Function, known: Known) -> dict[str, object]:
    """The parameters of `function` whose values in `call` can be seen, by default or as given."""
    params = parameters(function.node)
    if function.owner is not None:
        params = params[1:]
    found: dict[str, object] = {}
    for param in params:
        if param.default is not None and not param.star:
            found[param.name.value] = literal(param.default)
    for index, arg in enumerate(call.args):
        if arg.star:
            return {}
        if arg.keyword is not None:
            name = arg.keyword.value
        elif index < len(params):
            name = params[index].name.value
        else:
            continue
        is_known = isinstance(arg.value, cst.Name) and arg.value.value in known
        found[name] = known[arg.value.value] if is_known else literal(arg.value)  # type: ignore[attr-defined]
    return {name: value for name, value in found.items() if value is not ...}


def _truth(source: Source, test: cst.BaseExpression, known: Known) -> bool | None:
    """Whether a test holds; None if that cannot be seen."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        inner = _truth(source, test.expression, known)
        return None if inner is None else not inner
    if isinstance(test, cst.BooleanOperation):
        sides = (_truth(source, test.left, known), _truth(source, test.right, known))
        decisive = isinstance(test.operator, cst.Or)
        if decisive in sides:
            return decisive
        return None if None in sides else not decisive
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        return _compared(source, test, known)
    value = _value(source, test, known)
    return None if value is ... else bool(value)


def _compared(source: Source, test: cst.Comparison, known: Known) -> bool | None:
    target = test.comparisons[0]
    left = _value(source, test.left, known)
    if isinstance(target.operator, cst.In | cst.NotIn):
        elements = getattr(target.comparator, "elements", None)
        if elements is None or left is ...:
            return None
        return (left in [literal(e.value) for e in elements]) == isinstance(target.operator, cst.In)
    right = _value(source, target.comparator, known)
    if left is ... or right is ...:
        return None
    if isinstance(target.operator, cst.Equal | cst.Is):
        return left == right
    if isinstance(target.operator, cst.NotEqual | cst.IsNot):
        return left != right
    return None


def _value(source: Source, node: cst.BaseExpression, known: Known) -> object:
    """A literal's value, a known variable's, or that of `is_train = phase == "train"`."""
    if not isinstance(node, cst.Name) or literal(node) is not ...:
        return literal(node)
    if node.value in known:
        return known[node.value]
    scope = source.function_of(node)
    assigned = [
        a
        for a in source.inside(scope or source.module, cst.Assign)
        if any(isinstance(t.target, cst.Name) and t.target.value == node.value for t in a.targets)
    ]
    if len(assigned) == 1 and isinstance(assigned[0].value, cst.Comparison):
        truth = _compared(source, assigned[0].value, known)
        return ... if truth is None else truth
    return ...
