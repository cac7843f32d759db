"""The copy engine, compared with what torch itself makes of the same elements."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from pathlib import Path
from threading import Lock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import copying
from ckpt.chunks import Chunk
from ckpt.copying import copy
from ckpt.dtypes import DType
from ckpt.errors import CkptError, CorruptCheckpoint, Unsupported
from ckpt.model import Record, StoredChunk, StoredTensor
from ckpt.moves import moves_of
from ckpt.plan import OutTensor, Placement

Shape = tuple[int, ...]
GAP = b"\xee"


def torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.torch_name)
    assert isinstance(found, torch.dtype)
    return found


def random_tensor(dtype: DType, shape: Shape, seed: int = 0) -> torch.Tensor:
    """Random bits, or random 0 and 1 for bool."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype is DType.bool else 256
    data = torch.randint(0, most, (prod(shape) * dtype.itemsize,), generator=generator)
    return data.to(torch.uint8).view(torch_dtype(dtype)).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return bytes(flat.view(torch.uint8).numpy())


@dataclass
class Disk:
    """Source files with gaps between their records, and one output file."""

    folder: Path

    def store(self, data: bytes, *, gap: int = 0, has_crc: bool = True, name: str = "s") -> Record:
        """The data as a record at the end of a source file."""
        path = self.folder / name
        with path.open("ab") as stream:
            stream.write(GAP * gap)
            offset = stream.tell()
            stream.write(data)
        return Record(str(path), offset, len(data), zlib.crc32(data) if has_crc else None)

    def put(self, tensor: torch.Tensor, **options: int) -> StoredTensor:
        """A whole tensor in one record, row-major."""
        shape = tuple(tensor.shape)
        record = self.store(bits(tensor), **options)
        dtype = DType.from_torch_name(str(tensor.dtype))
        assert dtype is not None
        return StoredTensor(dtype, shape, (StoredChunk(Chunk.whole(shape), record),))

    def copied(self, *tensors: OutTensor, gap: int = 0) -> list[bytes]:
        """The bytes that arrive for each tensor, after checking that the gaps stay untouched."""
        path, placements, at = self.folder / "out", [], gap
        for tensor in tensors:
            placements.append(Placement(at, tensor))
            at += tensor.nbytes + gap
        path.write_bytes(GAP * at)
        copy(moves_of(str(path), placements))
        data = path.read_bytes()
        assert len(data) == at
        assert all(
            data[p.offset - gap : p.offset] == GAP * gap for p in placements
        ) and data.endswith(GAP * gap)
        return [data[p.offset : p.offset + p.tensor.nbytes] for p in placements]


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 48 bytes, and no run so short that it would go through a memory map."""
    monkeypatch.setattr(copying, "BLOCK_BYTES", 48)
    monkeypatch.setattr(copying, "SHORT_RUN_BYTES", 0)


@pytest.fixture
def all_strided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every box of more than a byte goes through the memory maps."""
    monkeypatch.setattr(copying, "run_numel", lambda move: 0)
    monkeypatch.setattr(copying, "SHORT_RUN_BYTES", 1)


# --- nothing, and as it is ----------------------------------------------------------------------


def test_no_moves_copy_nothing() -> None:
    copy([])


def test_a_tensor_without_elements_leaves_the_output_alone(disk: Disk) -> None:
    assert disk.copied(OutTensor.of(disk.put(torch.zeros(0, 3))), gap=8) == [b""]


def test_the_source_stays_as_it_is(disk: Disk) -> None:
    tensor = disk.put(random_tensor(DType.float32, (8, 8)))
    before = (disk.folder / "s").read_bytes()
    disk.copied(OutTensor.of(tensor, DType.bfloat16))
    assert (disk.folder / "s").read_bytes() == before


@pytest.mark.parametrize("dtype", list(DType))
def test_a_tensor_of_every_dtype_arrives_with_all_its_bits(dtype: DType, disk: Disk) -> None:
    tensor = random_tensor(dtype, (5, 7))
    assert disk.copied(OutTensor.of(disk.put(tensor)), gap=3) == [bits(tensor)]


@pytest.mark.usefixtures("all_strided")
@pytest.mark.parametrize("dtype", list(DType))
def test_a_strided_tensor_of_every_dtype_arrives_with_all_its_bits(
    dtype: DType, disk: Disk
) -> None:
    tensor = random_tensor(dtype, (5, 7))
    stored = disk.put(tensor)
    chunk = replace(stored.chunks[0], chunk=Chunk.whole((7, 5)), strides=(1, 7))
    turned = StoredTensor(dtype, (7, 5), (chunk,))
    assert disk.copied(OutTensor.of(turned), gap=16) == [bits(tensor.reshape(5, 7).T)]


def test_not_a_number_keeps_its_payload(disk: Disk) -> None:
    tensor = torch.tensor([0x7FC12345, 0x7F812345], dtype=torch.int32).view(torch.float32)
    assert disk.copied(OutTensor.of(disk.put(tensor))) == [bits(tensor)]


def test_several_tensors_arrive_in_their_places(disk: Disk) -> None:
    tensors = [random_tensor(DType.float32, (3, n), seed=n) for n in range(1, 6)]
    found = disk.copied(*(OutTensor.of(disk.put(tensor)) for tensor in tensors), gap=5)
    assert found == [bits(tensor) for tensor in tensors]


def test_two_tensors_may_share_a_record(disk: Disk) -> None:
    tensor = random_tensor(DType.float32, (4, 6))
    stored = disk.put(tensor)
    half = StoredTensor(
        DType.float32, (2, 6), (replace(stored.chunks[0], chunk=Chunk.whole((2, 6)), start=12),)
    )
    assert disk.copied(OutTensor.of(stored), OutTensor.of(half)) == [
        bits(tensor),
        bits(tensor[2:]),
    ]


def test_one_tensor_may_go_to_two_places_in_two_dtypes(disk: Disk) -> None:
    tensor = torch.randn(4, 6)
    stored = disk.put(tensor)
    found = disk.copied(OutTensor.of(stored), OutTensor.of(stored, DType.bfloat16))
    assert found == [bits(tensor), bits(tensor.bfloat16())]


# --- block borders ------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("numel", [11, 12, 13, 23, 24, 25, 100])
def test_a_run_over_block_borders_arrives_whole(numel: int, disk: Disk) -> None:
    tensor = random_tensor(DType.float32, (numel,))
    assert disk.copied(OutTensor.of(disk.put(tensor, gap=5)), gap=7) == [bits(tensor)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("start", [0, 1, 11, 12, 13])
def test_a_cast_run_that_begins_anywhere_in_a_block_arrives_whole(start: int, disk: Disk) -> None:
    tensor = torch.randn(60)
    stored = disk.put(tensor)
    box = Chunk((start,), (40,))
    found = disk.copied(OutTensor(stored, DType.bfloat16, box))
    assert found == [bits(tensor[start : start + 40].bfloat16())]


@pytest.mark.usefixtures("small_blocks")
def test_long_and_short_runs_of_one_record_that_overlap_arrive_whole(disk: Disk) -> None:
    tensor = random_tensor(DType.float32, (100,))
    stored = disk.put(tensor)
    boxes = [(0, 100), (1, 2), (3, 90), (14, 1), (50, 50), (99, 1), (0, 1)]
    found = disk.copied(
        *(OutTensor(stored, DType.float32, Chunk((start,), (size,))) for start, size in boxes)
    )
    assert found == [bits(tensor[start : start + size]) for start, size in boxes]


# --- casts --------------------------------------------------------------------------------------

ROUNDED = [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 2**-9, 65504.0, 65519.9, 65520.0, 1e-8, 6e-8, 3.4e38]
ODD = [float("inf"), -float("inf"), float("nan"), 1 / 3, -2 / 3]
HARD_VALUES = torch.tensor([*ROUNDED, *ODD])
TOO_LARGE_FOR_FP16 = (HARD_VALUES.abs() >= 65520) & HARD_VALUES.isfinite()


def hard_values(target: DType) -> torch.Tensor:
    return HARD_VALUES[~TOO_LARGE_FOR_FP16] if target is DType.float16 else HARD_VALUES


@pytest.mark.parametrize("number", [65520.0, -1e6])
@pytest.mark.parametrize("shape", [(4, 3), (3, 4)])
def test_a_number_that_fp16_cannot_hold_is_refused(
    number: float, shape: tuple[int, int], disk: Disk
) -> None:
    tensor = torch.ones(4, 3)
    tensor[2, 1] = number
    stored = disk.put(tensor if shape == (4, 3) else tensor.t())
    with pytest.raises(Unsupported, match="65504"):
        disk.copied(OutTensor.of(stored, DType.float16))


@pytest.mark.parametrize("target", [DType.bfloat16, DType.float16, DType.float64])
def test_a_cast_rounds_as_torch_does(target: DType, disk: Disk) -> None:
    tensor = torch.cat([hard_values(target), torch.randn(5000)])
    found = disk.copied(OutTensor.of(disk.put(tensor), target))
    assert found == [bits(tensor.to(torch_dtype(target)))]


@pytest.mark.usefixtures("all_strided")
@pytest.mark.parametrize("target", [DType.bfloat16, DType.float16, DType.float64])
def test_a_strided_cast_rounds_as_torch_does(target: DType, disk: Disk) -> None:
    values = hard_values(target)
    tensor = torch.cat([values, torch.randn(100 - len(values))]).reshape(10, 10)
    box = Chunk((0, 3), (10, 4))
    found = disk.copied(OutTensor(disk.put(tensor), target, box))
    assert found == [bits(tensor[:, 3:7].to(torch_dtype(target)))]


@pytest.mark.parametrize("before", [DType.bfloat16, DType.float16, DType.float64])
def test_a_cast_to_fp32_is_that_of_torch(before: DType, disk: Disk) -> None:
    tensor = torch.cat([HARD_VALUES, torch.randn(100)]).to(torch_dtype(before))
    found = disk.copied(OutTensor.of(disk.put(tensor), DType.float32))
    assert found == [bits(tensor.float())]


# --- strides and short runs ---------------------------------------------------------------------


def test_a_large_tensor_of_tiny_runs_in_unaligned_records_arrives_whole(disk: Disk) -> None:
    tensor = random_tensor(DType.bfloat16, (700, 6))
    chunks = tuple(
        StoredChunk(
            Chunk((0, column), (700, 2)),
            disk.store(bits(tensor[:, column : column + 2]), gap=1, has_crc=False),
        )
        for column in (0, 2, 4)
    )
    stored = StoredTensor(DType.bfloat16, (700, 6), chunks)
    assert disk.copied(OutTensor.of(stored), gap=3) == [bits(tensor)]


def test_a_large_expanded_tensor_arrives_whole(disk: Disk) -> None:
    row = random_tensor(DType.float32, (1, 1200))
    stored = disk.put(row)
    tall = StoredTensor(
        DType.float32,
        (1200, 3),
        (replace(stored.chunks[0], chunk=Chunk.whole((1200, 3)), strides=(1, 0)),),
    )
    assert disk.copied(OutTensor.of(tall)) == [bits(row.reshape(1200, 1).expand(1200, 3))]


# --- random tensors -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A tensor, the grid and layout it is stored in, and what is wanted of it."""

    dtype: DType
    shape: Shape
    edges: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[int, ...], ...]
    gaps: tuple[int, ...]
    boxes: tuple[Chunk, ...]
    has_crc: bool
    shares_file: bool
    block: int
    short: int
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    edges = tuple(
        tuple(sorted([0, size, *draw(st.lists(st.integers(0, size), max_size=2))]))
        for size in shape
    )
    order = st.permutations(range(len(shape))).map(tuple)
    offsets = st.tuples(*(st.integers(0, size) for size in shape))
    boxes = [
        Chunk(at, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, at, strict=True)))
        for at in draw(st.lists(offsets, max_size=2))
    ]
    return Case(
        draw(st.sampled_from(list(DType))),
        shape,
        edges,
        tuple(draw(st.lists(order, min_size=3, max_size=3))),
        tuple(draw(st.lists(st.integers(0, 5), min_size=3, max_size=3))),
        (Chunk.whole(shape), *boxes),
        draw(st.booleans()),
        draw(st.booleans()),
        16 * draw(st.integers(1, 8)),
        draw(st.sampled_from([0, 4, 16, 64])),
        draw(st.integers(0, 99)),
    )


def cells(edges: Sequence[Sequence[int]]) -> Iterator[Chunk]:
    spans = [list(pairwise(edge)) for edge in edges]
    for cell in product(*spans):
        yield Chunk(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))


def region(chunk: Chunk) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))


def stored_in_boxes(disk: Disk, case: Case, tensor: torch.Tensor) -> StoredTensor:
    """The tensor in records, each a box with its dimensions in some order, behind some elements."""
    stored = []
    for number, chunk in enumerate(cells(case.edges)):
        order, gap = case.orders[number % 3], case.gaps[number % 3]
        turned = tensor[region(chunk)].permute(order).contiguous()
        strides = tuple(turned.stride(order.index(dim)) for dim in range(tensor.ndim))
        lead = random_tensor(case.dtype, (gap,))
        name = "s" if case.shares_file else f"s{number}"
        record = disk.store(bits(lead) + bits(turned), gap=gap, has_crc=case.has_crc, name=name)
        stored.append(StoredChunk(chunk, record, gap, strides))
    return StoredTensor(case.dtype, case.shape, tuple(stored))


@given(cases())
@settings(max_examples=120, deadline=None)
def test_boxes_of_a_tensor_in_boxes_of_any_layout_arrive_as_torch_slices_them(case: Case) -> None:
    tensor = random_tensor(case.dtype, case.shape, case.seed)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BLOCK_BYTES", case.block)
        patch.setattr(copying, "SHORT_RUN_BYTES", case.short)
        disk = Disk(Path(folder))
        stored = stored_in_boxes(disk, case, tensor)
        outs = [OutTensor(stored, case.dtype, box) for box in case.boxes]
        found = disk.copied(*outs, gap=case.gaps[0])
    assert found == [bits(tensor[region(box)]) for box in case.boxes]


@given(cases(), st.sampled_from([DType.bfloat16, DType.float16]))
@settings(max_examples=60, deadline=None)
def test_boxes_of_an_fp32_tensor_arrive_cast_as_torch_casts_them(case: Case, to: DType) -> None:
    case = replace(case, dtype=DType.float32)
    tensor = torch.randn(case.shape)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BLOCK_BYTES", case.block)
        patch.setattr(copying, "SHORT_RUN_BYTES", case.short)
        disk = Disk(Path(folder))
        stored = stored_in_boxes(disk, case, tensor)
        found = disk.copied(*(OutTensor(stored, to, box) for box in case.boxes))
    assert found == [bits(tensor[region(box)].to(torch_dtype(to))) for box in case.boxes]


# --- damage -------------------------------------------------------------------------------------


def damaged(tensor: StoredTensor) -> StoredTensor:
    """The tensor after one bit of its file has flipped."""
    record = tensor.chunks[0].record
    path = Path(record.path)
    data = bytearray(path.read_bytes())
    data[record.offset + record.length // 2] ^= 1
    path.write_bytes(data)
    return tensor


def cut_short(tensor: StoredTensor, by: int = 1) -> StoredTensor:
    """The tensor after its file has lost its last bytes."""
    path = Path(tensor.chunks[0].record.path)
    path.write_bytes(path.read_bytes()[:-by])
    return tensor


def test_a_flipped_bit_is_refused_where_there_is_a_checksum(disk: Disk) -> None:
    tensor = damaged(disk.put(torch.randn(1000)))
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        disk.copied(OutTensor.of(tensor))


def test_a_flipped_bit_outside_of_the_wanted_box_is_refused_too(disk: Disk) -> None:
    tensor = damaged(disk.put(torch.randn(1000)))
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        disk.copied(OutTensor(tensor, DType.float32, Chunk((0,), (10,))))


@pytest.mark.usefixtures("all_strided")
def test_a_flipped_bit_in_a_strided_tensor_is_refused(disk: Disk) -> None:
    tensor = damaged(disk.put(torch.randn(40, 40)))
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        disk.copied(OutTensor(tensor, DType.float32, Chunk((0, 0), (40, 1))))


def test_a_truncated_source_is_refused_with_the_file(disk: Disk) -> None:
    tensor = cut_short(disk.put(torch.randn(1000), has_crc=False))
    with pytest.raises(CorruptCheckpoint, match=r"/s: ends before"):
        disk.copied(OutTensor.of(tensor))


def test_a_source_that_is_truncated_before_the_tensor_is_refused(disk: Disk) -> None:
    tensor = cut_short(disk.put(torch.randn(1000), gap=4000, has_crc=False), by=6000)
    with pytest.raises(CorruptCheckpoint, match="ends before"):
        disk.copied(OutTensor.of(tensor))


@pytest.mark.usefixtures("all_strided")
@pytest.mark.parametrize("by", [1, 5000, 6400])
def test_a_truncated_source_of_a_strided_tensor_is_refused(by: int, disk: Disk) -> None:
    tensor = cut_short(disk.put(torch.randn(40, 40), has_crc=False), by=by)
    with pytest.raises(CorruptCheckpoint, match="ends before"):
        disk.copied(OutTensor(tensor, DType.float32, Chunk((0, 1), (40, 39))))


def test_a_missing_piece_is_refused(disk: Disk) -> None:
    piece = StoredChunk(Chunk((0,), (2,)), disk.store(b"12345678"))
    with pytest.raises(CorruptCheckpoint, match="2 of 3 elements"):
        disk.copied(OutTensor.of(StoredTensor(DType.float32, (3,), (piece,))))


def test_a_source_that_is_gone_is_refused(disk: Disk) -> None:
    tensor = disk.put(torch.randn(10))
    (disk.folder / "s").unlink()
    with pytest.raises((CkptError, FileNotFoundError)):
        disk.copied(OutTensor.of(tensor))


# --- telling ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
def test_progress_adds_up_to_the_bytes_written(disk: Disk) -> None:
    out = OutTensor.of(disk.put(torch.randn(100, 3)), DType.bfloat16)
    path = disk.folder / "out"
    path.write_bytes(bytes(out.nbytes))
    told: list[int] = []
    copy(moves_of(str(path), [Placement(0, out)]), told.append)
    assert sum(told) == out.nbytes
    assert len(told) > 1


def test_every_record_is_reported_once_when_it_is_done(disk: Disk) -> None:
    tensors = [disk.put(torch.randn(10)) for _ in range(5)]
    path = disk.folder / "out"
    path.write_bytes(bytes(5 * 40))
    placements = [Placement(40 * at, OutTensor.of(tensor)) for at, tensor in enumerate(tensors)]
    done: list[Record] = []
    copy(moves_of(str(path), placements), finished=done.append)
    assert sorted(done, key=lambda r: r.offset) == [tensor.chunks[0].record for tensor in tensors]


def test_a_damaged_record_is_not_reported_as_done(disk: Disk) -> None:
    out = OutTensor.of(damaged(disk.put(torch.randn(1000))))
    path = disk.folder / "out"
    path.write_bytes(bytes(out.nbytes))
    done: list[Record] = []
    with pytest.raises(CorruptCheckpoint):
        copy(moves_of(str(path), [Placement(0, out)]), finished=done.append)
    assert done == []


def test_an_error_in_progress_stops_the_copy(disk: Disk) -> None:
    tensors = [disk.put(torch.randn(10)) for _ in range(50)]
    path = disk.folder / "out"
    path.write_bytes(bytes(50 * 40))
    placements = [Placement(40 * at, OutTensor.of(tensor)) for at, tensor in enumerate(tensors)]
    done, lock = list[Record](), Lock()

    def fail(_nbytes: int) -> None:
        with lock:
            raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError, match="terminal"):
        copy(moves_of(str(path), placements), fail, done.append)
    assert done == []
