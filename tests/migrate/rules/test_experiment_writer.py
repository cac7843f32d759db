"""Rule MG604: what records a run."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

IMPORTS = "import os, torch, wandb, mlflow, visdom\nfrom tensorboardX import SummaryWriter\n"
OR = " if is_main_process() else Silent()"
MODE = 'None if is_main_process() else "disabled"'


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("w = SummaryWriter('runs')", f"w = SummaryWriter('runs'){OR}"),
        ("w = SummaryWriter(\n    'runs',\n)", f"w = SummaryWriter(\n    'runs',\n){OR}"),
        ("f(writer=SummaryWriter())", f"f(writer=SummaryWriter(){OR})"),
        ("SummaryWriter().add_text('a', 'b')", f"(SummaryWriter(){OR}).add_text('a', 'b')"),
        ("with SummaryWriter() as w:\n    pass", f"with SummaryWriter(){OR} as w:\n    pass"),
        ("v = visdom.Visdom()", f"v = visdom.Visdom(){OR}"),
        ("wandb.init()", f"wandb.init(mode={MODE})"),
        ("wandb.init(project='a')", f"wandb.init(project='a', mode={MODE})"),
        ("wandb.init(mode=m)", 'wandb.init(mode=m if is_main_process() else "disabled")'),
        ("wandb.init(mode=a or b)",
         'wandb.init(mode=(a or b) if is_main_process() else "disabled")'),
        ("wandb.init(**kw)",
         'wandb.init(**{**kw, **({} if is_main_process() else {"mode": "disabled"})})'),
        ("mlflow.log_metric('a', 1)", "if is_main_process():\n    mlflow.log_metric('a', 1)"),
        ("with mlflow.start_run():\n    pass", f"with mlflow.start_run(){OR}:\n    pass"),
        ("w = SummaryWriter()\nd = os.path.join(w.logdir, 'a')",
         f"w = SummaryWriter(){OR}\nd = os.path.join(from_main_process(w.logdir), 'a')"),
    ],
)  # fmt: skip
def test_only_the_main_process_records(line: str, new: str) -> None:
    assert rewritten(IMPORTS + line, "MG604").endswith("\n" + new + "\n")


@pytest.mark.parametrize(
    "line",
    ["wandb.log({'a': 1})", "w = SummaryWriter() if rank == 0 else None",
     "wandb.init(mode='disabled')",
     "if rank == 0:\n    w = SummaryWriter()", "w.add_scalar('a', 1)"],
)  # fmt: skip
def test_what_is_right_already_stays(line: str) -> None:
    assert findings(IMPORTS + line, "MG604") == []


def test_a_second_run_changes_nothing() -> None:
    code = IMPORTS + "w = SummaryWriter()\nprint(w.log_dir)\nwandb.init(**kw)\nwandb.init()\n"
    code += "mlflow.set_tag('a', next(i))\nwandb.init(mode=m)\nrun = mlflow.start_run()\n"
    once = run(code, "MG604").files[0].after.decode()
    assert not run(once, "MG604").files[0].changed


def test_the_silent_writer_takes_everything() -> None:
    from migrate.snippets.common import Silent

    with Silent() as writer:
        writer.add_scalar("a", 1).file_writer.flush()
        writer.close()
