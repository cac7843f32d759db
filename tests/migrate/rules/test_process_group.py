"""Rule MG101: the program joins no process group."""

from __future__ import annotations

from rewriting import expect, findings, rewritten, run

from migrate.finding import Applicability

CODE = "MG101"


def again(code: str) -> bool:
    """Whether a second run changes the result of the first."""
    first = run(code, CODE).files[0].after.decode()
    return run(first, CODE).files[0].changed


def test_under_the_main_guard_it_is_the_first_statement() -> None:
    code = """
    def main():
        model = nn.Linear(2, 2).cuda()
    if __name__ == "__main__":
        args = 1
        main()
    """
    assert rewritten(code, CODE) == expect(
        """
        def main():
            model = nn.Linear(2, 2).cuda()
        if __name__ == "__main__":
            setup_distributed()
            args = 1
            main()
        """
    )
    assert not again(code)


def test_a_guard_on_one_line_becomes_a_block() -> None:
    code = "def main():\n    nn.Linear(2, 2).cuda()\nif __name__ == '__main__': main()\n"
    assert rewritten(code, CODE).endswith(
        "if __name__ == '__main__':\n    setup_distributed()\n    main()\n"
    )


def test_a_device_used_above_the_guard_draws_it_up() -> None:
    code = """
    model = nn.Linear(2, 2).cuda()
    if __name__ == "__main__":
        print(model)
    """
    assert rewritten(code, CODE).startswith("setup_distributed()\nmodel =")


def test_in_a_script_it_comes_before_the_first_device_or_output() -> None:
    code = """
    EPOCHS = 3
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    model = model.cuda()
    """
    assert "model = nn.Linear(2, 2)\nsetup_distributed()\nmodel = model.cuda()" in rewritten(
        code, CODE
    )


def test_a_call_of_main_without_a_guard_comes_after_it() -> None:
    code = "def main():\n    nn.Linear(2, 2).cuda()\nmain()\n"
    assert rewritten(code, CODE).endswith("setup_distributed()\nmain()\n")


VISIBLE = """
import os
import torch
import torch.nn as nn
def main():
    gpus = "0,1"
    {before}
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    model = nn.Linear(2, 2).cuda()
if __name__ == "__main__":
    main()
"""


def test_it_waits_for_the_choice_of_visible_devices() -> None:
    code = VISIBLE.format(before="pass")
    text = rewritten(code, CODE)
    assert '"CUDA_VISIBLE_DEVICES"] = gpus\n    setup_distributed()\n' in text
    assert text.count("setup_distributed()") == 1
    assert not again(code)


def test_a_device_used_before_that_choice_is_reported() -> None:
    found = findings(VISIBLE.format(before="torch.zeros(1).cuda()"), CODE)
    assert [f.applicability for f in found] == [Applicability.MANUAL]
    assert "a device may be used before" in found[0].message


def test_a_file_that_starts_nothing_is_reported() -> None:
    found = findings("def train():\n    nn.Linear(2, 2).cuda()\n", CODE)
    assert [f.applicability for f in found] == [Applicability.MANUAL]


GROUP = """
import os
import torch
import torch.distributed as dist
import torch.nn as nn
def main(args):
    {line}
        dist.init_process_group("nccl")
    model = nn.DataParallel(nn.Linear(2, 2))
main(1)
"""


def test_a_group_of_the_program_s_own_is_kept() -> None:
    for line in ("if True is True and dist.is_available():", 'if "RANK" in os.environ:'):
        assert findings(GROUP.format(line=line), CODE) == []


def test_a_group_under_another_condition_is_reported() -> None:
    (found,) = findings(GROUP.format(line="if args.distributed:"), CODE)
    assert found.message == "the process group is made only if args.distributed"
    assert not found.edits


def test_only_the_entry_gets_the_group() -> None:
    files = {
        "train.py": "from model import make\nif __name__ == '__main__':\n    make()\n",
        "model.py": "import torch\ndef make():\n    torch.zeros(1).cuda()\n    loss.backward()\n",
    }
    result = run(files, CODE)
    assert [f.path.name for f in result.files if f.changed] == ["train.py"]
