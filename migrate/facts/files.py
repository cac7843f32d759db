"""The files that a program writes and reads, and how a call is kept to the main process.

What is written where is found by the full names of functions and, for methods of libraries, by the
method's name. Paths are compared as text, and through the variables that hold them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from migrate.edit import Edit, Guard, enclose
from migrate.facts.program import Facts
from migrate.facts.state import is_sharded_state
from migrate.once import once
from migrate.rule import Context
from migrate.source import Source
from migrate.syntax import (
    argument,
    dotted,
    literal,
    method_name,
    positional,
    receiver,
    string_value,
)

_WRITING_FUNCTIONS: tuple[tuple[re.Pattern[str], str, int], ...] = tuple(
    (re.compile(pattern), keyword, index)
    for pattern, keyword, index in (
        (r"torch\.save|torch\.jit\.save", "f", 1),
        (r"torch\.onnx\.export", "f", 2),
        (r"safetensors(\.\w+)*\.save_(file|model)", "filename", 1),
        (r"numpy\.(save|savez|savez_compressed)", "file", 0),
        (r"numpy\.savetxt", "fname", 0),
        (r"(.*\.)?(_?c?[Pp]ickle|dill|cloudpickle)\.dump", "file", 1),
        (r"joblib\.dump", "filename", 1),
        (r"(json|simplejson|ujson)\.dump", "fp", 1),
        (r"yaml\.(safe_)?dump(_all)?", "stream", 1),
        (
            r"matplotlib\.pyplot\.(savefig|imsave)|matplotlib\.image\.imsave|pylab\.savefig",
            "fname",
            0,
        ),
        (r"cv2\.imwrite", "filename", 0),
        (r"imageio(\.v[23])?\.(imwrite|imsave|mimsave|mimwrite|volwrite)", "uri", 0),
        (r"scipy\.misc\.imsave|skimage\.io\.imsave", "fname", 0),
        (r"torchvision\.utils\.save_image", "fp", 1),
        (r"torchvision\.io\.write_\w+", "filename", 1),
        (r"torchaudio\.save|soundfile\.write|scipy\.io\.(savemat|wavfile\.write)", "uri", 0),
        (r"shutil\.(copy|copy2|copyfile|copytree|move)", "dst", 1),
        (r"shutil\.rmtree", "path", 0),
        (r"shutil\.make_archive", "base_name", 0),
        (r"os\.(rename|renames|replace|symlink|link)", "dst", 1),
        (r"os\.(remove|unlink|rmdir|removedirs|truncate)", "path", 0),
    )
)
_WRITING_METHODS = frozenset(
    (
        "save_pretrained", "savefig", "to_csv", "to_json", "to_excel", "to_pickle", "to_parquet",
        "to_feather", "to_hdf", "save_to_disk", "write_text", "write_bytes",
    )
)  # fmt: skip
_INTO_FILES = frozenset({"write", "writerow", "writerows", "save", "save_checkpoint"})
"""Names of what writes into files that were opened elsewhere, or under paths of its own."""
_FOLDER = re.compile(r"^os\.(makedirs|mkdir)$")
_READING = re.compile(
    r"^(torch\.load|torch\.jit\.load|numpy\.(load|loadtxt|genfromtxt)|pandas\.read_\w+|cv2\.imread"
    r"|PIL\.Image\.open|joblib\.load|safetensors(\.\w+)*\.load_file|imageio(\.v[23])?\.imread)$"
)
_COMMAND = re.compile(
    r"^(os\.(system|popen)|subprocess\.(call|run|check_call|check_output|Popen))$"
)
_WRITING_COMMAND = re.compile(r"^\s*(cp|mv|rm|ln|tar|zip|gzip|rsync|touch)\b")
_OPEN = re.compile(r"^(open|io\.open|codecs\.open|gzip\.open|bz2\.open|lzma\.open)$")
_FILE_OBJECT = re.compile(r"(^|\.)open$|BytesIO|StringIO|TemporaryFile")
_IMAGE = re.compile(r"(^|\.)PIL\.|Image\.|[tT]o_?[pP][iI][lL]|FuncAnimation|ArtistAnimation")
_NOT_PLAIN = re.compile(
    r"^(next|input|random\.|numpy\.random\.|torch\.(rand|normal|multinomial|bernoulli)|torch\.distributed)"
)
_CHANGING = frozenset(
    (
        "pop", "popleft", "popitem", "append", "extend", "next", "__next__", "update", "add",
        "remove", "clear", "setdefault", "insert", "read", "readline", "readlines", "sample",
        "step", "backward", "send",
    )
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Write:
    """A call that writes. `path` is where to, if that is one of its arguments."""

    source: Source
    call: cst.Call
    path: cst.BaseExpression | None


@once
def writes(context: Context) -> list[Write]:
    """Every call that writes, moves or deletes a file, but `open` and what goes into its files."""
    return [
        Write(source, call, path[0])
        for source, call in context.facts.calls()
        if not isinstance(call.func, cst.Call)  # `on_main(torch.save)(...)`
        and (path := _written(context, source, call))
    ]


def _written(
    context: Context, source: Source, call: cst.Call
) -> tuple[cst.BaseExpression | None] | None:
    name = context.facts.callee(source, call) or ""
    for pattern, keyword, index in _WRITING_FUNCTIONS if name else ():
        if pattern.fullmatch(name):
            return _place(context, source, argument(call, keyword, index))
    if _COMMAND.match(name) and call.args:
        return (None,) if _WRITING_COMMAND.match(_first_text(call.args[0].value)) else None
    method = method_name(call)
    if context.flow.callees.get(call):
        return None
    if method in ("write_text", "write_bytes"):
        return (receiver(call),)
    if method in _WRITING_METHODS:
        return _place(context, source, call.args[0] if call.args else None)
    if method == "save" and _is_image(context, source, call):
        return _place(context, source, positional(call, 0))
    if method in ("unlink", "rename", "rmdir") and is_path(context, source, receiver(call)):
        return (receiver(call),)
    return None


def is_write(facts: Facts, source: Source, call: cst.Call) -> bool:
    """Whether a call is of a function that writes, moves, deletes or opens files or folders."""
    name = facts.callee(source, call) or ""
    is_writing = any(pattern.fullmatch(name) for pattern, _, _ in _WRITING_FUNCTIONS)
    return is_writing or bool(_OPEN.match(name) or _FOLDER.match(name))


def may_write(facts: Facts, source: Source, call: cst.Call) -> bool:
    """The same, or of a method that by its name may write; a progress bar's writes no file."""
    if is_write(facts, source, call):
        return True
    full, owner = facts.callee(source, call) or "", dotted(receiver(call)) or ""
    name = method_name(call) or full
    return name in _WRITING_METHODS | _INTO_FILES and "tqdm" not in owner + full


def _place(
    context: Context, source: Source, arg: cst.Arg | None
) -> tuple[cst.BaseExpression] | None:
    """The path; None where nothing is written to, or a file object that was opened elsewhere."""
    if arg is None or literal(arg.value) is None:
        return None
    made = context.flow.made_by(source, arg.value)
    return None if any(_FILE_OBJECT.search(value.name) for value in made) else (arg.value,)


def _is_image(context: Context, source: Source, call: cst.Call) -> bool:
    made = context.flow.made_by(source, receiver(call))
    return any(_IMAGE.search(value.name) for value in made)


def is_path(context: Context, source: Source, node: cst.CSTNode | None) -> bool:
    """Whether an expression may be a `pathlib` path."""
    made = context.flow.made_by(source, node)
    return any(value.name.startswith("pathlib.") for value in made)


def _first_text(node: cst.BaseExpression) -> str:
    """The literal text that a string expression begins with."""
    while True:
        if isinstance(node, cst.BinaryOperation | cst.ConcatenatedString):
            node = node.left
        elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            node = node.func.value
        elif isinstance(node, cst.List | cst.Tuple) and node.elements:
            node = node.elements[0].value
        else:
            break
    if isinstance(node, cst.FormattedString):
        first = node.parts[0] if node.parts else None
        return first.value if isinstance(first, cst.FormattedStringText) else ""
    return string_value(node) or ""


# Files that are opened


def opened(
    context: Context, source: Source, call: cst.Call
) -> tuple[cst.BaseExpression, str] | None:
    """The path and the modes, joined by `|`, of a call that opens a file; `?` is an unknown one."""
    name = context.facts.callee(source, call) or ""
    if _OPEN.match(name):
        path = argument(call, "file", 0) or argument(call, "filename")
        mode = argument(call, "mode", 1)
    elif method_name(call) == "open" and is_path(context, source, receiver(call)):
        path, mode = cst.Arg(receiver(call) or cst.Name("_")), argument(call, "mode", 0)
    else:
        return None
    if path is None:
        return None
    return path.value, "|".join(_modes(mode.value)) if mode else "r"


def _modes(node: cst.BaseExpression) -> Iterator[str]:
    if isinstance(node, cst.IfExp):
        yield from _modes(node.body)
        yield from _modes(node.orelse)
    else:
        yield string_value(node) or "?"


def reads(context: Context) -> Iterator[tuple[Source, cst.Call, cst.BaseExpression]]:
    """Every call that reads a file, with the path."""
    for source, call in context.facts.calls():
        place = opened(context, source, call)
        if place is not None and not re.search(r"[wax?]", place[1]):
            yield source, call, place[0]
        elif _READING.match(context.facts.callee(source, call) or "") and call.args:
            yield source, call, call.args[0].value


def reaching(
    context: Context, source: Source, call: cst.Call
) -> Iterator[tuple[Source, cst.CSTNode]]:
    """A call, and the calls of the project's functions that come to it."""
    seen: set[cst.FunctionDef] = set()
    queue: list[tuple[Source, cst.Call]] = [(source, call)]
    while queue:
        home, node = queue.pop()
        yield home, node
        function = home.function_of(node)
        if function is not None and function not in seen:
            seen.add(function)
            queue += context.facts.callers.get(function, [])


# Only in the main process


def whole_statement(source: Source, call: cst.Call) -> cst.CSTNode | None:
    """The statement that is nothing but this call, alone on its line."""
    parent = source.parent(call)
    line = source.parent(parent) if isinstance(parent, cst.Expr) else None
    if isinstance(line, cst.SimpleStatementLine | cst.SimpleStatementSuite) and len(line.body) == 1:
        return line
    return None


def is_used(source: Source, call: cst.Call) -> bool:
    """Whether something is done with what a call returns."""
    inner: cst.CSTNode = call
    for item in source.ancestors(call):
        if isinstance(item, cst.Expr | cst.Lambda | cst.Return):
            return False
        passes_on = isinstance(item, cst.IfExp) and inner is not item.test
        if not passes_on and not (isinstance(item, cst.BooleanOperation) and inner is item.right):
            return True
        inner = item
    return True


def keep_to_main(context: Context, source: Source, call: cst.Call) -> list[Edit]:
    """The edits after which only the main process makes a call.

    The statement goes under an `if`. Where its arguments have to be evaluated by all processes, or
    where there is no statement of its own, the function alone is replaced.
    """
    statement = whole_statement(source, call)
    if statement is not None and is_plain(context, source, call):
        name, need = context.helper(source, "is_main_process")
        return [Guard(source, statement, f"{name}()"), need]
    name, need = context.helper(source, "on_main")
    return [*enclose(source, call.func, f"{name}(", ")"), need]


def is_plain(context: Context, source: Source, call: cst.Call) -> bool:
    """Whether nobody misses the evaluation of a call's arguments where the call is not made.

    Not so: forward passes, gathered weights, random numbers, iterators, the project's functions.
    """
    if source.inside(call, cst.NamedExpr):
        return False
    inner = [item for item in source.inside(call, cst.Call) if item is not call]
    return all(_is_plain_call(context, source, item) for item in inner)


def _is_plain_call(context: Context, source: Source, call: cst.Call) -> bool:
    if is_sharded_state(context, source, call) or context.flow.callees.get(call):
        return False
    name = context.facts.callee(source, call)
    if name is not None:
        return not _NOT_PLAIN.match(name)
    if any(value.name == "forward" for value in context.flow.made_by(source, call)):
        return False
    method = method_name(call)
    return method is not None and method not in _CHANGING
