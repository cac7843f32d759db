"""A device is named by its number.

Why it matters: with one process per device, `cuda:0` is the device of the first process only. All
others would put their tensors there too.

Safety: safe where the number stands in the text; `cuda` is the process's own device once the
process has chosen it. An argument that is only called like a device number (`gpu`, `gpu_ids`, the
one place where a name decides) is edited under that assumption. A program that puts its parts on
several numbered devices is reported and left alone.

Before::

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = nn.Linear(2, 2).to(device)
    model.cuda(0)

After::

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Linear(2, 2).to(device)
    model.cuda()
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, delete_statement, remove_argument, replace
from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.rules._process import in_output, names_own_number, short
from migrate.source import Source
from migrate.syntax import argument, method_name, receiver, string_value
from migrate.values import External

_NUMBERED = re.compile(r"^cuda:(\d+)$")
_GPU_NAME = re.compile(
    r"(^|[._])(gpus?|cuda|device)_?(ids?|idx|index|num|no|number|list)?(\[0\])?$|(^|[._])gpus?(\[0\])?$"
)
_GIVEN = "the number names the one device to train on, which torchrun's processes choose themselves"


class DeviceNumbers(Rule):
    """Finds devices that are named by a number."""

    code = "MG102"
    title = "a device is named by its number"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding per place; a single manual one where the program uses several devices."""
        several = _several(context)
        if several is not None:
            source, node, names = several
            yield self.finding(
                source, node, f"the program puts parts on several devices: {names}",
                advice="give each process one device: use 'cuda' everywhere, or keep the split and "
                "do not run one process per device",
            )  # fmt: skip
            return
        for source in context.sources:
            own = context.facts.definitions[source]
            for node, text in _texts(source):
                if not own.is_own(node) and not _is_left(context, source, node):
                    yield self._text(source, node, text)
        for source, call in context.facts.calls():
            yield from self._call(context, source, call)

    def _text(self, source: Source, node: cst.BaseExpression, text: str) -> Finding:
        quote = "'" if source.code(node).lstrip("fFrR").startswith("'") else '"'
        message = f"{short(source, node)} becomes the process's own device"
        edits = [replace(source, node, f"{quote}cuda{quote}")]
        return self.finding(source, node, message, edits)

    def _call(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        name = context.facts.callee(source, call) or ""
        if name == "torch.cuda.set_device":
            yield from self._set_device(context, source, call)
        elif name == "torch.cuda.device" and _number(context, source, call, 0):
            yield self._edited(source, call, [replace(source, call.args[0].value, '"cuda"')])
        elif name == "torch.device":
            yield from self._device(context, source, call)
        else:
            yield from self._method(context, source, call)

    def _method(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        if method_name(call) == "cuda" and not isinstance(_of(context, source, call), External):
            arg = argument(call, "device", 0)
            if (
                arg
                and not _in_load(context, source, call)
                and _is_index(context, source, arg.value)
            ):
                yield self._edited(source, call, [remove_argument(source, call, arg)])
        elif method_name(call) == "to" and (arg := _number(context, source, call, 0)):
            yield self._to_cuda(source, call, arg.value)

    def _to_cuda(self, source: Source, call: cst.Call, value: cst.BaseExpression) -> Finding:
        assumption = "" if isinstance(value, cst.Integer) else _GIVEN
        return self._edited(source, call, [replace(source, value, '"cuda"')], assumption)

    def _edited(
        self, source: Source, call: cst.Call, edits: list[Edit], assumption: str = ""
    ) -> Finding:
        kind = Applicability.POLICY if assumption else Applicability.SAFE
        message = f"{short(source, call)} uses the process's own device"
        return self.finding(source, call, message, edits, kind, assumption=assumption)

    def _device(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        kind, index = argument(call, "type", 0), argument(call, "index", 1)
        if index and kind and string_value(kind.value) == "cuda":
            if not _is_rank(context, source, index.value):
                yield self._edited(source, call, [remove_argument(source, call, index)])
        elif len(call.args) == 1 and (arg := _number(context, source, call, 0)):
            yield self._to_cuda(source, call, arg.value)

    def _set_device(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        expression = source.parent(call)
        line = source.parent(expression) if isinstance(expression, cst.Expr) else None
        if not call.args or _is_rank(context, source, call.args[0].value):
            return
        message = f"{short(source, call)}: every process has chosen its device already"
        if line is None or len(getattr(line, "body", ())) != 1 or source.inside(call, cst.Await):
            yield self.finding(source, call, message, advice="delete this call")
        else:
            yield self.finding(source, call, message, [delete_statement(source, line)])


def _of(context: Context, source: Source, call: cst.Call) -> object:
    return next(iter(context.flow.of(source, receiver(call))), None)


def _texts(source: Source) -> Iterator[tuple[cst.BaseExpression, str]]:
    """The expressions that build `cuda:` and a number, with the number's text."""
    for plain in source.all(cst.SimpleString):
        found = _NUMBERED.match(string_value(plain) or "")
        if found and not isinstance(source.parent(plain), cst.ConcatenatedString):
            yield plain, found.group(1)
    for formatted in source.all(cst.FormattedString):
        if re.match(r"^f[\"']cuda:\{[^{}]*\}[\"']$", source.code(formatted), re.I):
            yield formatted, source.code(formatted)[8:-2]
    for operation in source.all(cst.BinaryOperation):
        left = string_value(operation.left) or ""
        percent = isinstance(operation.operator, cst.Modulo) and re.match(r"^cuda:%[dsi]$", left)
        if percent or (isinstance(operation.operator, cst.Add) and left == "cuda:"):
            yield operation, source.code(operation.right)
    for call in source.all(cst.Call):
        text = string_value(receiver(call)) or "" if method_name(call) == "format" else ""
        if re.match(r"^cuda:\{[0-9:d]*\}$", text):
            yield call, ", ".join(source.code(arg) for arg in call.args)


def _is_left(context: Context, source: Source, node: cst.CSTNode) -> bool:
    """Whether a numbered text is no device of this program's: printed, of a rank, of a load."""
    printed = in_output(source, node) or isinstance(source.parent(node), cst.Expr)
    return printed or names_own_number(source, node) or _in_load(context, source, node)


def _in_load(context: Context, source: Source, node: cst.CSTNode) -> bool:
    return any(
        isinstance(item, cst.Call) and context.facts.callee(source, item) == "torch.load"
        for item in source.ancestors(node)
    )


def _is_rank(context: Context, source: Source, node: cst.CSTNode) -> bool:
    """Whether a number is the process's own, or may be, in a program that has a group already."""
    if context.facts.process_groups and not isinstance(node, cst.Integer):
        return True
    return names_own_number(source, node)


def _is_index(context: Context, source: Source, node: cst.BaseExpression) -> bool:
    """Whether the argument of `.cuda()` picks a device by number."""
    if isinstance(node, cst.Integer):
        return True
    if isinstance(node, cst.Name) and node.value in ("None", "True", "False"):
        return False
    if string_value(node) is not None or isinstance(node, cst.FormattedString):
        return False  # a numbered text has a finding of its own
    known = context.flow.made_by(source, node)
    return not known and not _is_rank(context, source, node) and bool(
        _GPU_NAME.search(source.code(node))
    )  # fmt: skip


def _number(context: Context, source: Source, call: cst.Call, index: int) -> cst.Arg | None:
    """The argument of a call if it is a device number."""
    arg = argument(call, "device", index)
    if arg is None or isinstance(arg.value, cst.Integer):
        return arg
    code = source.code(arg.value)
    if context.flow.made_by(source, arg.value) or _is_rank(context, source, arg.value):
        return None
    named = _GPU_NAME.search(code) and not re.search(r"device$", code)
    return arg if named and not isinstance(arg.value, cst.Call) else None


def _several(context: Context) -> tuple[Source, cst.CSTNode, str] | None:
    """The second of two different device numbers, if the program uses that many."""
    seen: dict[str, tuple[Source, cst.CSTNode]] = {}
    for source in context.sources:
        for node, text in _texts(source):
            if text.isdigit() and not _is_left(context, source, node):
                seen.setdefault(text, (source, node))
    for source, call in context.facts.calls():
        given = call.args[0].value if call.args and method_name(call) in ("cuda", "to") else None
        if isinstance(given, cst.Integer) and not _in_load(context, source, call):
            seen.setdefault(given.value, (source, call))
    if len(seen) < 2:
        return None
    where, second = list(seen.values())[1]
    return where, second, ", ".join(f"cuda:{number}" for number in sorted(seen))
