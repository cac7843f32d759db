"""Processes that the script starts itself."""

from __future__ import annotations

from rewriting import findings


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG813", to)]


HEAD = "import os\nimport subprocess\nimport torch\nimport torch.multiprocessing as mp\n"
LOOP = HEAD + "for epoch in range(3):\n    model(x).sum().backward()\n"


def test_commands_between_steps_are_reported() -> None:
    for line in ("os.system('python eval.py')", "subprocess.run(['python', 'eval.py'], check=True)",
                 "subprocess.call(cmd)"):  # fmt: skip
        assert len(said(LOOP + f"    {line}\n")) == 1, line


def test_commands_of_the_main_process_are_fine() -> None:
    assert said(LOOP + "    if rank == 0:\n        os.system('python eval.py')\n") == []


def test_commands_whose_output_is_read_are_fine() -> None:
    assert said(LOOP + "    out = subprocess.check_output(['git', 'log'])\n") == []


def test_helpers_that_training_does_not_reach_are_fine() -> None:
    assert said(LOOP + "def export():\n    os.system('zip a')\n") == []


def test_spawned_training_is_reported() -> None:
    code = (
        HEAD
        + """
def train(rank):
    model(x).sum().backward()
if __name__ == "__main__":
    mp.spawn(train, nprocs=4)
"""
    )
    assert said(code) == ["mp.spawn(…) starts train again in every process"]


def test_pools_for_data_are_fine() -> None:
    assert said(LOOP + "    with mp.Pool(4) as pool:\n        pool.map(f, x)\n") == []
