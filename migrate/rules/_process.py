"""Questions that several rules about processes ask: what is printed, what uses a device."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.facts.main_process import names_rank
from migrate.facts.program import Facts
from migrate.rule import Context
from migrate.source import Source
from migrate.syntax import argument, dotted, method_name, positional, string_value
from migrate.values import Function

SEEDS = re.compile(
    r"^(torch(\.random|\.cuda)?\.(manual_seed|manual_seed_all)|numpy\.random\.seed|random\.seed"
    r"|(transformers|accelerate|pytorch_lightning|lightning)(\.\w+)*\.(set_seed|seed_everything))$"
)
"""The external functions that seed."""
CLOCKS = re.compile(
    r"^(datetime\.(datetime\.|date\.)?(now|today|utcnow)|time\.(time|strftime|localtime|gmtime|asctime"
    r"|ctime|time_ns)|uuid\.uuid[14]|tempfile\.(mkdtemp|mktemp)|os\.getpid|socket\.gethostname"
    r"|platform\.node|secrets\.token_\w+|random\.(randint|randrange|choice|choices|getrandbits)"
    r"|numpy\.random\.(randint|choice))$"
)
"""The external functions that give every process another value."""
_OWN_DEVICE = re.compile(r"\b(current_device|get_device)\(")
_CUDA = re.compile(r"^torch\.cuda\.(?!is_available$|is_initialized$|manual_seed(_all)?$|amp\.)")
_DEFAULTS = re.compile(r"^torch\.(set_default_tensor_type|set_default_device)$")
_FILES = re.compile(
    r"^(os\.(mkdir|makedirs)|open|wandb\.init|shutil\.\w+)$|SummaryWriter$|FileHandler$"
)
_LOG = {"info", "debug", "warning", "warn", "error", "critical", "exception", "log", "write"}
VISIBLE = "CUDA_VISIBLE_DEVICES"


def short(source: Source, node: cst.CSTNode) -> str:
    """The text of a node on one line, cut where it is long."""
    code = source.one_line(node)
    return code if len(code) <= 60 else code[:57] + "..."


def names_own_number(source: Source, node: cst.CSTNode) -> bool:
    """Whether a piece of code names the process's number, or that of its device."""
    return names_rank(source, node) or bool(_OWN_DEVICE.search(source.code(node)))


def is_output(call: cst.Call) -> bool:
    """Whether a call prints, logs or writes text, or says what an argument is for."""
    return dotted(call.func) in ("print", "print_") or method_name(call) in _LOG


def in_output(source: Source, node: cst.CSTNode) -> bool:
    """Whether an expression is part of what is printed, logged or shown as help."""
    for item in source.ancestors(node):
        if isinstance(item, cst.Call) and is_output(item):
            return True
        if isinstance(item, cst.Arg) and item.keyword and item.keyword.value in ("help", "desc"):
            return True
        if isinstance(item, cst.BaseSmallStatement | cst.BaseCompoundStatement):
            return False
    return False


class Uses:
    """What a piece of code uses, directly or through the project's functions it calls."""

    def __init__(self, context: Context) -> None:
        self.facts: Facts = context.facts
        self.flow = context.flow
        self._known: dict[tuple[cst.FunctionDef, bool], bool] = {}
        self._loaders = {loader.call for loader in context.facts.loaders}
        self._wraps = {wrap.call for wrap in context.facts.wraps}

    def device(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether running `node` may use a device."""
        return self._any(source, node, False)

    def group(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether running `node` may use a device, or do what only one process should do."""
        return self._any(source, node, True)

    def _any(self, source: Source, node: cst.CSTNode, broad: bool) -> bool:
        return any(
            self._direct(source, call, broad) or self._called(source, call, broad)
            for call in source.inside(node, cst.Call)
        )

    def _called(self, source: Source, call: cst.Call, broad: bool) -> bool:
        functions = set(self.flow.callees.get(call, ()))
        for arg in call.args:
            functions |= {v for v in self.flow.of(source, arg.value) if isinstance(v, Function)}
        return any(self._function(function, broad) for function in functions)

    def _function(self, function: Function, broad: bool) -> bool:
        key = (function.node, broad)
        if key not in self._known:
            self._known[key] = False
            self._known[key] = self._any(function.source, function.node.body, broad)
        return self._known[key]

    def _direct(self, source: Source, call: cst.Call, broad: bool) -> bool:
        name = self.facts.callee(source, call) or ""
        if _CUDA.search(name) or _DEFAULTS.search(name):
            return True
        if method_name(call) in ("cuda", "to", "to_device") and not name:
            return True
        if call in self._wraps or (name.startswith("torch.") and argument(call, "device")):
            return True
        if not broad:
            return False
        named = bool(_FILES.search(name) or CLOCKS.search(name)) or method_name(call) == "mkdir"
        return named or call in self._loaders or argument(call, "download") is not None


def visible_devices(facts: Facts) -> Iterator[tuple[Source, cst.CSTNode, cst.BaseExpression]]:
    """Where the program sets CUDA_VISIBLE_DEVICES: the place and the value."""
    for source in facts.project.sources:
        for assign in source.all(cst.Assign):
            target = assign.targets[0].target
            if isinstance(target, cst.Subscript) and _is_environ(facts, source, target.value):
                index = target.slice[0].slice
                if isinstance(index, cst.Index) and string_value(index.value) == VISIBLE:
                    yield source, assign, assign.value
    for source, call in facts.calls_of(r"^os\.(environ\.setdefault|putenv)$"):
        key, value = positional(call, 0), positional(call, 1)
        if key and value and string_value(key.value) == VISIBLE:
            yield source, call, value.value


def _is_environ(facts: Facts, source: Source, node: cst.CSTNode) -> bool:
    return facts.flow.qualified(source, node) == "os.environ"


def top_statement(source: Source, node: cst.CSTNode) -> cst.CSTNode:
    """The statement around `node` in the body of its function, or of the module."""
    function = source.function_of(node)
    block: cst.CSTNode | None = function.body if function else source.module
    inner = node
    for item in source.ancestors(node):
        if item is block:
            return inner
        inner = item
    return inner
