"""What every rule has to obey, whichever there are."""

from __future__ import annotations

import inspect
import re
import textwrap

import pytest
from conftest import REPO
from rewriting import after, body, findings, program, run

from migrate.api import Result
from migrate.registry import rules
from migrate.rule import Options, Rule

RULES = rules()
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)


def parts(rule: Rule) -> dict[str, str]:
    """The literal blocks of a rule's page, by the word before `::`."""
    page = inspect.getdoc(inspect.getmodule(type(rule))) or ""
    blocks = re.split(r"^(Before|After|Finding)::\n", page, flags=re.M)[1:]
    pairs = zip(blocks[::2], blocks[1::2], strict=True)
    return {name: textwrap.dedent(text).strip("\n") + "\n" for name, text in pairs}


def run_example(rule: Rule) -> Result:
    """The rule's own example, for the first target or option that it has something to say for."""
    before, folders = parts(rule)["Before"], Options(save="sharded")
    results = [run(before, only=rule.code, to=name) for name in ("ddp", "fsdp")]
    results.append(run(before, only=rule.code, to="fsdp", options=folders))
    return next((result for result in results if result.findings), results[0])


def test_codes_are_unique() -> None:
    codes = [rule.code for rule in RULES]
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"MG[1-9]\d\d", code) for code in codes)


@each_rule
def test_the_page_has_its_five_parts(rule: Rule) -> None:
    page = inspect.getdoc(inspect.getmodule(type(rule))) or ""
    for word in ("Why it matters:", "Safety:", "Before::"):
        assert word in page
    assert "After::" in page or "Finding::" in page
    assert page.splitlines()[0].endswith(".")


@each_rule
def test_the_example_is_true(rule: Rule) -> None:
    example = parts(rule)
    result = run_example(rule)
    if "After" in example:
        assert after(result) == body(program(example["After"]))
    if "Finding" in example:
        said = [f"{f.code} {f.message}" for f in result.findings]
        assert example["Finding"].strip() in said


@each_rule
def test_the_example_rewritten_is_left_alone(rule: Rule) -> None:
    first = run_example(rule)
    text = first.files[0].after.decode()
    second = run({"train.py": text}, only=rule.code, to=first.target)
    assert second.files[0].after.decode() == text
    assert len(second.manual) <= len(first.manual)


@each_rule
def test_a_program_without_the_pattern_has_no_finding(rule: Rule) -> None:
    plain = "import torch\nx = torch.zeros(1, requires_grad=True)\n(x * 2).sum().backward()\n"
    edited = [f for f in findings(plain, rule.code) if rule.code != "MG101"]
    assert edited == []


@each_rule
def test_there_is_a_test_file_for_it(rule: Rule) -> None:
    name = type(rule).__module__.rpartition(".")[2]
    assert (REPO / "tests" / "migrate" / "rules" / f"test_{name}.py").is_file()
