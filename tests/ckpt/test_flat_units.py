"""Units of FSDP1 found by their sizes, on the names of models that people train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil

import pytest

from ckpt.formats._flat_units import fitting_wrappings, units_below
from ckpt.param_order import Slot

WORLD_SIZE = 8
LAYERS = range(12)


def decoder(tied: bool = False) -> dict[str, int]:
    """Sizes by the names of a small decoder of transformers."""
    inner = {
        "self_attn.q_proj": 4096, "self_attn.k_proj": 1024, "self_attn.v_proj": 1024,
        "self_attn.o_proj": 4096, "mlp.gate_proj": 11264, "mlp.up_proj": 11264,
        "mlp.down_proj": 11264, "input_layernorm": 64, "post_attention_layernorm": 64,
    }  # fmt: skip
    blocks = {f"model.layers.{i}.{n}.weight": size for i in LAYERS for n, size in inner.items()}
    ends = {"model.norm.weight": 64} | ({} if tied else {"lm_head.weight": 32000})
    return {"model.embed_tokens.weight": 32000} | blocks | ends


def of_layers(*inner: str) -> list[str]:
    return [f"model.layers.{i}.{name}" for i in LAYERS for name in inner or ("",)]


def slots(numels: Mapping[str, int], units: Iterable[Sequence[str]]) -> list[list[Slot]]:
    shares = [ceil(sum(numels[name] for name in unit) / WORLD_SIZE) for unit in units]
    return [[Slot(number, (share,)) for number, share in enumerate(shares)]]


@pytest.mark.parametrize(
    ("wrapped", "words"),
    [
        ([], "one unit of everything"),
        (of_layers(), "wrapping model.layers.*"),
        (
            [*of_layers(), "model.embed_tokens.", "lm_head."],
            "wrapping model.embed_tokens, model.layers.*, lm_head",
        ),
        (
            of_layers("self_attn.", "mlp."),
            "wrapping model.layers.*.self_attn, model.layers.*.mlp",
        ),
        (
            [*of_layers("", "mlp."), "lm_head."],
            "wrapping model.layers.*, model.layers.*.mlp, lm_head",
        ),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_what_was_wrapped_is_found(wrapped: list[str], words: str, tied: bool) -> None:
    numels = decoder(tied)
    units = units_below(wrapped, list(numels))
    (found,) = fitting_wrappings(slots(numels, units.values()), [numels], None, WORLD_SIZE)
    if not tied:
        assert str(found) == words
    assert found.members == {at: tuple(unit) for at, unit in enumerate(units.values())}


def test_units_without_a_number_are_thought_of_where_sizes_tell() -> None:
    numels = decoder()
    wrapped = [*of_layers(), "model.embed_tokens.", "lm_head."]
    units = units_below(wrapped, list(numels))
    kept = [names for prefix, names in units.items() if prefix not in ("", "model.embed_tokens.")]
    (found,) = fitting_wrappings(slots(numels, kept), [numels], None, WORLD_SIZE)
    assert found.members == {at: tuple(names) for at, names in enumerate(kept)}


def test_layers_of_one_size_without_a_number_are_not_told_apart() -> None:
    numels = decoder()
    kept = list(units_below(of_layers(), list(numels)).values())[:-1]
    found = fitting_wrappings(slots(numels, kept), [numels], None, WORLD_SIZE)
    assert any(wrapping.members is None for wrapping in found)
    trained = frozenset(name for unit in kept for name in unit)
    (found_with_model,) = fitting_wrappings(slots(numels, kept), [numels], trained, WORLD_SIZE)
    assert found_with_model.members == {at: tuple(names) for at, names in enumerate(kept)}


def test_units_of_trained_and_frozen_parameters_are_not_thought_of() -> None:
    numels = decoder()
    units = units_below(of_layers(), list(numels))
    half = frozenset(name for name in numels if "mlp" in name)
    assert fitting_wrappings(slots(numels, units.values()), [numels], half, WORLD_SIZE) == []


def test_two_ways_with_the_same_sizes_are_both_told() -> None:
    numels = {"a.left.weight": 8, "a.right.weight": 8, "b.left.weight": 8, "b.right.weight": 8}
    two = [[Slot(0, (2,)), Slot(1, (2,))]]
    found = [str(way) for way in fitting_wrappings(two, [numels], None, WORLD_SIZE)]
    assert found == ["wrapping a", "wrapping b"]


def test_modules_wrapped_one_by_one_are_not_found() -> None:
    numels = decoder()
    units = units_below(["model.layers.3."], list(numels))
    assert fitting_wrappings(slots(numels, units.values()), [numels], None, WORLD_SIZE) == []


def test_a_number_without_a_state_may_be_any_unit_that_order_allows() -> None:
    numels = decoder()
    units = units_below(of_layers(), list(numels))
    ((root, *others),) = slots(numels, units.values())
    groups = [[Slot(root.index, None), *others]]
    (found,) = fitting_wrappings(groups, [numels], None, WORLD_SIZE)
    assert str(found) == "wrapping model.layers.*"
