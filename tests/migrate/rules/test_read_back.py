"""Rule MG508: files that are read after the run has written them."""

from __future__ import annotations

import pytest
from rewriting import after, findings, rewritten, run

from migrate.rule import Options

IMPORTS = "import os\nimport torch\nimport numpy as np\n"


@pytest.mark.parametrize(
    ("before", "new"),
    [
        ("torch.save(x, p)\ny = torch.load(p)",
         "torch.save(x, p)\nwait_for_everyone()\ny = torch.load(p)"),
        ("np.save('a.npy', x)\nif test:\n    y = np.load(\"a.npy\")",
         "np.save('a.npy', x)\nwait_for_everyone()\nif test:\n    y = np.load(\"a.npy\")"),
        ("p = os.path.join(d, 'a')\nfor i in r:\n    torch.save(x, p)\n"
         "y = torch.load(os.path.join(d, 'a'))",
         "p = os.path.join(d, 'a')\nfor i in r:\n    torch.save(x, p)\n"
         "wait_for_everyone()\ny = torch.load(os.path.join(d, 'a'))"),
        ("for i in r:\n    if os.path.exists(p):\n        y = torch.load(p)\n    torch.save(x, p)",
         "for i in r:\n    wait_for_everyone()\n    if os.path.exists(p):\n"
         "        y = torch.load(p)\n    torch.save(x, p)"),
        ("with open(p, 'w') as f:\n    f.write('x')\nwith open(p) as f:\n    f.read()",
         "with open(p, 'w') as f:\n    f.write('x')\nwait_for_everyone()\n"
         "with open(p) as f:\n    f.read()"),
    ],
)  # fmt: skip
def test_all_wait_before_the_outermost_statement(before: str, new: str) -> None:
    assert rewritten(IMPORTS + before, "MG508").endswith("\n" + new + "\n")


def test_the_write_may_be_in_another_object() -> None:
    files = {
        "train.py": """
            import os, torch
            from stop import Stopping
            def main(model):
                stop = Stopping(os.path.join("out", "best.pt"))
                for epoch in range(3):
                    model(1).backward()
                    stop(model)
                model.load_state_dict(torch.load(os.path.join("out", "best.pt")))
            main(torch.nn.Linear(1, 1))
            """,
        "stop.py": """
            import torch
            class Stopping:
                def __init__(self, path):
                    self.path = path
                def __call__(self, model):
                    self.save(model)
                def save(self, model):
                    torch.save(model.state_dict(), self.path)
            """,
    }
    text = after(run(files, "MG508"), "train.py")
    assert "    wait_for_everyone()\n    model.load_state_dict(torch.load(" in text


@pytest.mark.parametrize(
    "code",
    ["y = torch.load(p)\ntorch.save(x, p)", "torch.save(x, p)\ny = torch.load(q)",
     "torch.save(x, p)\ndist.barrier()\ny = torch.load(p)",
     "torch.save(x, p)\nif rank == 0:\n    y = torch.load(p)"],
)  # fmt: skip
def test_other_reads_do_not_wait(code: str) -> None:
    assert findings(IMPORTS + code, "MG508") == []


def test_datasets_never_wait() -> None:
    code = """
    import numpy as np, torch
    class Cached(torch.utils.data.Dataset):
        def __getitem__(self, i):
            np.save("a.npy", i)
            return np.load("a.npy")
    """
    assert findings(code, "MG508") == []


def test_a_second_run_changes_nothing() -> None:
    once = run(IMPORTS + "torch.save(1, 'p')\ny = torch.load('p')\n", "MG5").files[0].after.decode()
    assert not run(once, "MG5").files[0].changed


def test_a_folder_that_all_write_together_is_there_afterwards() -> None:
    code = "model = nn.DataParallel(nn.Linear(2, 2))\n"
    code += "torch.save(model.state_dict(), p)\nmodel.load_state_dict(torch.load(p))\n"
    assert findings(code, "MG508", "fsdp", Options(save="sharded")) == []
    assert len(findings(code, "MG508", "fsdp")) == 1
