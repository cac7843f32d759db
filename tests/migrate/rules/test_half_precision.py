"""Rule MG408: a model that is going to be sharded is cast to half precision."""

from __future__ import annotations

import textwrap

import pytest
from rewriting import after, findings, rewritten, run

from migrate.finding import Applicability, Effect

OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"


def half(code: str) -> str:
    """What a program that trains `model` becomes by this rule alone."""
    return rewritten(textwrap.dedent(code) + OPTIMIZER, "MG408", "fsdp").replace(OPTIMIZER, "")


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("model.half()", "compute_in(model, torch.float16)"),
        ("model.bfloat16()", "compute_in(model, torch.bfloat16)"),
        ("model = model.to(torch.float16)", "model = compute_in(model, torch.float16)"),
        ("model.to(dtype=torch.bfloat16)", "compute_in(model, torch.bfloat16)"),
        ("model.type(torch.half)", "compute_in(model, torch.half)"),
        ("model = model.cuda(0).half()", "model = compute_in(model.cuda(0), torch.float16)"),
        ("model = model.half().cuda()", "model = compute_in(model, torch.float16).cuda()"),
        ("model.to('cuda', torch.float16)", "compute_in(model.to('cuda'), torch.float16)"),
        (
            "model.to(device='cuda', dtype=torch.float16, non_blocking=True)",
            "compute_in(model.to(device='cuda', non_blocking=True), torch.float16)",
        ),
        ("if args.fp16: model.half()", "if args.fp16: compute_in(model, torch.float16)"),
        (
            "model = model.half() if fp16 else model",
            "model = compute_in(model, torch.float16) if fp16 else model",
        ),
        ("(model\n .cuda()\n .half())", "(compute_in(model\n .cuda(), torch.float16))"),
        ("x = 1; model.half(); y = 2", "x = 1; compute_in(model, torch.float16); y = 2"),
    ],
)
def test_every_spelling_becomes_one_definition(before: str, expected: str) -> None:
    around = "model = nn.Linear(2, 2)\n{}\nmodel = nn.DataParallel(model)\n"
    assert half(around.format(before)) == around.format(expected)
    assert findings(around.format(before) + OPTIMIZER, "MG408", "ddp") == []


def test_a_type_in_a_variable_stays_there() -> None:
    code = """
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    model = nn.Linear(2, 2).to(device, dtype)
    model = nn.DataParallel(model)
    """
    assert "model = compute_in(nn.Linear(2, 2).to(device), dtype)" in half(code)


def test_a_cast_inside_the_wrap_meets_what_other_rules_put_there() -> None:
    code = "model = nn.DataParallel(nn.BatchNorm1d(2).half(), device_ids=[0])\n" + OPTIMIZER
    text = rewritten(code, ("MG2", "MG408"), "fsdp")
    convert = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
    assert f"shard_model({convert}(compute_in(nn.BatchNorm1d(2), torch.float16)))\n" in text


def test_a_model_without_a_wrap_is_sharded_below_the_cast() -> None:
    code = "model = nn.Linear(2, 2).cuda()\nmodel.half()\n" + OPTIMIZER
    assert rewritten(code, ("MG204", "MG408"), "fsdp").splitlines()[1:3] == [
        "compute_in(model, torch.float16)",
        "model = shard_model(model)",
    ]


def test_a_model_that_is_loaded_in_half_precision_is_cast_up() -> None:
    code = """
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.bfloat16)
    model = torch.nn.DataParallel(model)
    """
    made = 'AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.bfloat16)'
    assert f"model = compute_in({made}, torch.bfloat16)\n" in half(code)


def test_a_trainer_in_another_file_and_a_model_that_casts_itself() -> None:
    files = {
        "train.py": """
            import torch
            from net import Net
            from trainer import Trainer
            Trainer(Net()).fit()
            """,
        "net.py": """
            import torch.nn as nn
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.fc = nn.Linear(2, 2)
            """,
        "trainer.py": """
            import torch
            class Trainer:
                def __init__(self, model):
                    self.model = model
                    self.model.half()
                    self.model = torch.nn.DataParallel(self.model)
                    self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
                def fit(self):
                    self.model(x).sum().backward()
            """,
    }
    text = after(run(files, "MG408", "fsdp"), "trainer.py")
    assert "        compute_in(self.model, torch.float16)\n" in text
    files["trainer.py"] = files["trainer.py"].replace("self.model.half()", "pass")
    files["net.py"] = files["net.py"].replace(
        "self.fc =", "self.half()\n{}self.fc =".format(" " * 20)
    )
    text = after(run(files, "MG408", "fsdp"), "net.py")
    assert "        compute_in(self, torch.float16)\n" in text


def test_a_model_that_the_wrapped_one_is_made_of() -> None:
    code = """
    class WithLoss(nn.Module):
        def __init__(self, net, loss):
            super().__init__()
            self.net, self.loss = net, loss
    net = nn.Linear(2, 2)
    net.half()
    model = nn.DataParallel(WithLoss(net, nn.MSELoss()))
    """
    assert "\ncompute_in(net, torch.float16)\n" in half(code)


def test_a_cast_right_below_the_wrap_moves_above_it() -> None:
    wrapped = "model = nn.DataParallel({})\n"
    expected = wrapped.format("compute_in(nn.Linear(2, 2), torch.float16)")
    below = wrapped.format("nn.Linear(2, 2)")
    assert half(below + "model.half()\n") == expected
    assert half(below + "model = model.half()\n") == expected
    assert half("model = nn.DataParallel(nn.Linear(2, 2)).half()\n") == expected
    text = half(
        "model = nn.Linear(2, 2)\nif many:\n    model = nn.DataParallel(model)\nmodel.half()\n"
    )
    assert text.splitlines()[1:] == [
        "compute_in(model, torch.float16)",
        "if many:",
        "    model = nn.DataParallel(model)",
    ]
    code = "model = nn.DataParallel(nn.BatchNorm1d(2))\nmodel.half()\n" + OPTIMIZER
    text = rewritten(code, ("MG2", "MG408"), "fsdp")
    assert "convert_sync_batchnorm(compute_in(nn.BatchNorm1d(2), torch.float16)))\n" in text


@pytest.mark.parametrize(
    "code",
    [
        "model = nn.DataParallel(nn.Linear(2, 2))\nif args.fp16:\n    model.half()\n",
        "model = nn.DataParallel(nn.Linear(2, 2))\nmodel[0].float()\nmodel.half()\n",
        f"model = nn.Linear(2, 2)\n{OPTIMIZER}model.half()\nmodel = nn.DataParallel(model)\n",
        "def cast(m):\n    m.half()\nmodel = nn.DataParallel(nn.Linear(2, 2))\ncast(model)\n",
    ],
)
def test_other_casts_of_sharded_weights_are_reported_once(code: str) -> None:
    (found,) = findings(code + OPTIMIZER, ("MG408", "MG809"), "fsdp")
    assert found.applicability is Applicability.MANUAL
    assert "casts weights that are sharded by then" in found.message
    assert "move it above" in found.advice


def test_a_copy_of_the_weights_kept_by_the_script_is_reported() -> None:
    code = """
    model = nn.Linear(2, 2).half()
    model = nn.DataParallel(model)
    master = [p.clone().detach().float() for p in model.parameters()]
    optimizer = torch.optim.SGD(master, lr=0.1)
    """
    (found,) = findings(code, "MG408", "fsdp")
    assert found.applicability is Applicability.MANUAL
    assert "line 6" in found.advice
    loop = """
    model = nn.DataParallel(nn.Linear(2, 2).half())
    master = []
    for p in model.parameters():
        master.append(torch.nn.Parameter(p.data.float()))
    """
    (found,) = findings(loop, "MG408", "fsdp")
    assert found.applicability is Applicability.MANUAL


def test_a_part_of_a_model_and_a_function_for_several_models_are_reported() -> None:
    part = """
    import torch
    from torchvision.models import vgg11
    model = vgg11()
    model.features.cuda().half()
    model = torch.nn.DataParallel(model)
    """
    (found,) = findings(textwrap.dedent(part) + OPTIMIZER, "MG408", "fsdp")
    assert "a part of a model" in found.message
    several = """
    def cast(net):
        return net.half()
    teacher = cast(nn.Linear(2, 3))
    model = nn.DataParallel(cast(nn.Linear(2, 2)))
    """
    (found,) = findings(textwrap.dedent(several) + OPTIMIZER, "MG408", "fsdp")
    assert "casts nn.Linear(2, 3) and nn.Linear(2, 2)" in found.message


@pytest.mark.parametrize(
    "line",
    [
        "images = images.half()",
        "teacher = nn.Linear(2, 2).half()",
        "teacher = nn.Sequential()\nteacher.net = nn.Linear(2, 2)\nteacher.net.half()",
        "ema = copy.deepcopy(model).half()",
        "model.half().float()",
        "model.float()",
        "model.to(torch.float32)",
        "torch.save({'model': copy.deepcopy(model).half()}, 'm.pt')",
        "for m in model.modules():\n    if isinstance(m, nn.BatchNorm2d):\n        m.float()",
    ],
)
def test_what_is_not_the_trained_model_stays(line: str) -> None:
    code = f"import copy\nimport torch\nimport torch.nn as nn\nmodel = nn.Linear(2, 2)\n{line}\n"
    code += "model = nn.DataParallel(model)\n" + OPTIMIZER
    assert findings(code, ("MG408", "MG407"), "fsdp") == []


def test_a_teacher_in_its_own_wrapper_and_a_cast_after_the_last_step_stay() -> None:
    code = """
    teacher = nn.Linear(2, 2)
    teacher.half()
    teacher = nn.DataParallel(teacher)
    model = nn.DataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    torch.save(model.half().state_dict(), "m.pt")
    """
    assert findings(code, "MG408", "fsdp") == []


def test_a_cast_between_steps_is_reported_once() -> None:
    code = f"model = nn.DataParallel(nn.Linear(2, 2))\n{OPTIMIZER}"
    code += "for x in data:\n    model.half()\n    model(x).sum().backward()\n"
    assert [f.code for f in findings(code, ("MG408", "MG809"), "fsdp")] == ["MG809"]


def test_a_policy_written_by_hand_is_known() -> None:
    code = """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    import torch
    model = torch.nn.Linear(2, 2).cuda()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    """
    assert findings(textwrap.dedent(code) + OPTIMIZER, "MG408", "fsdp") == []


@pytest.mark.parametrize(
    "code",
    [
        "model = nn.DataParallel(nn.Linear(2, 2).half())\n",
        "model = nn.DataParallel(nn.Linear(2, 2))\nmodel.half()\n",
        "model = nn.DataParallel(nn.Linear(2, 2))\nif args.fp16:\n    model.half()\n",
    ],
)
def test_once_is_enough(code: str) -> None:
    first = run(code + OPTIMIZER + "model(x).sum().backward()\n", "MG", "fsdp")
    text = first.files[0].after.decode()
    second = run({"train.py": text}, "MG", "fsdp")
    assert second.files[0].after.decode() == text
    assert {(f.code, f.message) for f in second.manual} <= {
        (f.code, f.message) for f in first.manual
    }


def test_the_finding_says_what_is_assumed_and_what_changes() -> None:
    code = "model = nn.DataParallel(nn.Linear(2, 2).half())\n" + OPTIMIZER
    (found,) = findings(code, "MG408", "fsdp")
    assert found.applicability is Applicability.POLICY
    assert found.effect is Effect.BETTER
    assert found.assumption
    assert "those that are saved, stay in full precision" in found.message
