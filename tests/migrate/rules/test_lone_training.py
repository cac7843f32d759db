"""DataParallel with a process per device."""

from __future__ import annotations

from rewriting import findings


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG902", to)]


HEAD = "import torch\nimport torch.nn as nn\nimport torch.distributed as dist\n"
GROUP = "dist.init_process_group('nccl')\n"


def test_the_process_s_own_device_is_told_about() -> None:
    for device in ("local_rank", "args.local_rank", "torch.cuda.current_device()"):
        code = HEAD + GROUP + f"m = nn.DataParallel(net, device_ids=[{device}])\n"
        assert len(said(code)) == 1, device


def test_without_processes_there_is_nothing_to_say() -> None:
    assert said(HEAD + "m = nn.DataParallel(net, device_ids=[gpu])\n") == []


def test_fixed_and_several_devices_are_fine() -> None:
    for devices in ("[0]", "[0, 1]", "ids"):
        assert said(HEAD + GROUP + f"m = nn.DataParallel(net, device_ids={devices})\n") == []


def test_the_right_wrapper_is_fine() -> None:
    code = "m = nn.parallel.DistributedDataParallel(net, device_ids=[rank])\n"
    assert said(HEAD + GROUP + code) == []
