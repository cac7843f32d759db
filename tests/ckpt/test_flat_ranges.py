"""Ranges of flattened tensors: runs that are followed, boxes that are cut, gaps that stay zero."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.chunks import Chunk
from ckpt.copying import copy
from ckpt.dtypes import DType
from ckpt.flat_ranges import FlatRange, FlatSource, flat_tensor
from ckpt.model import Record, StoredChunk, StoredTensor
from ckpt.moves import moves_of
from ckpt.plan import FlatTensor
from ckpt.storage import torch_file


def stored(path: Path, tensor: torch.Tensor) -> StoredTensor:
    """The tensor's bytes in a file of their own, row-major."""
    path.write_bytes(tensor.contiguous().numpy().tobytes())
    record = Record(str(path), 0, path.stat().st_size)
    whole = Chunk.whole(tuple(tensor.shape))
    return StoredTensor(DType.float32, tuple(tensor.shape), (StoredChunk(whole, record),))


def in_columns(path: Path, tensor: torch.Tensor) -> StoredTensor:
    """A matrix in two halves of its columns, as a tensor-parallel rank keeps them."""
    half, (rows, columns) = tensor.shape[1] // 2, tensor.shape
    parts = [tensor[:, :half].contiguous(), tensor[:, half:].contiguous()]
    path.write_bytes(b"".join(part.numpy().tobytes() for part in parts))
    chunks, at = [], 0
    for begin, part in zip((0, half), parts, strict=True):
        box = Chunk((0, begin), (rows, part.shape[1]))
        chunks.append(StoredChunk(box, Record(str(path), at, part.numel() * 4)))
        at += part.numel() * 4
    return StoredTensor(DType.float32, (rows, columns), tuple(chunks))


def written(flat: FlatTensor, path: Path) -> torch.Tensor:
    """The flat tensor through a torch file and the copy engine."""
    with path.open("w+b") as stream:
        layout = torch_file.lay_out(stream, {"flat": flat})
    copy(moves_of(str(path), layout.placements))
    found: torch.Tensor = torch.load(path, weights_only=True)["flat"]
    return found


def test_what_no_piece_covers_is_zero(tmp_path: Path) -> None:
    source = FlatSource(stored(tmp_path / "a", torch.arange(6.0).reshape(2, 3)))
    flat = flat_tensor(DType.float32, 8, [FlatRange(2, source, 1, 5)])
    assert written(flat, tmp_path / "out.pt").tolist() == [0, 0, 1, 2, 3, 4, 0, 0]


def test_a_tensor_without_elements_has_no_pieces(tmp_path: Path) -> None:
    assert written(flat_tensor(DType.float32, 0, []), tmp_path / "out.pt").shape == (0,)


def test_one_piece_follows_runs_that_lie_side_by_side(tmp_path: Path) -> None:
    tensor = stored(tmp_path / "a", torch.arange(12.0).reshape(4, 3))
    record = tensor.chunks[0].record
    rows = tuple(StoredChunk(Chunk((row, 0), (1, 3)), record, row * 3) for row in range(4))
    source = FlatSource(StoredTensor(DType.float32, (4, 3), rows))
    (at, piece), *others = source.pieces(1, 11, DType.float32)
    assert (at, others, len(piece.source.chunks)) == (0, [], 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flat_tensors_hold_what_torch_concatenates(
    tmp_path_factory: object, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("flat")  # type: ignore[attr-defined]
    ranges, wanted, at = [], [], 0
    for number in range(data.draw(st.integers(1, 4))):
        shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=2)))
        tensor = torch.randn(shape)
        keep = in_columns if data.draw(st.booleans()) and shape[1] > 1 else stored
        source = FlatSource(keep(folder / str(number), tensor))
        start = data.draw(st.integers(0, tensor.numel()))
        stop = data.draw(st.integers(start, tensor.numel()))
        gap = data.draw(st.integers(0, 3))
        ranges.append(FlatRange(at + gap, source, start, stop))
        wanted += [torch.zeros(gap), tensor.flatten()[start:stop]]
        at += gap + stop - start
    flat = flat_tensor(DType.float32, at + 2, ranges)
    expected = torch.cat([*wanted, torch.zeros(2)])
    assert torch.equal(written(flat, folder / "out.pt"), expected)
