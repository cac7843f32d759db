"""The run is recorded with TensorBoard, wandb, visdom or the like.

Why it matters: every process would open a run of its own and record its own numbers in it.

Safety: safe. The other processes' writer takes every call and does nothing; what is passed to it is
still evaluated by all, because it may take part in the training.

Before::

    import torch
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter("runs")
    writer.add_scalar("loss", 0.5, 1)

After::

    import torch
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter("runs") if is_main_process() else Silent()
    writer.add_scalar("loss", 0.5, 1)
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, add_argument, enclose
from migrate.facts.files import keep_to_main, whole_statement
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import argument, string_value

_WRITERS = (
    r"(^|\.)(SummaryWriter|FileWriter)$|^visdom\.Visdom$|^visdom\.server\.|^cv2\.VideoWriter$"
    r"|^tensorboard_logger\.Logger$|^comet_ml\.(Experiment|start|ExistingExperiment)$"
    r"|^neptune(\.\w+)*\.(init|init_run|create_experiment)$|^clearml\.Task\.init$|^aim\.Run$"
    r"|^swanlab\.init$|^hyperdash\.Experiment$|^torchnet\.logger\.\w+Logger$|^test_tube\.Experiment$"
)
_MODULES = r"^(mlflow|swanlab|neptune|tensorboard_logger|comet_ml)\.(\w+\.)?\w+$"
_FOLDER = frozenset({"log_dir", "logdir", "get_logdir"})


class ExperimentWriter(Rule):
    """Finds what records a run."""

    code = "MG604"
    title = "every process records the run"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every writer, and for every call of a module that is one."""
        made: set[cst.CSTNode] = set()
        for source, call in context.facts.calls_of(_WRITERS):
            made.add(call)
            if not context.facts.main_process.is_by_rank(source, call):
                message = f"only the main process records with {source.code(call.func)}"
                edits = _or_silent(context, source, call)
                edits += _folder_reads(context, call)
                yield self.finding(source, call, message, edits)
        for source, call in context.facts.calls_of(r"^wandb\.init$"):
            if not context.facts.main_process.is_by_rank(source, call):
                yield from self._wandb(context, source, call)
        for source, call in context.facts.calls_of(_MODULES):
            is_done = isinstance(call.func, cst.Call)
            if call in made or is_done or context.facts.main_process.is_by_rank(source, call):
                continue
            message = f"leaves {source.code(call.func)} to the main process"
            alone = whole_statement(source, call) is not None
            edits = (keep_to_main if alone else _or_silent)(context, source, call)
            yield self.finding(source, call, message, edits)

    def _wandb(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        main, need = context.helper(source, "is_main_process")
        given = argument(call, "mode")
        stars = [arg for arg in call.args if arg.star == "**"]
        edits: list[Edit] = [need]
        if given is not None and string_value(given.value) == "disabled":
            return
        if given is not None:
            if context.facts.main_process.asks(source, given.value):
                return
            is_simple = isinstance(given.value, cst.Name | cst.Attribute | cst.SimpleString)
            before, after = ("", "") if is_simple or given.value.lpar else ("(", ")")
            choice = f'{after} if {main}() else "disabled"'
            edits += enclose(source, given.value, before, choice)
        elif stars:
            other = f'**({{}} if {main}() else {{"mode": "disabled"}})'
            if other in source.code(stars[-1].value):
                return
            edits += enclose(source, stars[-1].value, "{**", f", {other}}}")
        else:
            edits.append(add_argument(source, call, f'mode=None if {main}() else "disabled"'))
        yield self.finding(source, call, "only the main process records with wandb", edits)


def _or_silent(context: Context, source: Source, call: cst.Call) -> list[Edit]:
    """The edits after which a call is made in the main process, and is replaced elsewhere."""
    main, need = context.helper(source, "is_main_process")
    silent, need_silent = context.helper(source, "Silent")
    choice = f" if {main}() else {silent}()"
    parent = source.parent(call)
    is_alone = isinstance(parent, cst.Assign | cst.AnnAssign | cst.Arg | cst.WithItem | cst.Return)
    before, after = ("", choice) if is_alone or call.lpar else ("(", choice + ")")
    return [*enclose(source, call, before, after), need, need_silent]


def _folder_reads(context: Context, made: cst.Call) -> list[Edit]:
    """Where a writer's folder is read, all processes get the main one's."""
    edits: list[Edit] = []
    for source in context.sources:
        for node in source.all(cst.Attribute):
            if node.attr.value not in _FOLDER:
                continue
            if any(value.node is made for value in context.flow.made_by(source, node.value)):
                around = source.parent(node)
                is_call = isinstance(around, cst.Call) and around.func is node
                name, need = context.helper(source, "from_main_process")
                whole = around if is_call and around is not None else node
                if not context.facts.main_process.is_by_rank(source, node):
                    edits += [*enclose(source, whole, f"{name}(", ")"), need]
    return edits
