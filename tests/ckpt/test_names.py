"""Fully qualified names: wrapper segments off, and the user's own renames."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from ckpt.chunks import Chunk
from ckpt.dtypes import DType
from ckpt.errors import AmbiguousSource
from ckpt.model import Checkpoint, Origin, Param, ParamGroup, Record, StoredChunk
from ckpt.model import StoredTensor as Tensor
from ckpt.names import clean_names, parse_renames, rename
from ckpt.note import NoteKind


def tensor() -> Tensor:
    record = Record("/nowhere", 0, 4)
    return Tensor(DType.float32, (1,), (StoredChunk(Chunk((0,), (1,)), record),))


def cleaned_within_seconds(*names: str) -> tuple[dict[str, str], list[str]]:
    """The clean names and what was stripped, from a process of its own that may not hang."""
    program = (
        "import json, sys; from ckpt.names import clean_names; c = clean_names(sys.argv[1:]);"
        "print(json.dumps([dict(c.by_original), list(c.stripped)]))"
    )
    command = [sys.executable, "-c", program, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    by_original, stripped = json.loads(done.stdout)
    return by_original, stripped


def checkpoint() -> Checkpoint:
    """Two parameters, a buffer and a tied name, in an order of their own."""
    return Checkpoint(
        params={"net.a.weight": Param(tensor()), "net.b.weight": Param(tensor())},
        buffers={"net.norm.running_mean": tensor()},
        order=("net.a.weight", "net.norm.running_mean", "net.b.weight", "net.head.weight"),
        ties={"net.head.weight": "net.a.weight"},
        groups=(
            ParamGroup(("net.b.weight",), {"lr": 0.1}),
            ParamGroup(("net.a.weight",), {"lr": 0.2}),
        ),
        objects={"net.a.weight": "an object whose name only looks like a parameter"},
        origin=Origin("torch", "/nowhere"),
    )


# --- wrapper segments ---------------------------------------------------------------------------


def test_plain_names_stay_as_they_are() -> None:
    cleaned = clean_names(["a.weight", "b.bias"])
    assert dict(cleaned.by_original) == {"a.weight": "a.weight", "b.bias": "b.bias"}
    assert cleaned.stripped == ()


def test_no_names_stay_no_names() -> None:
    assert clean_names([]).by_original == {}


def test_the_order_of_names_stays() -> None:
    cleaned = clean_names(["module.b", "module.a", "module.c"])
    assert list(cleaned.by_original.values()) == ["b", "a", "c"]


def test_a_child_called_module_stays_when_not_all_names_carry_it() -> None:
    cleaned = clean_names(["module.weight", "head.weight"])
    assert cleaned["module.weight"] == "module.weight"
    assert cleaned.stripped == ()


def test_a_child_called_module_stays_below_the_wrapper() -> None:
    cleaned = clean_names(["module.module.weight", "module.head.weight"])
    assert cleaned["module.module.weight"] == "module.weight"


def test_a_child_called_module_in_the_middle_stays() -> None:
    cleaned = clean_names(["module.encoder.module.weight", "module.encoder.bias"])
    assert cleaned["module.encoder.module.weight"] == "encoder.module.weight"


def test_names_that_only_contain_the_letters_of_a_segment_stay() -> None:
    names = [
        "my_orig_mod.x",
        "encoder.my_orig_mod.x",
        "not_fsdp_wrapped_module.x",
        "a_checkpoint_wrapped_module.weight",
        "the_forward_module.weight",
        "_orig_module.weight",
        "x._orig_mod",
        "submodule.weight",
    ]
    cleaned, stripped = cleaned_within_seconds(*names)
    assert list(cleaned.values()) == names
    assert stripped == []


def test_letters_of_a_segment_stay_beside_a_real_one() -> None:
    cleaned, stripped = cleaned_within_seconds("_orig_mod.my_orig_mod.x", "_orig_mod.y")
    assert list(cleaned.values()) == ["my_orig_mod.x", "y"]
    assert stripped == ["_orig_mod."]


@pytest.mark.parametrize(
    "segment",
    [
        "module.",
        "_orig_mod.",
        "_fsdp_wrapped_module.",
        "_checkpoint_wrapped_module.",
        "_forward_module.",
    ],
)
def test_every_segment_in_front_of_all_names_goes_and_is_told(segment: str) -> None:
    cleaned = clean_names([f"{segment}a.weight", f"{segment}b.bias"])
    assert list(cleaned.by_original.values()) == ["a.weight", "b.bias"]
    assert cleaned.stripped == (segment,)


@pytest.mark.parametrize(
    "segment",
    ["_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module."],
)
def test_every_segment_that_no_user_writes_goes_from_the_middle_of_one_name(segment: str) -> None:
    cleaned = clean_names([f"layers.0.{segment}weight", "head.weight"])
    assert list(cleaned.by_original.values()) == ["layers.0.weight", "head.weight"]
    assert cleaned.stripped == (segment,)


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("module._orig_mod.a.weight", "a.weight"),
        ("_orig_mod.module.a.weight", "a.weight"),
        ("module.module.a.weight", "a.weight"),
        ("_orig_mod._orig_mod.a.weight", "a.weight"),
        ("_forward_module.module._orig_mod.a.weight", "a.weight"),
        ("module._fsdp_wrapped_module._checkpoint_wrapped_module.a.weight", "a.weight"),
        ("a._fsdp_wrapped_module._checkpoint_wrapped_module.weight", "a.weight"),
        ("a._checkpoint_wrapped_module._fsdp_wrapped_module.weight", "a.weight"),
        ("_orig_mod.module._orig_mod.module.a.weight", "a.weight"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module.b._orig_mod.weight", "a.b.weight"),
    ],
)
def test_segments_nested_in_any_order_go(name: str, clean: str) -> None:
    assert clean_names([name])[name] == clean


def test_every_kind_of_segment_is_told_once() -> None:
    cleaned = clean_names(["module._orig_mod.a._orig_mod.x", "module._orig_mod.b"])
    assert sorted(cleaned.stripped) == ["_orig_mod.", "module."]


def test_the_same_name_twice_is_no_collision() -> None:
    assert clean_names(["module.a", "module.a"])["module.a"] == "a"


def test_two_names_that_become_one_are_refused_with_both_names() -> None:
    with pytest.raises(AmbiguousSource, match=r"a\._orig_mod\.weight") as refusal:
        clean_names(["a.weight", "a._orig_mod.weight"])
    assert "'a.weight'" in str(refusal.value)


# --- the user's rules ---------------------------------------------------------------------------


def test_no_rules_change_nothing() -> None:
    before = checkpoint()
    assert rename(before, []) is before


def test_a_rule_that_matches_nothing_is_a_mistake() -> None:
    with pytest.raises(AmbiguousSource, match="no name matches"):
        rename(checkpoint(), [r"^encoder\.=decoder."])


def test_a_rule_that_changes_nothing_changes_nothing() -> None:
    before = checkpoint()
    assert rename(before, [r"^net\.=net."]) is before


def test_objects_keep_their_names() -> None:
    assert rename(checkpoint(), [r"^net\.="]).objects == checkpoint().objects


def test_a_rule_renames_parameters_buffers_ties_groups_and_order_together() -> None:
    after = rename(checkpoint(), [r"^net\.=model."])
    assert list(after.params) == ["model.a.weight", "model.b.weight"]
    assert list(after.buffers) == ["model.norm.running_mean"]
    assert after.ties == {"model.head.weight": "model.a.weight"}
    assert [group.fqns for group in after.groups] == [("model.b.weight",), ("model.a.weight",)]
    assert after.order == (
        "model.a.weight",
        "model.norm.running_mean",
        "model.b.weight",
        "model.head.weight",
    )


def test_a_renamed_parameter_keeps_its_tensors_and_a_group_its_options() -> None:
    before = checkpoint()
    after = rename(before, [r"^net\.=model."])
    assert after.params["model.a.weight"] is before.params["net.a.weight"]
    assert [group.options for group in after.groups] == [{"lr": 0.1}, {"lr": 0.2}]


def test_a_rename_is_noted_with_both_names() -> None:
    (note,) = rename(checkpoint(), [r"\.a\.=.first."]).notes
    assert note.kind is NoteKind.RENAMED
    assert note.subjects == ("net.a.weight -> net.first.weight",)


def test_rules_apply_one_after_another_with_groups_of_the_regex() -> None:
    after = rename(checkpoint(), [r"^net\.=", r"^([ab])\.weight=\1.kernel"])
    assert list(after.params) == ["a.kernel", "b.kernel"]


def test_the_last_equals_sign_separates_so_that_lookaheads_can_be_written() -> None:
    ((pattern, replacement),) = parse_renames(["a(?=b)=c"])
    assert (pattern, replacement) == (re.compile("a(?=b)"), "c")


def test_an_empty_replacement_deletes() -> None:
    assert list(rename(checkpoint(), [r"^net\.="]).params) == ["a.weight", "b.weight"]


def test_a_rule_without_equals_sign_is_refused_and_shown() -> None:
    with pytest.raises(AmbiguousSource, match="'encoder': expected REGEX=REPLACEMENT"):
        rename(checkpoint(), ["encoder"])


def test_a_regex_that_does_not_compile_is_refused_and_shown() -> None:
    with pytest.raises(AmbiguousSource, match=r"--rename '\(=x'"):
        rename(checkpoint(), ["(=x"])


def test_a_replacement_that_names_a_group_that_is_not_there_is_refused_and_shown() -> None:
    with pytest.raises(AmbiguousSource, match="--rename"):
        rename(checkpoint(), [r"net=\2"])


def test_two_names_that_a_rule_makes_one_are_refused_with_both_names() -> None:
    with pytest.raises(AmbiguousSource, match=r"net\.b\.weight") as refusal:
        rename(checkpoint(), [r"\.[ab]\.=.same."])
    assert "net.a.weight" in str(refusal.value)


def test_a_rule_may_swap_two_names() -> None:
    rules = [r"\.a\.=.TMP.", r"\.b\.=.a.", r"\.TMP\.=.b."]
    assert list(rename(checkpoint(), rules).params) == ["net.b.weight", "net.a.weight"]
