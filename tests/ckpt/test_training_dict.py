"""The dict a training script saves, written by torch.save and taken apart by structure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import small_model, stepped
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ckpt import training_dict
from ckpt.errors import AmbiguousSource, CorruptCheckpoint, UnknownFormat, Unsupported
from ckpt.format import ReadOptions
from ckpt.meta_model import ModelNames, names_of
from ckpt.model import Checkpoint, Origin, StoredTensor
from ckpt.note import NoteKind
from ckpt.storage import torch_file

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return stepped(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def read(tree: Any, folder: Path, **options: Any) -> Checkpoint:
    """The checkpoint in a tree after torch has saved it."""
    path = folder / "job.pt"
    torch.save(tree, path)
    factory: ModelNames | None = options.pop("factory", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_dict, "build_model", lambda _spec: factory)
        return training_dict.read_training_dict(
            torch_file.read(path),
            ReadOptions(model=None if factory is None else "given", **options),
            Origin("torch", "job.pt"),
        )


class Tied(torch.nn.Module):
    """An embedding whose weight the head uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


# --- where the model is -------------------------------------------------------------------------


def test_a_bare_state_dict_is_the_model(tmp_path: Path) -> None:
    found = read(small_model().state_dict(), tmp_path)
    assert list(found.params) == NAMES
    assert found.order == tuple(NAMES)
    assert found.objects == {}
    assert not found.has_optimizer


@pytest.mark.parametrize("key", ["model", "state_dict", "net", "generator", "my model"])
def test_a_model_is_found_under_any_name(key: str, tmp_path: Path) -> None:
    found = read({"epoch": 3, key: small_model().state_dict()}, tmp_path)
    assert list(found.params) == NAMES
    assert found.objects == {"epoch": 3}


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_model_is_found_at_any_reasonable_depth(depth: int, tmp_path: Path) -> None:
    tree: dict[str, Any] = dict(small_model().state_dict())
    for level in range(depth):
        tree = {f"level{level}": tree}
    assert list(read(tree, tmp_path).params) == NAMES


def test_what_lies_beside_a_nested_model_is_kept_where_it_was(tmp_path: Path) -> None:
    tree = {"app": {"model": small_model().state_dict(), "name": "x"}, "step": 7}
    assert read(tree, tmp_path).objects == {"app": {"name": "x"}, "step": 7}


def test_the_app_state_of_dcp_recipes_is_taken_apart(tmp_path: Path) -> None:
    model = small_model()
    app = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, adam(model))}
    found = read({"app": app}, tmp_path)
    assert list(found.params) == NAMES
    assert found.has_optimizer
    assert found.objects == {}


def test_a_lightning_checkpoint_is_taken_apart(tmp_path: Path) -> None:
    model = small_model()
    tree = {
        "epoch": 1,
        "global_step": 10,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [adam(model).state_dict()],
        "lr_schedulers": [{"base_lrs": [0.01], "last_epoch": 1}],
    }
    found = read(tree, tmp_path)
    assert list(found.params) == NAMES
    assert found.groups[0].fqns == tuple(NAMES)
    assert list(found.objects) == [
        "epoch",
        "global_step",
        "pytorch-lightning_version",
        "loops",
        "callbacks",
        "lr_schedulers",
    ]


def test_a_list_of_optimizers_keeps_what_else_is_in_it(tmp_path: Path) -> None:
    model = small_model()
    tree = {"model": model.state_dict(), "states": [adam(model).state_dict(), {"seed": 1}]}
    assert read(tree, tmp_path).objects == {"states": [{"seed": 1}]}


def test_an_optimizer_deep_inside_a_list_is_not_kept_twice(tmp_path: Path) -> None:
    model = small_model()
    tree = {"model": model.state_dict(), "jobs": [{"optimizer": adam(model).state_dict()}]}
    found = read(tree, tmp_path)
    assert found.has_optimizer
    assert "state" not in repr(found.objects)


def test_torchtitan_tensors_beside_an_optimizer_are_the_model(tmp_path: Path) -> None:
    model = small_model()
    optimizer = get_optimizer_state_dict(model, adam(model))
    tree = {**model.state_dict(), "optimizer": optimizer, "train_state": {"step": 5}}
    found = read(tree, tmp_path)
    assert list(found.params) == NAMES
    assert found.groups[0].fqns == tuple(NAMES)
    assert found.objects == {"train_state": {"step": 5}}


def test_a_dict_of_0_dimensional_metrics_is_no_model(tmp_path: Path) -> None:
    metrics = {"loss": torch.tensor(0.5), "accuracy": torch.tensor(0.9)}
    found = read({"metrics": metrics, "model": small_model().state_dict()}, tmp_path)
    assert list(found.params) == NAMES
    assert list(found.objects["metrics"]) == ["loss", "accuracy"]


def test_a_dict_of_rng_states_is_no_model(tmp_path: Path) -> None:
    rng = {"cpu": torch.get_rng_state(), "cuda": torch.get_rng_state()}
    found = read({"rng": rng, "model": small_model().state_dict()}, tmp_path)
    assert list(found.params) == NAMES
    assert found.objects["rng"]["cpu"].shape == torch.get_rng_state().shape


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"step": 1},
        {"model": {}},
        {"rng": {"cpu": torch.zeros(4, dtype=torch.uint8)}},
        {"metrics": {"loss": torch.tensor(0.5)}},
        {"model": {1: torch.zeros(2)}},
    ],
)
def test_a_dict_without_a_state_dict_is_refused_with_the_file(tree: Any, tmp_path: Path) -> None:
    with pytest.raises(UnknownFormat, match=r"^job\.pt: no model state dict"):
        read(tree, tmp_path)


def test_an_optimizer_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownFormat):
        read({"optimizer": adam(small_model()).state_dict()}, tmp_path)


# --- several models -----------------------------------------------------------------------------


def with_ema() -> dict[str, Any]:
    ema = {name: value * 2 for name, value in small_model().state_dict().items()}
    return {"model": small_model().state_dict(), "ema": ema, "step": 3}


def test_several_state_dicts_are_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(AmbiguousSource, match="--key: model, ema"):
        read(with_ema(), tmp_path)


def test_the_chosen_state_dict_is_the_model(tmp_path: Path) -> None:
    assert list(read(with_ema(), tmp_path, key="ema").params) == NAMES


def test_the_state_dict_that_was_not_chosen_is_kept_as_an_object(tmp_path: Path) -> None:
    objects = read(with_ema(), tmp_path, key="model").objects
    assert list(objects) == ["ema", "step"]
    assert all(isinstance(objects["ema"][name], StoredTensor) for name in NAMES)


def test_a_nested_state_dict_is_chosen_by_its_dotted_path(tmp_path: Path) -> None:
    nested = {"a": {"net": small_model().state_dict()}, "b": {"net": Tied().state_dict()}}
    assert list(read(nested, tmp_path, key="b.net").params) == ["embed.weight"]


def test_a_key_with_a_dot_in_its_own_name_can_be_chosen(tmp_path: Path) -> None:
    tree = {"v1.0": small_model().state_dict(), "v2.0": Tied().state_dict()}
    assert list(read(tree, tmp_path, key="v1.0").params) == NAMES


def test_a_wrong_key_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(AmbiguousSource, match=r"--key wrong: .* model, ema"):
        read(with_ema(), tmp_path, key="wrong")


def test_a_key_of_a_file_with_one_state_dict_may_be_given(tmp_path: Path) -> None:
    assert list(read({"m": small_model().state_dict()}, tmp_path, key="m").params) == NAMES


# --- the model's names --------------------------------------------------------------------------


def test_wrapper_names_go_and_are_told(tmp_path: Path) -> None:
    found = read({"model": torch.nn.DataParallel(small_model()).state_dict()}, tmp_path)
    assert list(found.params) == NAMES
    assert found.origin.stripped == ("module.",)


def test_buffers_of_a_batch_norm_are_no_parameters(tmp_path: Path) -> None:
    found = read({"model": torch.nn.BatchNorm1d(3).state_dict()}, tmp_path)
    assert list(found.params) == ["weight", "bias"]
    assert list(found.buffers) == ["running_mean", "running_var", "num_batches_tracked"]


def test_a_factory_tells_parameters_from_buffers(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(3))
    found = read({"model": model.state_dict()}, tmp_path, factory=names_of(model))
    assert list(found.buffers) == ["scale"]


def test_a_tied_weight_is_one_parameter_with_an_alias(tmp_path: Path) -> None:
    found = read({"model": Tied().state_dict()}, tmp_path)
    assert list(found.params) == ["embed.weight"]
    assert found.ties == {"head.weight": "embed.weight"}
    assert found.order == ("embed.weight", "head.weight")


def test_equal_weights_in_two_places_are_not_tied(tmp_path: Path) -> None:
    found = read({"model": {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}}, tmp_path)
    assert found.ties == {}


def test_two_views_of_one_storage_with_other_shapes_are_not_tied(tmp_path: Path) -> None:
    fused = torch.ones(4, 2)
    found = read({"model": {"a": fused[:2], "b": fused[2:]}}, tmp_path)
    assert found.ties == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_tied_weights_of_every_dtype_are_tied(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = torch.ones(2, 2).to(dtype)
    found = read({"model": {"a": weight.detach(), "b": weight.detach()}}, tmp_path)
    assert found.ties == {"b": "a"}


@pytest.mark.parametrize("wrap", [dict, lambda inner: {"model": inner}])
def test_extra_state_of_modules_stays_with_the_model(wrap: Any, tmp_path: Path) -> None:
    inner = {"layer.weight": torch.ones(2, 2), "layer._extra_state": {"recipe": "fp8"}}
    found = read(wrap(inner), tmp_path)
    assert list(found.params) == ["layer.weight"]
    assert found.extra_state == {"layer._extra_state": {"recipe": "fp8"}}
    assert found.objects == {}


def test_an_optimizer_beside_the_model_is_its_own(tmp_path: Path) -> None:
    first, second = small_model(), small_model()
    tree = {
        name: {"model": model.state_dict(), "optimizer": adam(model).state_dict()}
        for name, model in (("generator", first), ("critic", second))
    }
    found = read(tree, tmp_path, key="critic.model")
    assert found.has_optimizer
    assert set(found.objects) == {"generator", "generator.optimizer"}


def test_several_optimizers_of_which_none_is_nearer_are_refused(tmp_path: Path) -> None:
    model = small_model()
    tree = {"model": model.state_dict(), "o1": adam(model).state_dict()}
    with pytest.raises(AmbiguousSource, match="several optimizers"):
        read({**tree, "o2": adam(model).state_dict()}, tmp_path)


def test_a_flat_optimizer_merged_at_the_top_is_told_from_weights(tmp_path: Path) -> None:
    weight = torch.ones(2, 2)
    tree = {
        "layer.weight": weight,
        "state.layer.weight.exp_avg": weight * 2,
        "param_groups.layer.weight.lr": 0.5,
    }
    found = read(tree, tmp_path)
    assert list(found.params) == ["layer.weight"]
    assert found.groups[0].options == {"lr": 0.5}


def test_flat_parameters_of_fsdp_are_refused_with_what_to_do(tmp_path: Path) -> None:
    tree = {"model": {"_flat_param": torch.ones(8), "layer._flat_param": torch.ones(8)}}
    with pytest.raises(Unsupported, match="FULL_STATE_DICT"):
        read(tree, tmp_path)


# --- the optimizer ------------------------------------------------------------------------------


def test_a_model_without_optimizer_has_no_groups(tmp_path: Path) -> None:
    found = read({"model": small_model().state_dict()}, tmp_path)
    assert found.groups == ()


def test_numbered_states_find_their_parameters_and_say_so(tmp_path: Path) -> None:
    model = small_model()
    found = read({"model": model.state_dict(), "optimizer": adam(model).state_dict()}, tmp_path)
    assert found.groups[0].fqns == tuple(NAMES)
    assert sorted(found.params["0.weight"].state) == ["exp_avg", "exp_avg_sq", "step"]
    assert [note.kind for note in found.notes] == [NoteKind.SYNTHESISED]


def test_named_parameters_need_no_matching(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    named = [(name, param) for name, param in model.named_parameters() if name != "0.weight"]
    optimizer = stepped(model, torch.optim.AdamW(named))
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found = read(tree, tmp_path)
    assert found.groups[0].fqns == ("0.bias", "1.weight", "1.bias")
    assert found.frozen == ("0.weight",)
    assert found.notes == ()


def test_states_by_fqn_need_no_matching(tmp_path: Path) -> None:
    model = small_model()
    tree = {"m": model.state_dict(), "o": get_optimizer_state_dict(model, adam(model))}
    found = read(tree, tmp_path)
    assert found.groups[0].fqns == tuple(NAMES)
    assert found.notes == ()


def test_names_in_the_optimizer_lose_their_wrappers_too(tmp_path: Path) -> None:
    model = torch.nn.DataParallel(small_model())
    optimizer = stepped(model, torch.optim.AdamW(model.named_parameters()))
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert read(tree, tmp_path).groups[0].fqns == tuple(NAMES)


def test_names_in_the_optimizer_without_the_wrapper_fit_a_wrapped_model(tmp_path: Path) -> None:
    model = small_model()
    optimizer = stepped(model, torch.optim.AdamW(model.named_parameters()))
    wrapped = torch.nn.DataParallel(model).state_dict()
    found = read({"model": wrapped, "optimizer": optimizer.state_dict()}, tmp_path)
    assert found.groups[0].fqns == tuple(NAMES)


def test_a_tied_weight_has_its_state_under_the_owner(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.named_parameters())
    model.head(model.embed(torch.tensor([1]))).sum().backward()
    optimizer.step()
    found = read({"m": model.state_dict(), "o": optimizer.state_dict()}, tmp_path)
    assert found.groups[0].fqns == ("embed.weight",)
    assert "exp_avg" in found.params["embed.weight"].state


def test_a_frozen_parameter_is_not_trainable(tmp_path: Path) -> None:
    model = small_model()
    model[0].weight.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = stepped(model, torch.optim.AdamW(trained))
    found = read({"m": model.state_dict(), "o": optimizer.state_dict()}, tmp_path)
    assert found.frozen == ("0.weight",)


def ambiguous() -> dict[str, Any]:
    """Two equal layers, of which only the second is trained, by number."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = stepped(model, torch.optim.AdamW(model[1].parameters()))
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_numbers_that_fit_several_parameters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AmbiguousSource, match="--param-order"):
        read(ambiguous(), tmp_path)


def test_numbers_that_fit_several_parameters_are_dropped_with_a_note_when_not_needed(
    tmp_path: Path,
) -> None:
    found = read(ambiguous(), tmp_path, need_optimizer=False)
    assert list(found.params) == NAMES
    assert not found.has_optimizer
    assert [(note.kind, note.subjects) for note in found.notes] == [
        (NoteKind.DROPPED, ("optimizer",))
    ]


def test_a_given_order_settles_numbers(tmp_path: Path) -> None:
    found = read(ambiguous(), tmp_path, param_order=("1.weight", "1.bias"))
    assert found.groups[0].fqns == ("1.weight", "1.bias")


def test_a_factory_with_frozen_parameters_settles_numbers(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[0].requires_grad_(False)
    found = read(ambiguous(), tmp_path, factory=names_of(model))
    assert found.groups[0].fqns == ("1.weight", "1.bias")


def test_states_of_another_model_are_refused(tmp_path: Path) -> None:
    other = torch.nn.Linear(3, 7)
    optimizer = stepped(other, torch.optim.AdamW(other.parameters()))
    tree = {"model": small_model().state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(CorruptCheckpoint, match="another model"):
        read(tree, tmp_path)


def test_a_state_for_a_name_that_the_model_lacks_is_refused_with_the_name(tmp_path: Path) -> None:
    model = small_model()
    state = {name: value for name, value in model.state_dict().items() if name != "1.bias"}
    tree = {"model": state, "optimizer": get_optimizer_state_dict(model, adam(model))}
    with pytest.raises(CorruptCheckpoint, match=r"'1\.bias'"):
        read(tree, tmp_path)


def test_several_optimizers_are_refused_with_their_places(tmp_path: Path) -> None:
    model = small_model()
    tree = {
        "model": model.state_dict(),
        "optimizers": [adam(model).state_dict(), adam(model).state_dict()],
    }
    with pytest.raises(AmbiguousSource, match=r"optimizers\.0, optimizers\.1"):
        read(tree, tmp_path)


def test_several_optimizers_are_dropped_with_a_note_when_not_needed(tmp_path: Path) -> None:
    model = small_model()
    tree = {"m": model.state_dict(), "g": adam(model).state_dict(), "d": adam(model).state_dict()}
    found = read(tree, tmp_path, need_optimizer=False)
    assert [note.subjects for note in found.notes] == [("g", "d")]
    assert not found.has_optimizer


# --- names that a file leaves out ---------------------------------------------------------------


def test_a_tied_name_that_the_file_leaves_out_comes_back_with_a_known_model(tmp_path: Path) -> None:
    model = Tied()
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    found = read(state, tmp_path, factory=names_of(model))
    assert found.ties == {"head.weight": "embed.weight"}
    assert found.order == ("embed.weight", "head.weight")
    assert [note.kind for note in found.notes] == [NoteKind.TIED]


def test_a_tied_weight_saved_under_another_name_goes_to_the_one_that_is_optimised(
    tmp_path: Path,
) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.embed.weight.sum().backward()
    optimizer.step()
    tree = {"model": {"head.weight": model.head.weight}, "optim": optimizer.state_dict()}
    found = read(tree, tmp_path, factory=names_of(model))
    assert (found.ties, [*found.params]) == ({"head.weight": "embed.weight"}, ["embed.weight"])
    assert found.params["embed.weight"].state["step"]


def test_of_three_tied_names_any_one_gives_the_others(tmp_path: Path) -> None:
    model = Tied()
    model.last = torch.nn.Linear(3, 5, bias=False)
    model.last.weight = model.embed.weight
    for name in ("embed", "head", "last"):
        found = read({f"{name}.weight": model.embed.weight}, tmp_path, factory=names_of(model))
        assert found.ties == {"head.weight": "embed.weight", "last.weight": "embed.weight"}


def test_tied_names_with_weights_of_their_own_stay_apart(tmp_path: Path) -> None:
    state = {"embed.weight": torch.ones(5, 3), "head.weight": torch.zeros(5, 3)}
    found = read(state, tmp_path, factory=names_of(Tied()))
    assert (found.ties, [*found.params]) == ({}, ["embed.weight", "head.weight"])
