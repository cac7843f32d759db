"""Errors in a training step that are caught."""

from __future__ import annotations

from rewriting import findings


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG803", to)]


def step(handler: str, *lines: str) -> str:
    body = "".join(f"        {line}\n" for line in lines)
    return f"""
for x in loader:
    try:
        model(x).sum().backward()
    {handler}
{body}"""


def test_broad_handlers_are_reported() -> None:
    for kind in ("", " Exception", " RuntimeError as e", " (ValueError, RuntimeError)",
                 " BaseException", " torch.cuda.OutOfMemoryError"):  # fmt: skip
        assert len(said(step(f"except{kind}:", "continue"))) == 1, kind


def test_handlers_that_end_the_process_are_fine() -> None:
    for last in ("raise", "raise RuntimeError('x') from e", "exit(1)"):
        assert said(step("except Exception as e:", "print(e)", last)) == [], last


def test_handlers_that_raise_in_every_branch_are_fine() -> None:
    code = step("except RuntimeError as e:", "if 'memory' in str(e):", "    raise OSError", "else:",
                "    raise")  # fmt: skip
    assert said(code) == []


def test_out_of_memory_handlers_that_raise_other_errors_are_reported() -> None:
    code = step("except RuntimeError as e:", "if 'out of memory' in str(e):", "    continue",
                "else:", "    raise e")  # fmt: skip
    assert len(said(code)) == 1


def test_narrow_handlers_are_fine() -> None:
    for kind in ("KeyboardInterrupt", "StopIteration", "(KeyError, StopIteration)"):
        assert said(step(f"except {kind}:", "break")) == [], kind


def test_only_the_step_counts() -> None:
    assert (
        said("""
for i in range(3):
    try:
        x = next(it)
    except:
        it = iter(loader)
        x = next(it)
    model(x).sum().backward()
""")
        == []
    )


def test_a_step_in_a_function_counts() -> None:
    assert (
        len(
            said("""
def step(x):
    model(x).sum().backward()
for x in loader:
    try:
        step(x)
    except Exception: pass
""")
        )
        == 1
    )


def test_a_handler_round_the_whole_training_leaves_the_others_waiting() -> None:
    message = said("""
def main():
    for x in loader:
        model(x).sum().backward()
try:
    main()
except Exception as error:
    print(error)
""")
    assert message == [
        "a process that catches Exception here ends its training, and the others wait"
    ]
