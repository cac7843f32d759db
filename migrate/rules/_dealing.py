"""The edits that deal a loader's samples out over the processes, one function for each way."""

from __future__ import annotations

import re

import libcst as cst

from migrate.definitions import last_leading_import
from migrate.edit import (
    Edit,
    Text,
    add_argument,
    enclose,
    insert_after,
    insert_before,
    remove_argument,
    replace,
)  # fmt: skip
from migrate.facts.loader_plan import Plan, Way
from migrate.rule import Context
from migrate.source import Source
from migrate.syntax import assigned_targets, dotted, literal
from migrate.values import Instance

_PADDING = (
    "where {0} cannot be dealt out evenly, up to one sample less than there are processes is drawn "
    "twice in an epoch's last batch"
)
_NAMES = ("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler")
_LATER = (cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp, cst.Lambda, cst.IfExp,
          cst.BooleanOperation)  # fmt: skip


def subject(plan: Plan) -> str:
    """What the loader loads, in the user's words."""
    arg = plan.argument("dataset")
    text = plan.source.code(arg.value if arg else plan.call)
    return " ".join(text.split()) if len(text) < 60 else " ".join(text[:50].split()) + " …"


def distributed_sampler(context: Context, source: Source, call: cst.Call) -> tuple[str, list[Edit]]:
    """The beginning of a call of DistributedSampler up to its dataset, and the import it needs."""
    name, edits = _name(context, source, call)
    return f"{name}(", edits


def _name(context: Context, source: Source, call: cst.Call) -> tuple[str, list[Edit]]:
    names = context.flow.names[source]
    for bound, item in names.imports.items():
        if f"{item.module}.{item.name}" in _NAMES and bound in names.module_names:
            return bound, []
    spelled = dotted(call.func) or ""
    full = context.flow.qualified(source, call.func)
    if full == "torch.utils.data.DataLoader" and spelled.endswith(".DataLoader"):
        return spelled.removesuffix("DataLoader") + "DistributedSampler", []
    if "DistributedSampler" in names.bound:
        return "torch.utils.data.DistributedSampler", []
    for node in source.all(cst.ImportFrom):
        aliases = node.names if isinstance(node.names, tuple | list) else ()
        if dotted(node.module) == "torch.utils.data" and source.function_of(node) is None:
            if isinstance(node.names, cst.ImportStar):
                return "DistributedSampler", []
            for alias in aliases:
                if dotted(alias.name) == "DataLoader":
                    stop = source.span(alias).stop
                    return "DistributedSampler", [Text(source, stop, stop, ", DistributedSampler")]
    if names.imports.get("torch") and "torch" in names.module_names:
        return "torch.utils.data.DistributedSampler", []
    line = "from torch.utils.data import DistributedSampler"
    anchor = last_leading_import(source)
    if anchor is None:
        return "DistributedSampler", [Text(source, 0, 0, line + source.newline, order=(-10, 0))]
    return "DistributedSampler", [insert_after(source, anchor, [line])]


def group_arguments(context: Context, source: Source) -> tuple[str, list[Edit]]:
    """What DistributedSampler is told in a file that may be used without a process group."""
    if source is context.project.entry:
        return "", []
    count, need_count = context.helper(source, "process_count")
    rank, need_rank = context.helper(source, "process_rank")
    return f", num_replicas={count}(), rank={rank}()", [need_count, need_rank]


def named_dataset(
    context: Context, source: Source, call: cst.Call, arg: cst.Arg
) -> tuple[str, list[Edit]]:
    """How the dataset of a loader is named a second time, and the edits that give it a name."""
    node = arg.value
    if _is_simple(node):
        return source.code(node), []
    name = _free_name(context, source, call)
    statement = source.statement_of(call)
    between = []
    for item in source.ancestors(call):
        if item is statement:
            break
        between.append(item)
    is_now = (
        isinstance(statement, cst.SimpleStatementLine)
        and len(statement.body) == 1
        and not any(isinstance(item, _LATER) for item in between)
    )
    if is_now:
        line = f"{name} = {source.code(node)}"
        if "\n" in line and node not in getattr(node, "lpar", ()) and not _is_bracketed(node):
            line = f"{name} = ({source.code(node)})"
        return name, [insert_before(source, statement, [line]), replace(source, node, name)]
    return name, [*enclose(source, node, f"({name} := ", ")")]


def _is_bracketed(node: cst.CSTNode) -> bool:
    """Whether an expression over several lines needs no parentheses of its own."""
    return isinstance(node, cst.Call | cst.List | cst.Tuple | cst.ListComp | cst.Dict)


def _is_simple(node: cst.CSTNode) -> bool:
    """Whether an expression can be evaluated again without doing anything again."""
    if isinstance(node, cst.Attribute):
        return _is_simple(node.value)
    if isinstance(node, cst.Subscript) and len(node.slice) == 1:
        index = node.slice[0].slice
        plain = isinstance(index, cst.Index) and isinstance(
            index.value, cst.Name | cst.Integer | cst.SimpleString | cst.Attribute
        )
        return plain and _is_simple(node.value)
    return isinstance(node, cst.Name)


def _free_name(context: Context, source: Source, call: cst.Call) -> str:
    """A name for a loader's dataset: `train_dataset` for `train_loader`."""
    small = source.around(call, cst.Assign, cst.AnnAssign)
    targets = assigned_targets(small) if small is not None else []
    target = (dotted(targets[0]) or "").rpartition(".")[2] if targets else ""
    stem = re.sub(r"_?(data_?)?(loader|iter|dl)$", "", target, flags=re.I)
    name = f"{stem.rstrip('_')}_dataset" if stem else "dataset"
    while name in context.flow.names[source].bound:
        name += "_"
    return name


def _drop_last(plan: Plan) -> str:
    arg = plan.argument("drop_last")
    if arg is None or literal(arg.value) is False:
        return ""
    return f", drop_last={plan.source.code(arg.value)}"


def _negated(condition: str) -> str:
    if condition.startswith("not "):
        return condition.removeprefix("not ")
    if " == " in condition:
        return condition.replace(" == ", " != ", 1)
    return condition.replace(" in ", " not in ", 1) if " in " in condition else f"not {condition}"


def _new_sampler(context: Context, plan: Plan, shuffle: str) -> tuple[str, list[Edit]]:
    """The text of a DistributedSampler for the loader's dataset."""
    arg = plan.argument("dataset")
    assert arg is not None
    begin, edits = distributed_sampler(context, plan.source, plan.call)
    name, naming = named_dataset(context, plan.source, plan.call, arg)
    group, needs = group_arguments(context, plan.source)
    text = f"{begin}{name}{group}, shuffle={shuffle}{_drop_last(plan)})"
    return text, [*edits, *naming, *needs]


def _from_shuffle(context: Context, plan: Plan) -> tuple[list[Edit], str]:
    """`shuffle=` becomes `sampler=`: they exclude each other."""
    source = plan.source
    given = plan.argument("shuffle")
    shuffle = source.code(given.value) if given and literal(given.value) is not None else "False"
    is_condition = bool(plan.condition) and "".join(shuffle.split()) == "".join(
        plan.condition.split()
    )
    text, edits = _new_sampler(context, plan, "True" if is_condition else shuffle)
    if plan.condition:
        text += f" if {plan.condition} else None"
    stays = bool(plan.condition) and not is_condition and shuffle != "False"
    if given is not None and stays:
        negated = _negated(plan.condition)
        if shuffle == "True":
            edits.append(replace(source, given.value, negated))
        else:
            edits += enclose(source, given.value, f"{negated} and (", ")")
    edits += _placed(plan, text, None if stays else given)
    return edits, _PADDING.format(subject(plan))


def _placed(plan: Plan, text: str, shuffle: cst.Arg | None) -> list[Edit]:
    """`sampler=text`, where `shuffle=` stands or `sampler=None`, or last."""
    source, call = plan.source, plan.call
    edits: list[Edit] = []
    old = plan.argument("sampler")
    if old is not None:
        edits.append(replace(source, old.value, text))
        if shuffle is not None and shuffle.keyword is None:
            return [*edits, replace(source, shuffle.value, "False")]
        return [*edits, remove_argument(source, call, shuffle)] if shuffle else edits
    if shuffle is None:
        return [add_argument(source, call, f"sampler={text}")]
    start, stop = source.span(shuffle).start, source.span(shuffle).stop
    for paren in getattr(shuffle.value, "rpar", ()):
        stop = max(stop, source.span(paren).stop) if paren in source.spans else stop
    return [Text(source, start, stop, f"sampler={text}")]


def _plain(context: Context, plan: Plan) -> tuple[list[Edit], str]:
    """`RandomSampler(dataset)` becomes `DistributedSampler(dataset)`."""
    call = plan.sampler
    assert call is not None
    begin, edits = distributed_sampler(context, plan.source, plan.call)
    group, needs = group_arguments(context, plan.source)
    name = context.flow.qualified(plan.source, call.func) or ""
    shuffle = "" if name.endswith("RandomSampler") else ", shuffle=False"
    edits += [replace(plan.source, call.func, begin[:-1]), *needs]
    more = f"{group}{shuffle}{_drop_last(plan)}".removeprefix(", ")
    if more:
        edits.append(add_argument(plan.source, call, more))
    return edits, _PADDING.format(subject(plan))


def _wrapped(context: Context, plan: Plan) -> tuple[list[Edit], str]:
    """A sampler of the script deals out what the main process draws from it."""
    arg = plan.argument("sampler")
    assert arg is not None
    source = plan.source
    name, need = context.helper(source, "ShardedSampler")
    edits: list[Edit] = [need]
    more = _drop_last(plan)
    size = plan.argument("batch_size")
    own = any(isinstance(v, Instance) for v in context.flow.of(source, arg.value))
    if own and size is not None and isinstance(size.value, cst.Name | cst.Attribute | cst.Integer):
        split, need_split = context.helper(source, "per_process")
        text = source.code(size.value)
        is_global = context.options.batch == "global"
        more = f", block={split}({text})" + more if is_global else f", block={text}" + more
        edits += [need_split] if is_global else []
    after = f"{more})"
    given = source.code(arg.value)
    shuffle = plan.argument("shuffle")
    if plan.optional:
        order = source.code(shuffle.value) if shuffle else "False"
        order = "True" if "".join(order.split()) == f"{given}isNone" else order
        text, new = _new_sampler(context, plan, order)
        edits += new
        after += f" if {given} is not None else {text}"
    elif plan.condition:
        after += f" if {plan.condition} else {given}"
    edits += enclose(source, arg.value, f"{name}(", after)
    if shuffle is not None and shuffle.keyword is not None:
        edits.append(remove_argument(source, plan.call, shuffle))
    return edits, _PADDING.format(subject(plan))


def _wrapped_batches(context: Context, plan: Plan) -> tuple[list[Edit], str]:
    """A batch sampler of the script gives every process its part of every batch."""
    arg = plan.argument("batch_sampler")
    assert arg is not None
    name, need = context.helper(plan.source, "ShardedBatchSampler")
    other = f" if {plan.condition} else {plan.source.code(arg.value)}" if plan.condition else ""
    edits: list[Edit] = [need, *enclose(plan.source, arg.value, f"{name}(", f"){other}")]
    return edits, (
        "a batch that cannot be split evenly repeats some of its samples, so that all parts are "
        "equally long"
    )


def _wrapped_stream(context: Context, plan: Plan) -> tuple[list[Edit], str]:
    """Every process keeps every n-th sample of a stream."""
    arg = plan.argument("dataset")
    assert arg is not None
    name, need = context.helper(plan.source, "ShardedIterable")
    edits: list[Edit] = [need, *enclose(plan.source, arg.value, f"{name}(", ")")]
    return edits, (
        f"{subject(plan)} gives the same samples in the same order in every process; an uneven "
        "rest is left out"
    )


def _keywords(context: Context, plan: Plan) -> tuple[list[Edit], str]:
    """`DataLoader(dataset, **arguments)`: the dict is converted where it is used."""
    star = next(arg for arg in plan.call.args if arg.star)
    arg = plan.argument("dataset")
    assert arg is not None
    name, need = context.helper(plan.source, "sharded_arguments")
    dataset, naming = named_dataset(context, plan.source, plan.call, arg)
    edits: list[Edit] = [
        need,
        *naming,
        *enclose(plan.source, star.value, f"{name}({dataset}, **", ")"),
    ]
    return edits, (
        "the batch size is the global one, as it was before; " + _PADDING.format(subject(plan))
    )


EDITS = {
    Way.SHUFFLE: _from_shuffle,
    Way.PLAIN_SAMPLER: _plain,
    Way.SAMPLER: _wrapped,
    Way.BATCH_SAMPLER: _wrapped_batches,
    Way.ITERABLE: _wrapped_stream,
    Way.KEYWORDS: _keywords,
}
