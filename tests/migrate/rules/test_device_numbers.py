"""Rule MG102: a device is named by its number."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

from migrate.finding import Applicability

CODE = "MG102"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = x.cuda(0)", "x = x.cuda()"),
        ("x = x.cuda(args.gpu, non_blocking=True)", "x = x.cuda(non_blocking=True)"),
        ("x = x.cuda(device=device_ids[0])", "x = x.cuda()"),
        ('x = x.to("cuda:0")', 'x = x.to("cuda")'),
        ("x = x.to('cuda:1')", "x = x.to('cuda')"),
        ('x = x.to(f"cuda:{gpu}")', 'x = x.to("cuda")'),
        ("x = x.to(0)", 'x = x.to("cuda")'),
        ("x = x.to(args.gpu)", 'x = x.to("cuda")'),
        ('d = torch.device("cuda:%d" % gpus[0])', 'd = torch.device("cuda")'),
        ('d = torch.device("cuda:{}".format(gpus[0]))', 'd = torch.device("cuda")'),
        ('d = torch.device("cuda:" + str(gpu))', 'd = torch.device("cuda")'),
        ('d = torch.device("cuda", 0)', 'd = torch.device("cuda")'),
        ("d = torch.device(args.gpu)", 'd = torch.device("cuda")'),
        ('x = torch.zeros(1, device="cuda:0")', 'x = torch.zeros(1, device="cuda")'),
        ("with torch.cuda.device(0):\n    pass", 'with torch.cuda.device("cuda"):\n    pass'),
        ("y = 1\ntorch.cuda.set_device(args.gpu)", "y = 1"),
        ("if a:\n    torch.cuda.set_device(0)", "if a:\n    pass"),
        ('ok = device == "cuda:0"', 'ok = device == "cuda"'),
    ],
)
def test_every_spelling_becomes_the_process_s_device(before: str, after: str) -> None:
    assert rewritten(before, CODE) == after + "\n"
    assert not run(run(before, CODE).files[0].after.decode(), CODE).files[0].changed


@pytest.mark.parametrize(
    "code",
    [
        "x = x.cuda()",
        "x = x.cuda(non_blocking=True)",
        "d = torch.device('cuda' if ok else 'cpu')\nx = x.to(d)\nx = x.cuda(d)",
        "x = x.to(torch.float16)",
        "x = x.cuda(local_rank)",
        "x = x.to(f'cuda:{local_rank}')",
        "torch.cuda.set_device(args.local_rank)",
        "print('cuda:0 is busy')",
        "print('on', 'cuda:0')",
        "m = torch.load('f', map_location='cuda:0')",
        "x = x.to(device)",
    ],
)
def test_what_is_the_process_s_own_stays(code: str) -> None:
    assert findings(code, CODE) == []


def test_parts_on_several_devices_are_reported_and_left() -> None:
    result = run("a = a.to('cuda:0')\nb = b.to('cuda:1')", CODE)
    assert [f.applicability for f in result.findings] == [Applicability.MANUAL]
    assert not result.files[0].changed
