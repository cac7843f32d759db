"""The forms in which an optimizer's state is saved, made by torch and read into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import small_model, stepped
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from ckpt.errors import CorruptCheckpoint
from ckpt.model import StoredTensor
from ckpt.optimizer_dict import OptimizerDict, is_optimizer, read_optimizer
from ckpt.param_order import Slot
from ckpt.storage import torch_file


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW in two groups: matrices with weight decay, vectors without."""
    matrices = [param for param in model.parameters() if param.ndim == 2]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return stepped(model, torch.optim.AdamW(groups, lr=0.01))


def saved(tree: Any, folder: Path) -> Any:
    """The tree as it comes back from a file that torch saved."""
    torch.save(tree, folder / "optimizer.pt")
    return torch_file.read(folder / "optimizer.pt")


def read(tree: Any, folder: Path) -> OptimizerDict:
    return read_optimizer(saved(tree, folder), "optimizer.pt")


# --- recognising --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"state": {}},
        {"param_groups": []},
        {"state": 1, "param_groups": []},
        {"weight": 1.0, "bias": 2.0},
        {"state.w.exp_avg": 1.0},
        {"param_groups.w.lr": 1.0, "w": 1.0},
        {0: 1.0},
        [("state", {}), ("param_groups", [])],
        None,
        3,
    ],
)
def test_something_else_is_no_optimizer(tree: Any) -> None:
    assert not is_optimizer(tree)


def test_a_scheduler_is_no_optimizer() -> None:
    optimizer = torch.optim.SGD(small_model().parameters(), lr=0.1)
    assert not is_optimizer(torch.optim.lr_scheduler.StepLR(optimizer, 1).state_dict())


def test_the_state_dict_of_a_torch_optimizer_is_one() -> None:
    assert is_optimizer(adam(small_model()).state_dict())


def test_an_optimizer_that_has_not_stepped_is_one() -> None:
    assert is_optimizer(torch.optim.Adam(small_model().parameters()).state_dict())


def test_a_flattened_optimizer_is_one() -> None:
    model = small_model()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    assert is_optimizer(get_optimizer_state_dict(model, adam(model), options=options))


# --- numbers ------------------------------------------------------------------------------------


def test_numbered_states_keep_their_numbers_groups_and_options(tmp_path: Path) -> None:
    found = read(adam(small_model()).state_dict(), tmp_path)
    assert found.is_numbered
    assert found.members == ((0, 1), (2, 3))
    assert [options["weight_decay"] for options in found.options] == [0.1, 0.0]
    assert sorted(found.states) == [0, 1, 2, 3]


def test_members_and_names_are_no_options(tmp_path: Path) -> None:
    model = small_model()
    optimizer = stepped(model, torch.optim.Adam(model.named_parameters()))
    (options,) = read(optimizer.state_dict(), tmp_path).options
    assert options.keys().isdisjoint({"params", "param_names"})


def test_numbered_states_show_the_shapes_of_their_parameters(tmp_path: Path) -> None:
    slots = read(adam(small_model()).state_dict(), tmp_path).slots()
    assert slots == [[Slot(0, (4, 3)), Slot(1, (2, 4))], [Slot(2, (4,)), Slot(3, (2,))]]


def test_moments_stay_tensors_in_the_file(tmp_path: Path) -> None:
    state = read(adam(small_model()).state_dict(), tmp_path).states[0]
    moment = state["exp_avg"]
    assert isinstance(moment, StoredTensor)
    assert moment.shape == (4, 3)


def test_without_names_no_name_is_spelled(tmp_path: Path) -> None:
    assert read(adam(small_model()).state_dict(), tmp_path).spelled_names() is None


def test_named_parameters_give_every_number_its_name(tmp_path: Path) -> None:
    model = small_model()
    optimizer = stepped(model, torch.optim.Adam(model.named_parameters()))
    assert read(optimizer.state_dict(), tmp_path).spelled_names() == {
        0: "0.weight",
        1: "0.bias",
        2: "1.weight",
        3: "1.bias",
    }


def test_a_group_without_names_leaves_the_names_unknown(tmp_path: Path) -> None:
    model = small_model()
    tree = stepped(model, torch.optim.Adam(model.named_parameters())).state_dict()
    tree["param_groups"][0]["param_names"] = ["0.weight"]
    assert read(tree, tmp_path).spelled_names() is None


def test_an_optimizer_that_has_not_stepped_has_members_without_shapes(tmp_path: Path) -> None:
    found = read(torch.optim.Adam(small_model().parameters()).state_dict(), tmp_path)
    assert found.states == {}
    assert found.slots() == [[Slot(0, None), Slot(1, None), Slot(2, None), Slot(3, None)]]


def test_plain_sgd_has_members_and_no_state(tmp_path: Path) -> None:
    model = small_model()
    optimizer = stepped(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = read(optimizer.state_dict(), tmp_path)
    assert found.members == ((0, 1, 2, 3),)
    assert [slot.shape for slot in found.slots()[0]] == [None] * 4


def test_factored_states_of_a_matrix_show_no_shape(tmp_path: Path) -> None:
    model = small_model()
    optimizer = stepped(model, torch.optim.Adafactor(model.parameters()))
    shapes = [slot.shape for slot in read(optimizer.state_dict(), tmp_path).slots()[0]]
    assert shapes == [None, (4,), None, (2,)]


def test_factored_states_of_a_square_matrix_do_not_look_like_a_vector(tmp_path: Path) -> None:
    from transformers.optimization import Adafactor

    model = torch.nn.Linear(3, 3)
    optimizer = stepped(model, Adafactor(model.parameters()))
    shapes = [slot.shape for slot in read(optimizer.state_dict(), tmp_path).slots()[0]]
    assert shapes == [None, (3,)]


def test_numbers_that_dcp_turned_into_strings_are_numbers_again(tmp_path: Path) -> None:
    tree = adam(small_model()).state_dict()
    tree["state"] = {str(number): state for number, state in tree["state"].items()}
    assert sorted(read(tree, tmp_path).states) == [0, 1, 2, 3]


# --- names --------------------------------------------------------------------------------------


def test_states_by_fqn_keep_the_names_and_the_groups(tmp_path: Path) -> None:
    model = small_model()
    found = read(get_optimizer_state_dict(model, adam(model)), tmp_path)
    assert not found.is_numbered
    assert found.members == (("0.weight", "1.weight"), ("0.bias", "1.bias"))
    assert [options["weight_decay"] for options in found.options] == [0.1, 0.0]
    assert sorted(found.states) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_states_by_fqn_spell_their_own_names(tmp_path: Path) -> None:
    model = small_model()
    found = read(get_optimizer_state_dict(model, adam(model)), tmp_path)
    assert found.spelled_names() == {name: name for name in found.states}


def test_states_by_fqn_have_no_slots_to_match(tmp_path: Path) -> None:
    model = small_model()
    assert read(get_optimizer_state_dict(model, adam(model)), tmp_path).slots() == [[], []]


# --- flattened ----------------------------------------------------------------------------------


def flattened(model: torch.nn.Module) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return dict(get_optimizer_state_dict(model, adam(model), options=options))


def test_flattened_states_come_back_by_fqn(tmp_path: Path) -> None:
    found = read(flattened(small_model()), tmp_path)
    assert sorted(found.states) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert sorted(found.states["0.weight"]) == ["exp_avg", "exp_avg_sq", "step"]


def test_flattened_groups_are_those_with_equal_options(tmp_path: Path) -> None:
    found = read(flattened(small_model()), tmp_path)
    assert [set(group) for group in found.members] == [
        {"0.weight", "1.weight"},
        {"0.bias", "1.bias"},
    ]
    assert [options["weight_decay"] for options in found.options] == [0.1, 0.0]


def test_flattened_names_may_contain_the_words_state_and_param_groups(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"state": torch.nn.Linear(2, 2), "param_groups": torch.nn.ReLU()})
    optimizer = torch.optim.AdamW(model.parameters())
    model["state"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    found = read(get_optimizer_state_dict(model, optimizer, options=options), tmp_path)
    assert sorted(found.states) == ["state.bias", "state.weight"]


# --- damaged ------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [3, "abc", [1], [{"lr": 0.1}], [{"params": 3}], [None]])
def test_groups_that_are_none_are_refused_with_the_place(groups: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"^job\.pt: param_groups"):
        read_optimizer({"state": {}, "param_groups": groups}, "job.pt")
