"""Rule MG501: calls that write files."""

from __future__ import annotations

import pytest
from rewriting import after, expect, findings, rewritten, run

IMPORTS = """
import json, os, pickle, shutil, subprocess
import cv2, imageio, torch, torchvision
import numpy as np
import torch.nn as nn
import matplotlib.pyplot as plt
import pandas as pd
from PIL import Image
from pathlib import Path
"""


@pytest.mark.parametrize(
    "call",
    [
        'torch.save(x, "a.pt")', "torch.save(obj=x, f=path)", "np.save(path, x)",
        "np.savez(path, a=x)", "np.savetxt(path, x)", "plt.savefig(path)", "cv2.imwrite(path, x)",
        "imageio.imwrite(path, x)", "torchvision.utils.save_image(x, path)",
        "Image.fromarray(x).save(path)", "pd.DataFrame(x).to_csv(path)", "shutil.copyfile(x, path)",
        "shutil.rmtree(path)", "os.remove(path)", "os.rename(x, path)", 'os.system("cp a b")',
        'os.system("rm -rf %s" % path)', 'subprocess.call(["mv", x, path])', "Path(path).unlink()",
        'Path(path).write_text("x")', "tokenizer.save_pretrained(path)", "json.dump(x, unknown)",
    ],
)  # fmt: skip
def test_every_way_to_write_goes_under_the_guard(call: str) -> None:
    text = rewritten(f"{IMPORTS}\n{call}\nbest = 1", "MG501")
    assert f"if is_main_process():\n    {call}\nbest = 1" in text


@pytest.mark.parametrize(
    "call",
    [
        'with open(path, "w") as f:\n    json.dump(x, f)', 'pickle.dump(x, open(path, "wb"))',
        "import io\ntorch.save(x, io.BytesIO())", "pd.DataFrame(x).to_csv()", 'os.system("ls")',
        "model.save(path)", "torch.load(path)", "os.path.join(path)",
        "if rank == 0:\n    torch.save(x, path)",
        "if dist.get_rank() == 0:\n    os.remove(path)",
        "if is_main_process():\n    torch.save(x, path)",
        "def f():\n    if args.local_rank != 0:\n        return\n    torch.save(x, path)",
        "def save():\n    torch.save(x, path)\nif rank == 0:\n    save()",
    ],
)  # fmt: skip
def test_what_is_no_write_or_one_process_only_stays(call: str) -> None:
    assert findings(f"{IMPORTS}\n{call}", "MG501") == []


def test_neighbours_share_one_if_and_what_is_beside_stays_for_all() -> None:
    text = rewritten(
        """
        def step(model, acc, best):
            if acc > best:
                torch.save(model, "a")
                torch.save(acc, "b")
                best = acc
            return best
        """,
        "MG501",
    )
    assert text == expect(
        """
        def step(model, acc, best):
            if acc > best:
                if is_main_process():
                    torch.save(model, "a")
                    torch.save(acc, "b")
                best = acc
            return best
        """
    )


def test_arguments_that_all_must_evaluate_stay_outside() -> None:
    code = """
    import torch
    import torch.nn as nn
    from torchvision.utils import save_image
    net = nn.DataParallel(nn.Linear(2, 2))
    save_image(net(torch.zeros(2)), "fake.png")
    torch.save(next(numbers), "n.pt")
    """
    text = rewritten(code, "MG501")
    assert 'on_main(save_image)(net(torch.zeros(2)), "fake.png")' in text
    assert 'on_main(torch.save)(next(numbers), "n.pt")' in text


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ('if ok: torch.save(1, "a")',
         'if ok:\n    if is_main_process():\n        torch.save(1, "a")'),
        ('a = 1; torch.save(1, "a")', 'a = 1; on_main(torch.save)(1, "a")'),
        ('ok and torch.save(1, "a")', 'ok and on_main(torch.save)(1, "a")'),
        ('f = lambda: torch.save(1, "a")', 'f = lambda: on_main(torch.save)(1, "a")'),
        ('torch.save(\n    1,\n    "a",\n)  # note',
         'if is_main_process():\n    torch.save(\n        1,\n        "a",\n    )  # note'),
    ],
)  # fmt: skip
def test_odd_places(line: str, new: str) -> None:
    assert rewritten(line, "MG501") == new + "\n"


def test_a_result_that_is_used_is_manual() -> None:
    (finding,) = findings('import os, torch\nif os.system("cp a b") != 0: pass', "MG501")
    assert finding.edits == ()
    assert "main process" in finding.advice


def test_tabs_and_methods_and_other_files() -> None:
    files = {
        "train.py": "import torch\nfrom util import Saver\nSaver().save(1)\nloss.backward()\n",
        "util.py": 'import torch\nclass Saver:\n\tdef save(self, x):\n\t\ttorch.save(x, "a")\n',
    }
    text = after(run(files, "MG501"), "util.py")
    assert '\t\tif is_main_process():\n\t\t\ttorch.save(x, "a")\n' in text


def test_weights_of_a_model_that_saves_itself_are_gathered() -> None:
    code = "model = nn.DataParallel(nn.Linear(2, 2))\nmodel.module.save_pretrained(out)"
    text = rewritten(code, ("MG501",), to="fsdp")
    whole = "state_dict=full_state(model.module.state_dict())"
    assert f"on_main(model.module.save_pretrained)(out, {whole})" in text


@pytest.mark.parametrize("to", ["ddp", "fsdp"])
def test_a_second_run_changes_nothing(to: str) -> None:
    code = 'torch.save(1, "a")\nb = 1; torch.save(next(x), "b")\n'
    once = run(code, "MG501", to).files[0].after.decode()
    assert not run(once, "MG501", to).files[0].changed
