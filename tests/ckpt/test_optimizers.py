"""Optimizer states translated between classes, against what the real optimizers save.

DeepSpeed's classes are made and stepped with stand-ins for their compiled kernels, which change
no number here: hyper-parameters, names of states and step counts come from their Python code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cpuinfo
import pytest
import torch
from small import small_model, stepped

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.ops.adagrad.cpu_adagrad as ds_adagrad
import deepspeed.ops.adam.cpu_adam as ds_cpu_adam
import deepspeed.ops.adam.fused_adam as ds_fused_adam
import deepspeed.ops.lion.cpu_lion as ds_cpu_lion
import deepspeed.ops.lion.fused_lion as ds_fused_lion

import ckpt
from ckpt.errors import MissingPart, Unsupported
from ckpt.model import Checkpoint, InlineTensor, StoredTensor
from ckpt.note import Note, NoteKind
from ckpt.optimizers import (
    OptimizerClass,
    class_of,
    for_torch,
    require_elementwise,
    step_value,
    torch_class,
    translated,
)

C = OptimizerClass
OPTIM = torch.optim
MAKE: Mapping[OptimizerClass, Callable[..., Any]] = {
    C.ADAMW: OPTIM.AdamW,
    C.ADAM: OPTIM.Adam,
    C.SGD: lambda params, **more: OPTIM.SGD(params, **{"lr": 0.1, "momentum": 0.9, **more}),
    C.ADAGRAD: OPTIM.Adagrad,
    C.FUSED_ADAM: ds_fused_adam.FusedAdam,
    C.CPU_ADAM: ds_cpu_adam.DeepSpeedCPUAdam,
    C.FUSED_LION: ds_fused_lion.FusedLion,
    C.CPU_LION: ds_cpu_lion.DeepSpeedCPULion,
    C.CPU_ADAGRAD: ds_adagrad.DeepSpeedCPUAdagrad,
}
ADAMS = (C.ADAMW, C.ADAM, C.FUSED_ADAM, C.CPU_ADAM)
PAIRS = [
    *((a, b) for a in ADAMS for b in ADAMS),
    *((a, b) for a in (C.ADAGRAD, C.CPU_ADAGRAD) for b in (C.ADAGRAD, C.CPU_ADAGRAD)),
    *((a, b) for a in (C.FUSED_LION, C.CPU_LION) for b in (C.FUSED_LION, C.CPU_LION)),
    (C.SGD, C.SGD),
]
UNUSED = {C.CPU_LION: {"exp_avg_sq"}}  # allocated, never read: need not come from another class
GROUP_STEP = {"step"}  # FusedAdam and FusedLion put a 0 into the group that never counts


class Kernels:
    """Stands in for a compiled extension: every function of it does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args: None


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (ds_fused_adam, "FusedAdamBuilder"),
        (ds_cpu_adam, "CPUAdamBuilder"),
        (ds_fused_lion, "FusedLionBuilder"),
        (ds_cpu_lion, "CPULionBuilder"),
        (ds_adagrad, "CPUAdagradBuilder"),
    ):
        monkeypatch.setattr(cpuinfo, "get_cpu_info", dict)  # starts programs, half a second each
        monkeypatch.setattr(module, name, lambda: type("B", (), {"load": lambda _: Kernels()})())


def real(kind: OptimizerClass, model: torch.nn.Module, **more: Any) -> Any:
    """An optimizer of the class that has taken two steps."""
    optimizer = MAKE[kind](model.parameters(), **more)
    return stepped(model, stepped(model, optimizer))


def saved(kind: OptimizerClass, folder: Path, **more: Any) -> Checkpoint:
    """What a script with that optimizer saves, opened."""
    return opened(real(kind, model := small_model(), **more).state_dict(), model, folder)


def opened(optimizer: Any, model: torch.nn.Module, folder: Path) -> Checkpoint:
    names = [name for name, _ in model.named_parameters()]
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, folder / "c.pt")
    return ckpt.open(folder / "c.pt", param_order=names)


def first_state(checkpoint: Checkpoint) -> Mapping[str, Any]:
    return next(iter(checkpoint.params.values())).state


def options(checkpoint: Checkpoint) -> Mapping[str, Any]:
    return checkpoint.groups[0].options


def subjects(notes: list[Note]) -> str:
    return " ".join(str(note) for note in notes)


# --- the same as the real ones ------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_hyper_parameters_have_the_names_that_the_target_saves(
    source: OptimizerClass, target: OptimizerClass, tmp_path: Path
) -> None:
    result, _ = translated(saved(source, tmp_path), target)
    (group,) = real(target, small_model()).state_dict()["param_groups"]
    assert options(result).keys() == group.keys() - {"params", "param_names"} - GROUP_STEP


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_states_have_the_names_that_the_target_saves(
    source: OptimizerClass, target: OptimizerClass, tmp_path: Path
) -> None:
    result, _ = translated(saved(source, tmp_path), target)
    state = real(target, small_model()).state_dict()["state"][0]
    assert first_state(result).keys() - UNUSED.get(target, set()) == state.keys() - UNUSED.get(
        target, set()
    )


@pytest.mark.parametrize(("source", "target"), [pair for pair in PAIRS if C.SGD not in pair])
def test_steps_are_counted_and_of_the_type_that_the_target_saves(
    source: OptimizerClass, target: OptimizerClass, tmp_path: Path
) -> None:
    result, _ = translated(saved(source, tmp_path), target)
    steps = [param.state["step"] for param in result.params.values()]
    want = real(target, small_model()).state_dict()["state"][0]["step"]
    value = step_value(2, target)
    assert steps == [2] * 4
    assert isinstance(value, InlineTensor) == isinstance(want, torch.Tensor)
    assert isinstance(value, int) or value.data == torch.tensor(2.0).numpy().tobytes()


@pytest.mark.parametrize("kind", ADAMS[:2])
def test_made_up_options_are_the_defaults_of_the_target(
    kind: OptimizerClass, tmp_path: Path
) -> None:
    result, notes = translated(saved(C.FUSED_ADAM, tmp_path, weight_decay=0.0), kind)
    (group,) = real(kind, small_model(), weight_decay=0.0).state_dict()["param_groups"]
    assert {k: v for k, v in group.items() if k != "params"} == options(result)
    made_up = {n for note in notes if note.kind is NoteKind.SYNTHESISED for n in note.subjects}
    assert {n for n in made_up if not n.startswith("step of")} == group.keys() - {
        "params",
        "lr",
        "betas",
        "eps",
        "weight_decay",
    }


def test_a_class_is_told_by_its_names(tmp_path: Path) -> None:
    found = {kind: class_of(saved(kind, tmp_path)) for kind in MAKE}
    assert {kind: guess.found for kind, guess in found.items()} == {kind: kind for kind in MAKE}
    assert [kind for kind, guess in found.items() if not guess.is_certain] == [C.FUSED_LION]


def test_a_class_without_a_step_is_told_as_well(tmp_path: Path) -> None:
    model = small_model()
    fresh = {kind: MAKE[kind](model.parameters()).state_dict() for kind in MAKE}
    del fresh[C.CPU_LION]  # nothing but its state tells it from FusedLion
    assert {k: class_of(opened(v, model, tmp_path)).found for k, v in fresh.items()} == {
        kind: kind for kind in fresh
    }


# --- what changes nothing -----------------------------------------------------------------------


def test_the_own_class_keeps_every_value(tmp_path: Path) -> None:
    before = saved(C.ADAM, tmp_path, lr=0.3, amsgrad=True, foreach=True)
    after, notes = translated(before)
    assert notes == []
    assert options(after) == options(before)
    assert first_state(after).keys() == first_state(before).keys()
    assert first_state(after)["max_exp_avg_sq"] is first_state(before)["max_exp_avg_sq"]


def test_options_of_a_scheduler_or_of_ones_own_stay(tmp_path: Path) -> None:
    model = small_model()
    optimizer = real(C.ADAMW, model)
    optimizer.param_groups[0] |= {"initial_lr": 0.5, "layer": "first"}
    result, _ = translated(opened(optimizer.state_dict(), model, tmp_path), C.FUSED_ADAM)
    assert (options(result)["initial_lr"], options(result)["layer"]) == (0.5, "first")


def test_a_checkpoint_without_an_optimizer_stays(tmp_path: Path) -> None:
    torch.save(small_model().state_dict(), tmp_path / "m.pt")
    checkpoint = ckpt.open(tmp_path / "m.pt")
    assert translated(checkpoint, C.ADAMW) == (checkpoint, [])


def test_dropped_options_that_were_off_are_told(tmp_path: Path) -> None:
    _, notes = translated(saved(C.ADAMW, tmp_path, weight_decay=0.1), C.FUSED_ADAM)
    dropped = next(note for note in notes if note.kind is NoteKind.DROPPED)
    assert "foreach=None" in dropped.subjects and "amsgrad=False" in dropped.subjects
    assert not any(note.needs_consent for note in notes)


def test_adagrads_sum_is_told_to_get_another_name(tmp_path: Path) -> None:
    result, notes = translated(saved(C.ADAGRAD, tmp_path), C.CPU_ADAGRAD)
    assert "sum -> exp_avg_sq" in subjects(notes)
    assert isinstance(first_state(result)["exp_avg_sq"], StoredTensor)


def test_a_state_that_lion_never_uses_goes_without_consent(tmp_path: Path) -> None:
    result, notes = translated(saved(C.CPU_LION, tmp_path), C.FUSED_LION)
    assert "exp_avg_sq" not in first_state(result)
    assert not any(note.needs_consent for note in notes)


# --- what would change the training -------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "more"),
    [
        (C.ADAMW, C.ADAM, {"weight_decay": 0.1}),
        (C.ADAM, C.ADAMW, {"weight_decay": 0.1}),
        (C.FUSED_ADAM, C.ADAM, {"weight_decay": 0.1}),
        (C.FUSED_ADAM, C.ADAMW, {"bias_correction": False}),
        (C.ADAMW, C.CPU_ADAM, {"amsgrad": True}),
        (C.ADAMW, C.FUSED_ADAM, {"amsgrad": True}),
        (C.ADAGRAD, C.CPU_ADAGRAD, {"lr_decay": 0.1}),
    ],
)
def test_other_mathematics_needs_consent(
    source: OptimizerClass, target: OptimizerClass, more: dict[str, Any], tmp_path: Path
) -> None:
    _, notes = translated(saved(source, tmp_path, **more), target)
    assert any(note.needs_consent for note in notes)


def test_an_adam_with_weight_decay_says_how_to_make_deepspeeds(tmp_path: Path) -> None:
    _, notes = translated(saved(C.ADAM, tmp_path, weight_decay=0.1), C.FUSED_ADAM)
    assert "adam_w_mode=False" in subjects(notes)


def test_a_dropped_amsgrad_takes_its_state_along(tmp_path: Path) -> None:
    result, notes = translated(saved(C.ADAMW, tmp_path, amsgrad=True), C.CPU_ADAM)
    assert options(result)["amsgrad"] is False
    assert "max_exp_avg_sq" not in first_state(result)
    assert "max_exp_avg_sq" in subjects(notes)


def test_maximising_is_refused_where_it_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="maximize=True"):
        translated(saved(C.ADAMW, tmp_path, maximize=True), C.FUSED_ADAM)


@pytest.mark.parametrize(("source", "target"), [(C.ADAMW, C.SGD), (C.SGD, C.CPU_ADAM)])
def test_states_of_another_rule_are_refused(
    source: OptimizerClass, target: OptimizerClass, tmp_path: Path
) -> None:
    with pytest.raises(Unsupported, match="cannot go on with"):
        translated(saved(source, tmp_path), target)


def test_an_unknown_optimizer_stays_as_it_is_and_becomes_no_other(tmp_path: Path) -> None:
    model = small_model()
    radam = stepped(model, torch.optim.Adadelta(model.parameters()))
    checkpoint = opened(radam.state_dict(), model, tmp_path)
    assert translated(checkpoint) == (checkpoint, [])
    with pytest.raises(Unsupported, match=r"square_avg|acc_delta"):
        translated(checkpoint, C.ADAMW)


def test_hyper_parameters_are_never_made_up(tmp_path: Path) -> None:
    model = small_model()
    tree = real(C.ADAMW, model).state_dict()
    del tree["param_groups"][0]["lr"]
    checkpoint = opened(tree, model, tmp_path)
    with pytest.raises(MissingPart, match="no lr, which"):
        translated(checkpoint, C.FUSED_ADAM)
    assert "lr" not in options(translated(checkpoint)[0])


def test_a_state_without_a_step_needs_consent(tmp_path: Path) -> None:
    model = small_model()
    tree = real(C.ADAMW, model).state_dict()
    del tree["state"][2]["step"]
    _, notes = translated(opened(tree, model, tmp_path), C.ADAMW)
    assert any(note.needs_consent and note.subjects == ("step",) for note in notes)


def test_a_fused_adam_that_counts_in_one_parameter_gives_its_count_to_all(tmp_path: Path) -> None:
    checkpoint = saved(C.FUSED_ADAM, tmp_path)
    raw = [param.state["step"] for param in checkpoint.params.values()]
    result, notes = translated(checkpoint, C.ADAMW)
    assert sorted(raw) == [0, 0, 0, 2]
    assert [param.state["step"] for param in result.params.values()] == [2] * 4
    assert "last parameter" in subjects(notes)


# --- a torch before decoupled_weight_decay ------------------------------------------------------


def old_adam(folder: Path, **more: Any) -> Checkpoint:
    model = small_model()
    tree = real(C.ADAMW, model, **more).state_dict()
    del tree["param_groups"][0]["decoupled_weight_decay"]
    return opened(tree, model, folder)


def test_an_old_adam_is_guessed_and_the_guess_is_told(tmp_path: Path) -> None:
    checkpoint = old_adam(tmp_path)
    guess = class_of(checkpoint)
    assert (guess.found, guess.is_certain, guess.decouples) == (C.ADAMW, False, None)
    _, notes = translated(checkpoint, C.ADAM)
    assert "does not tell Adam from AdamW" in subjects(notes)


def test_an_old_adam_gets_no_decoupling_that_nobody_chose(tmp_path: Path) -> None:
    result, notes = for_torch(old_adam(tmp_path))
    assert "decoupled_weight_decay" not in options(result)
    assert "decoupled_weight_decay" in subjects(notes)


# --- for torch ----------------------------------------------------------------------------------


def test_deepspeeds_classes_have_their_counterparts_in_torch(tmp_path: Path) -> None:
    assert {kind: torch_class(saved(kind, tmp_path)) for kind in MAKE} == {
        C.ADAMW: C.ADAMW,
        C.ADAM: C.ADAM,
        C.SGD: C.SGD,
        C.ADAGRAD: C.ADAGRAD,
        C.FUSED_ADAM: C.ADAMW,
        C.CPU_ADAM: C.ADAMW,
        C.FUSED_LION: None,
        C.CPU_LION: None,
        C.CPU_ADAGRAD: C.ADAGRAD,
    }


def test_what_dcp_reads_by_name_is_completed_and_nothing_is_taken_away(tmp_path: Path) -> None:
    result, notes = for_torch(saved(C.FUSED_ADAM, tmp_path))
    assert options(result)["bias_correction"] is True
    assert options(result)["decoupled_weight_decay"] is True
    assert [note.kind for note in notes if note.kind is NoteKind.DROPPED] == []


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"type": "AdamW", "params": {}}, C.ADAMW),
        ({"type": "Adam", "params": {"lr": 1}}, C.ADAMW),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, C.ADAM),
    ],
)
def test_deepspeeds_configuration_tells_the_mode(
    config: dict[str, Any], expected: OptimizerClass, tmp_path: Path
) -> None:
    model = small_model()
    content = {
        "model": model.state_dict(),
        "optimizer": real(C.FUSED_ADAM, model).state_dict(),
        "ds_config": {"optimizer": config},
    }
    torch.save(content, tmp_path / "c.pt")
    order = [name for name, _ in model.named_parameters()]
    assert torch_class(ckpt.open(tmp_path / "c.pt", param_order=order)) is expected


# --- states that cannot be cut ------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(MAKE))
def test_elementwise_states_can_be_cut(kind: OptimizerClass, tmp_path: Path) -> None:
    require_elementwise(saved(kind, tmp_path), "ZeRO")


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("exp_avg_sq_row", torch.zeros(4)),
        ("exp_avg_sq", torch.zeros(4, 3, dtype=torch.uint8)),
        ("absmax", torch.zeros(1)),
    ],
)
def test_other_states_are_refused_by_name(name: str, state: torch.Tensor, tmp_path: Path) -> None:
    model = small_model()
    tree = real(C.ADAMW, model).state_dict()
    tree["state"][0][name] = state
    with pytest.raises(Unsupported, match=rf"'{name}' of 0\.weight .* ZeRO-2"):
        require_elementwise(opened(tree, model, tmp_path), "ZeRO-2")
