"""Universal checkpoints: against DeepSpeed's own converter, and loaded by live engines.

`ds_to_universal` makes one folder, we make another out of the same checkpoint; they have to hold
the same. Engines of all stages, at other world sizes, load ours with `load_universal`; what then
stands in them has to be the truth of the run that wrote the source, bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIXTURES
from safetensors.torch import load_file
from small import small_model, stepped
from training.launch import run_universal_loads
from truth import Truth

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal

import ckpt
from ckpt.errors import CkptError, CorruptCheckpoint, MissingPart, Unsupported
from ckpt.inspection import inspect

Run = tuple[str, int]
Runs = Mapping[Run, Truth]
UNIVERSAL = FIXTURES / "ds019_t213-zero2_universal_w2" / "universal"
TAG = "global_step3_universal"

AS_DEEPSPEED: list[Run] = [
    ("zero1_fp32", 2),
    ("zero1_bf16", 2),
    ("zero1_bf16_acc32", 2),
    ("zero2_fp32", 3),
    ("zero2_fp16", 2),
    ("zero3_fp32", 3),
    ("zero3_bf16", 2),
    ("zero3_subgroup", 3),
]
LOADS: dict[int, list[tuple[Run, int]]] = {
    1: [(("zero3_fp32", 2), 1), (("zero2_fp32", 3), 2), (("zero2_fp32", 2), 3)],
    2: [
        (("zero3_fp32", 3), 3),
        (("zero3_subgroup", 3), 2),
        (("zero2_sgd", 2), 2),
        (("zero2_fp16", 2), 2),
        (("ddp_named", 2), 1),
        (("ddp_named", 2), 3),
        (("fsdp2_dcp", 3), 3),
        (("zero1_bf16_acc32", 2), 1),
    ],
    3: [
        (("zero1_bf16", 2), 1),
        (("zero1_fp32", 2), 2),
        (("zero3_bf16", 2), 3),
        (("zero3_subgroup", 3), 3),
    ],
}
ALL_LOADS = [(world, *load) for world, loads in LOADS.items() for load in loads]


# --- what DeepSpeed's converter makes -----------------------------------------------------------


def made_by_deepspeed(source: Path, root: Path) -> Path:
    """The root of a universal checkpoint by ds_to_universal."""
    root.mkdir()
    tag = (source / "latest").read_text()
    ds_to_universal(
        Namespace(
            input_folder=str(source / tag),
            output_folder=str(root / TAG),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    return root


def files(root: Path, pattern: str) -> dict[str, Any]:
    """What torch finds in the files, by path."""
    return {
        path.relative_to(root).as_posix(): torch.load(path, weights_only=False)
        for path in sorted(root.glob(pattern))
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(value, b[key]) for key, value in a.items())
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize("run", AS_DEEPSPEED, ids=str)
def test_the_folder_is_the_one_that_ds_to_universal_makes(
    runs: Runs, run: Run, tmp_path: Path
) -> None:
    source = runs[run].source
    theirs = made_by_deepspeed(source, tmp_path / "theirs")
    ours = ckpt.convert(source, "universal", tmp_path / "ours")
    want, got = files(theirs, f"{TAG}/zero/*/*.pt"), files(ours, f"{TAG}/zero/*/*.pt")
    assert got.keys() == want.keys()
    assert [path for path in want if not same(got[path], want[path])] == []
    assert (ours / "latest_universal").read_text() == (theirs / "latest_universal").read_text()
    first = next(iter(files(theirs, f"{TAG}/*rank_0*_model_states.pt")))
    want_model, got_model = files(theirs, first)[first], files(ours, first)[first]
    assert got_model["dp_world_size"] == 1
    # rank 0 of stage 3 has its own piece of frozen weights there, and ours the whole;
    # its sub-groups are those of one world size, and ours the param groups
    different = {"dp_world_size", "frozen_param_fragments", "param_shapes"}
    assert flat(got_model["param_shapes"]) == flat(want_model["param_shapes"])
    assert got_model.keys() == want_model.keys()
    assert [k for k in want_model.keys() - different if not same(got_model[k], want_model[k])] == []


def flat(groups: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [pair for group in groups for pair in group.items()]


@pytest.mark.parametrize("run", AS_DEEPSPEED, ids=str)
def test_both_folders_read_as_the_checkpoint_they_were_made_from(
    runs: Runs, run: Run, tmp_path: Path
) -> None:
    source = runs[run].source
    original = ckpt.open(source)
    theirs = made_by_deepspeed(source, tmp_path / "theirs")
    ours = ckpt.convert(source, "universal", tmp_path / "ours")
    assert [str(item) for item in ckpt.diff(original, ckpt.open(theirs))] == []
    assert [str(item) for item in ckpt.diff(original, ckpt.open(ours))] == []
    assert ckpt.open(ours).params["gain"].lp_dtype is original.params["gain"].lp_dtype


# --- live engines -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(
    runs: Runs, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[int, Run, int], Path]:
    """What stands in live engines after loading, by world size, source and stage."""
    root, found = tmp_path_factory.mktemp("universal"), {}
    for world_size, loads in LOADS.items():
        jobs = []
        for number, (run, stage) in enumerate(loads):
            truth, name = runs[run], f"w{world_size}_{number}"
            folder = ckpt.convert(truth.source, "universal", root / name, stage=stage)
            out = root / f"{name}.safetensors"
            jobs.append(job(truth, folder, out, stage))
            found[world_size, run, stage] = out
        run_universal_loads(jobs, root, world_size)
    return found


def job(truth: Truth, folder: Path, out: Path, stage: int) -> dict[str, Any]:
    accumulates = "acc32" in truth.meta["case"]
    return {
        "folder": str(folder),
        "out": str(out),
        "stage": stage,
        "model_options": truth.meta["model_options"],
        "dtype": truth.meta["dtype"],
        "optimizer": "sgd" if "sgd" in truth.meta["case"] else "adamw",
        "config": {"data_types": {"grad_accum_dtype": "fp32"}} if accumulates else {},
    }


@pytest.mark.parametrize(("world_size", "run", "stage"), ALL_LOADS, ids=str)
def test_a_live_engine_loads_it(
    runs: Runs,
    loaded: Mapping[tuple[int, Run, int], Path],
    world_size: int,
    run: Run,
    stage: int,
) -> None:
    truth, out = runs[run], loaded[world_size, run, stage]
    tensors, meta = load_file(out), json.loads(out.with_suffix(".json").read_text())
    got = {name: tensors[name] for name in truth.weights()}
    assert [n for n, want in truth.weights().items() if not torch.equal(got[n], want)] == []
    assert truth.optimizer_problems(states_of(tensors), meta["param_groups"]) == []
    assert meta["global_steps"] == 3
    assert meta["client"] == truth.meta["client_state"]
    assert meta["scheduler"]["last_epoch"] == 3
    assert meta["loss_scale"] == (256.0 if truth.meta["dtype"] == "fp16" else 1.0)
    if truth.meta["dtype"] == "fp32" and world_size == run[1]:
        # Stage 3 shares one step tensor among its sub-groups: see the docstring of universal.py.
        losses = truth.meta["next_losses"][: 1 if stage == 3 else None]
        assert meta["next_losses"][: len(losses)] == pytest.approx(losses, abs=1e-4)


def states_of(tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Optimizer states by FQN, out of keys such as `exp_avg/<fqn>`."""
    states: dict[str, dict[str, Any]] = {}
    for key, value in tensors.items():
        kind, _, fqn = key.partition("/")
        name = "momentum_buffer" if kind == "momentum" else kind
        if fqn:
            states.setdefault(fqn, {})[name] = value
    return states


# --- finding a folder ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inner", ["", TAG, "latest_universal", f"{TAG}/mp_rank_00_model_states.pt"]
)
def test_the_root_the_folder_and_files_in_them_mean_the_same(inner: str) -> None:
    checkpoint = ckpt.open(UNIVERSAL / inner)
    assert checkpoint.origin.format == "universal"
    assert checkpoint.params["emb.weight"].weight.shape == (31, 13)


def test_a_root_of_both_kinds_is_the_zero_checkpoint_unless_asked(tmp_path: Path) -> None:
    root = shutil.copytree(FIXTURES / "ds014_t24-zero1_rich_w2" / "ckpt", tmp_path / "root")
    shutil.copytree(UNIVERSAL / TAG, root / TAG)
    (root / "latest_universal").write_text(TAG)
    assert ckpt.open(root).origin.format == "zero1"
    assert ckpt.open(root / TAG).origin.format == "universal"
    with pytest.raises(MissingPart, match="is a universal checkpoint; give"):
        ckpt.open(root, tag=TAG)


def test_it_is_described_as_what_it_is() -> None:
    assert "universal" in repr(inspect(ckpt.open(UNIVERSAL)))


# --- damaged folders ----------------------------------------------------------------------------


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def holding(name: str, content: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(content, folder / name)


WEIGHT = "zero/emb.weight/fp32.pt"


@pytest.mark.parametrize(
    ("damage", "problem", "words"),
    [
        (without("zero/optimizer_state.pt"), MissingPart, "did not finish"),
        (without("mp_rank_00_model_states.pt"), MissingPart, "no .*_model_states.pt file"),
        (without(WEIGHT), MissingPart, "emb.weight/fp32.pt: is missing"),
        (holding(WEIGHT, {"cat_dim": 0}), CorruptCheckpoint, "no tensor inside"),
        (holding(WEIGHT, torch.zeros(3)), CorruptCheckpoint, r"shape \[3\], expected \[31, 13\]"),
        (holding(WEIGHT, torch.zeros(13, 31)), CorruptCheckpoint, r"expected \[31, 13\]"),
        (
            holding(WEIGHT, {"param": torch.zeros(31, 13), "is_expert_param": True}),
            Unsupported,
            "mixture-of-experts",
        ),
        (holding("zero/emb.weight/step.pt", "three"), CorruptCheckpoint, "holds no number"),
        (holding("zero/optimizer_state.pt", [1]), CorruptCheckpoint, "no 'param_groups' inside"),
        (
            holding("zero/optimizer_state.pt", {"param_groups": [{"params": [0]}]}),
            CorruptCheckpoint,
            "1 param groups and 2 groups",
        ),
        (
            holding("zero/optimizer_state.pt", {"param_groups": [], "zero_stage": 3}),
            CorruptCheckpoint,
            "of ZeRO stage 3",
        ),
    ],
)
def test_a_damaged_folder_is_refused_with_one_reason(
    damage: Callable[[Path], None], problem: type[CkptError], words: str, tmp_path: Path
) -> None:
    root = shutil.copytree(UNIVERSAL, tmp_path / "universal")
    damage(root / TAG)
    with pytest.raises(problem, match=words):
        ckpt.open(root)


def test_frozen_parameters_of_stage_3_need_every_ranks_file(runs: Runs, tmp_path: Path) -> None:
    root = made_by_deepspeed(runs["zero3_fp32", 3].source, tmp_path / "theirs")
    (root / TAG / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(MissingPart, match=r"missing ranks \[2\]"):
        ckpt.open(root)


def test_elements_too_many_at_the_end_are_left_out(tmp_path: Path) -> None:
    """Converters before 0.19.3 gave small parameters one for each rank that held only padding."""
    root = shutil.copytree(UNIVERSAL, tmp_path / "universal")
    torch.save(torch.arange(15.0), root / TAG / "zero/blocks.0.ln.bias/exp_avg.pt")
    out = ckpt.convert(root, "torch", tmp_path / "out.pt")
    optimizer = torch.load(out, weights_only=True)["optimizer"]
    names = [name for group in optimizer["param_groups"] for name in group["param_names"]]
    state = optimizer["state"][names.index("blocks.0.ln.bias")]
    assert torch.equal(state["exp_avg"], torch.arange(13.0))


def test_rows_that_padded_the_vocabulary_stay_off(tmp_path: Path) -> None:
    root = shutil.copytree(UNIVERSAL, tmp_path / "universal")
    for name in ("fp32", "exp_avg", "exp_avg_sq"):
        content = {"cat_dim": 0, "vocab_tensor": True, "param": torch.ones(29, 13)}
        torch.save(content, root / TAG / f"zero/emb.weight/{name}.pt")
    assert ckpt.open(root).params["emb.weight"].weight.shape == (29, 13)


# --- what cannot be written ---------------------------------------------------------------------


def saved(optimizer: torch.optim.Optimizer, model: torch.nn.Module, folder: Path) -> Path:
    file = folder / "source.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file


def named_adam(folder: Path, change: Callable[[Any], object] = lambda _optimizer: None) -> Path:
    model = small_model()
    optimizer = stepped(model, torch.optim.AdamW(model.named_parameters()))
    change(optimizer)
    return saved(optimizer, model, folder)


def late(optimizer: Any) -> None:
    """One parameter has taken fewer steps than the others."""
    state = next(iter(optimizer.state.values()))
    state["step"] = state["step"] + 4


def test_a_script_does_not_tell_the_stage(tmp_path: Path) -> None:
    with pytest.raises(MissingPart, match="--stage"):
        ckpt.convert(named_adam(tmp_path), "universal", tmp_path / "out")


def test_weights_alone_are_not_enough(tmp_path: Path) -> None:
    torch.save(small_model().state_dict(), tmp_path / "m.pt")
    with pytest.raises(MissingPart, match="no param groups"):
        ckpt.convert(tmp_path / "m.pt", "universal", tmp_path / "out", stage=2)


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_joined_late_are_refused(stage: int, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="1 to 5 steps"):
        ckpt.convert(named_adam(tmp_path, late), "universal", tmp_path / "out", stage=stage)


def test_stage_3_takes_adams_states_only(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="momentum_buffer, and DeepSpeed's stage 3"):
        ckpt.convert(runs["zero2_sgd", 2].source, "universal", tmp_path / "out", stage=3)


def test_the_stage_means_nothing_to_other_formats(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="--stage"):
        ckpt.convert(named_adam(tmp_path), "torch", tmp_path / "out.pt", stage=2)


@pytest.mark.parametrize(
    ("stage", "version", "words"),
    [
        (2, "0.13.5", r"before 0\.14\.1 cannot load"),
        (3, "0.14.2", r"before 0\.14\.5 cannot load.*convert to zero3"),
        (
            3,
            "0.17.6",
            r"2 param groups, of which stage 3 of DeepSpeed 0\.17\.6 loads the first only",
        ),
        (3, "v18", r"expected a release such as"),
    ],
)
def test_what_a_release_cannot_load_is_refused(
    runs: Runs, stage: int, version: str, words: str, tmp_path: Path
) -> None:
    source = runs["zero3_fp32", 2].source
    with pytest.raises(Unsupported, match=words):
        ckpt.convert(source, "universal", tmp_path / "out", stage=stage, ds_version=version)


@pytest.mark.parametrize(("stage", "version"), [(2, "0.14.5"), (3, "0.18"), (3, "0.18.1.dev0")])
def test_the_folder_names_the_release_it_is_for(
    runs: Runs, stage: int, version: str, tmp_path: Path
) -> None:
    options = {"stage": stage, "ds_version": version}
    root = ckpt.convert(runs["zero3_fp32", 2].source, "universal", tmp_path / "out", **options)
    (file,) = root.glob("*/*_model_states.pt")
    assert torch.load(file, weights_only=False)["ds_version"] == version


def test_one_group_for_an_older_release_wants_one_sub_group(tmp_path: Path) -> None:
    plan = ckpt.prepare(
        named_adam(tmp_path), "universal", tmp_path / "out", stage=3, ds_version="0.16.9"
    )
    assert any("sub_group_size makes several fails" in note.detail for note in plan.notes)


def test_the_release_means_nothing_to_other_formats(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="--ds-version"):
        ckpt.convert(named_adam(tmp_path), "zero2", tmp_path / "out", ds_version="0.16.9")


def test_states_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    def factor(optimizer: Any) -> None:
        next(iter(optimizer.state.values()))["exp_avg_sq_row"] = torch.zeros(4)

    with pytest.raises(Unsupported, match="exp_avg_sq_row"):
        ckpt.convert(named_adam(tmp_path, factor), "universal", tmp_path / "out", stage=2)


# --- what is said -------------------------------------------------------------------------------


def notes(source: Path, folder: Path, stage: int) -> str:
    plan = ckpt.prepare(source, "universal", folder / "out", stage=stage)
    return "\n".join(str(note) for note in plan.notes)


def test_what_deepspeed_does_not_restore_is_said(runs: Runs, tmp_path: Path) -> None:
    said = notes(runs["zero2_fp32", 2].source, tmp_path, 2)
    assert "bn.running_mean" in said and "load_universal restores trained parameters only" in said


def test_group_options_that_stage_3_would_mix_up_are_left_out(runs: Runs, tmp_path: Path) -> None:
    source = runs["zero3_fp32", 2].source
    assert "dropped: weight_decay: differ between param groups" in notes(source, tmp_path, 3)
    assert "differ between" not in notes(source, tmp_path, 2)


def test_parameters_without_a_state_get_zeros(tmp_path: Path) -> None:
    def forget(optimizer: Any) -> None:
        optimizer.state.pop(next(iter(optimizer.state)))

    source = named_adam(tmp_path, forget)
    assert "0.weight: has no optimizer state" in notes(source, tmp_path, 1)
    root = ckpt.convert(source, "universal", tmp_path / "out", stage=1)
    content = torch.load(next(root.glob("*/zero/0.weight/exp_avg.pt")))
    assert torch.equal(content["param"], torch.zeros(12))
