"""python …/runner/compare.py BEFORE AFTER NAME… : compares weights and files of two runs, as JSON.

BEFORE and AFTER are each `record folder:working folder`, NAME are files that both wrote with
torch.save. Files are read with `weights_only=True`: nothing in them is executed.
"""

from __future__ import annotations

import json
import math
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder has modules with common names

import torch

IGNORED = re.compile(r"time|date|elapsed|seconds|hours|duration|speed|throughput|memory|rng", re.I)
"""Names of values that are other ones in every run."""
RELATIVE = 1e-3
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickle of torch's magic number
MISSING = object()


def main() -> None:
    """Print the result."""
    before, after, *names = sys.argv[1:]
    (one, one_cwd), (other, other_cwd) = (text.split(":") for text in (before, after))
    result = weights(assembled(Path(one)), assembled(Path(other)))
    files = [file(name, Path(one_cwd) / name, Path(other_cwd) / name) for name in names]
    sys.stdout.write(json.dumps({**result, "files": [item for item in files if item]}))


def assembled(record: Path) -> list[list[torch.Tensor]]:
    """Every optimizer's parameters, put together from what each process held."""
    ranks = [torch.load(path) for path in sorted(record.glob("rank*.pt"))]
    return [
        [_whole([rank[k][n] for rank in ranks]) for n in range(len(params))]
        for k, params in enumerate(ranks[0])
    ] if ranks else []  # fmt: skip


def _whole(pieces: list[dict[str, Any]]) -> torch.Tensor:
    whole = torch.empty(pieces[0]["shape"], dtype=pieces[0]["part"].dtype)
    for piece in pieces:
        place = tuple(
            slice(start, start + size)
            for start, size in zip(piece["offset"], piece["part"].shape, strict=True)
        )
        if piece["part"].numel():
            whole[place] = piece["part"]
    return whole


def weights(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> dict[str, Any]:
    """The largest difference of a weight, and the largest magnitude in its tensor."""
    worst, scale, where = 0.0, 0.0, ""
    for k, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if [p.shape for p in mine] != [p.shape for p in theirs]:
            return {"difference": math.inf, "scale": 0.0, "where": f"optimizer {k + 1}: shapes"}
        for n, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            difference = distance(a, b)
            if difference > worst or math.isnan(difference):
                worst, scale = difference, float(a.double().abs().max())
                where = f"parameter {n + 1} of optimizer {k + 1}, shape {tuple(a.shape)}"
    return {"difference": worst, "scale": scale, "where": where}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of an element; places where both are NaN do not count."""
    if not one.numel():
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart = (one.to(wide) - other.to(wide)).abs()
    both = one.isnan() & other.isnan()
    return float(apart.masked_fill(both, 0.0).max())


def file(name: str, one: Path, other: Path) -> dict[str, Any] | None:
    """How the file of one run differs from the other's; None if it is none of torch.save's."""
    if not (is_saved_by_torch(one) and is_saved_by_torch(other)):
        return None
    try:
        mine, theirs = (torch.load(path, "cpu", weights_only=True) for path in (one, other))
    except Exception as error:  # of whatever kind: not read, and said so
        return {"path": name, "problem": "", "difference": 0.0, "unread": _reason(error)}
    worst = 0.0
    for path, a, b in pairs("", mine, theirs):
        problem = _problem(path, a, b)
        if problem:
            return {"path": name, "problem": problem, "difference": worst, "unread": ""}
        if isinstance(a, torch.Tensor) and a.dtype == b.dtype and not IGNORED.search(path):
            scale = max(1.0, float(a.double().abs().max()) if a.numel() else 0.0)
            worst = max(worst, distance(a, b) / scale)
    return {"path": name, "problem": "", "difference": worst, "unread": ""}


def is_saved_by_torch(path: Path) -> bool:
    """Whether it is a zip file with a pickle, or torch's format from before that."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    with path.open("rb") as stream:
        return stream.read(len(LEGACY)) == LEGACY


def _reason(error: Exception) -> str:
    found = re.search(r"(?:GLOBAL|Unsupported (?:class|global):?) ([\w.]+)", str(error))
    return f"holds {found.group(1)}" if found else str(error).splitlines()[0][:100]


def pairs(path: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Values at the same places, with `MISSING` where one has none."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in [*one, *(key for key in other if key not in one)]:
            inner = f"{path}[{key!r}]"
            yield from pairs(inner, one.get(key, MISSING), other.get(key, MISSING))
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield f"len({path or 'the list'})", len(one), len(other)
        for number, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from pairs(f"{path}[{number}]", a, b)
    else:
        yield path, one, other


def _problem(path: str, one: Any, other: Any) -> str:
    if one is MISSING or other is MISSING:
        return f"{path} is in the {'candidate' if one is MISSING else 'original'}'s file only"
    if IGNORED.search(path):
        return ""
    if isinstance(one, torch.Tensor) != isinstance(other, torch.Tensor):
        return f"{path} is a tensor in one of the two only"
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape:
            return f"{path} has the shape {tuple(one.shape)} before, {tuple(other.shape)} after"
        if one.dtype != other.dtype:
            return f"{path} is {one.dtype} before, {other.dtype} after"
        return ""
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    if numbers and not math.isclose(one, other, rel_tol=RELATIVE, abs_tol=RELATIVE):
        return f"{path} is {one:.6g} before, {other:.6g} after"
    return ""


if __name__ == "__main__":
    main()
