"""The copy engine: the one place that moves tensor bytes.

Every record is read once, in order, in blocks of a fixed size; each block is checksummed, cast if
need be, and its parts written where they belong. Memory is a constant: two blocks per worker,
whatever the size of the model. Boxes that would be many short runs, and tensors that are not
row-major in their file, go through memory-mapped files instead, which are not anonymous memory.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import Any

from ckpt.dtypes import DType
from ckpt.errors import CorruptCheckpoint, Unsupported
from ckpt.model import Record
from ckpt.moves import Move, Run, run_numel, runs_of

__all__ = ["copy"]

BLOCK_BYTES = 1 << 20  # fits a core's cache between reading, checksumming and writing
SHORT_RUN_BYTES = 64 << 10  # below, one memory-mapped copy costs less than a write a run
BATCH_BYTES = 32 << 20
WORKERS = 2
MAX_OPEN = 128  # processes may often open no more than 256 or 1024 files

Progress = Callable[[int], None]


def copy(
    moves: Iterable[Move],
    progress: Progress | None = None,
    finished: Callable[[Record], None] | None = None,
) -> None:
    """Carry out the moves; the output files exist and have their full size.

    Args:
        progress: called with the bytes written since the last call, from any thread.
        finished: called with each record whose moves are all done, from any thread.

    Raises:
        CorruptCheckpoint: a source ends early, or a record's bytes do not have its checksum.
        Unsupported: a number does not fit the dtype that was asked for.
        OSError: the output cannot be written.
    """
    by_record: dict[Record, list[Move]] = defaultdict(list)
    for move in moves:
        by_record[move.record].append(move)
    engine = _Engine(progress or (lambda _nbytes: None), finished or (lambda _record: None))
    try:
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="copy") as pool:
            jobs = [pool.submit(engine.copy_batch, batch) for batch in _batches(by_record)]
            engine.wait(jobs)
    finally:
        engine.outputs.close()


Batch = list[tuple[Record, list[Move]]]


def _batches(by_record: Mapping[Record, list[Move]]) -> list[Batch]:
    """Records with their moves, small ones of one file together; the largest batches first."""
    batches: list[Batch] = []
    size = 0
    for record in sorted(by_record, key=lambda r: (r.path, r.offset)):
        same_file = batches and batches[-1][-1][0].path == record.path
        if not same_file or size + record.length > BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append((record, by_record[record]))
        size += record.length
    return sorted(batches, key=lambda batch: -sum(record.length for record, _ in batch))


class _Outputs:
    """Descriptors of the output files, shared by the workers; positioned writes only.

    Of a checkpoint in thousands of files only MAX_OPEN are open at a time, those used last.
    """

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._users: Counter[str] = Counter()
        self._lock = Lock()

    @contextmanager
    def descriptor(self, path: str) -> Iterator[int]:
        """The descriptor of an output file, for reading and writing, open for as long as used."""
        with self._lock:
            opened = self._open.pop(path, None)
            descriptor = os.open(path, os.O_RDWR) if opened is None else opened
            self._open[path] = descriptor
            self._users[path] += 1
            self._close_unused()
        try:
            yield descriptor
        finally:
            with self._lock:
                self._users[path] -= 1

    def _close_unused(self) -> None:
        excess = len(self._open) - MAX_OPEN
        if excess <= 0:
            return
        unused = [path for path in self._open if not self._users[path]]
        for path in unused[:excess]:
            os.close(self._open.pop(path))
            del self._users[path]

    def close(self) -> None:
        """Close them all."""
        for descriptor in self._open.values():
            os.close(descriptor)


class _Engine:
    """What the workers of one call of `copy` share."""

    def __init__(self, progress: Progress, finished: Callable[[Record], None]) -> None:
        self.progress, self.finished = progress, finished
        self.outputs, self.cancelled = _Outputs(), Event()

    def wait(self, jobs: Sequence[Future[None]]) -> None:
        """Until all are done, or the first fails, or the user interrupts."""
        try:
            done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            for job in done:
                job.result()
        except BaseException:
            self.cancelled.set()
            for job in jobs:
                job.cancel()
            raise

    def copy_batch(self, batch: Batch) -> None:
        """Carry out the moves out of some records of one file."""
        with Path(batch[0][0].path).open("rb", buffering=0) as stream:
            for record, moves in batch:
                if self.cancelled.is_set():
                    return
                self._copy_record(stream.fileno(), record, moves)
                if not self.cancelled.is_set():
                    self.finished(record)

    def _copy_record(self, source: int, record: Record, moves: Sequence[Move]) -> None:
        streamed: list[tuple[Run, Move]] = []
        for move in moves:
            if run_numel(move) * move.dtype.itemsize < SHORT_RUN_BYTES < move.nbytes:
                with self.outputs.descriptor(move.path) as target:
                    _copy_strided(source, target, move)
                self.progress(move.nbytes)
            else:
                streamed += [(run, move) for run in runs_of(move)]
        if streamed or record.crc32 is not None:
            self._stream(source, record, streamed)

    def _stream(self, source: int, record: Record, runs: list[tuple[Run, Move]]) -> None:
        """Read the record block by block and write each run's part; check the checksum."""
        runs.sort(key=lambda item: item[0].start * item[1].dtype.itemsize)
        buffer = memoryview(bytearray(min(BLOCK_BYTES, max(record.length, 1))))
        crc, first = 0, 0
        for begin in range(0, record.length, BLOCK_BYTES):
            if self.cancelled.is_set():
                return
            end = min(begin + BLOCK_BYTES, record.length)
            while first < len(runs) and _end(*runs[first]) <= begin:
                first += 1
            if record.crc32 is None and (first == len(runs) or _begin(*runs[first]) >= end):
                continue
            block = buffer[: end - begin]
            _read(source, block, record, begin)
            if record.crc32 is not None:
                crc = zlib.crc32(block, crc)
            written, at = 0, first
            while at < len(runs) and _begin(*runs[at]) < end:
                written += _write_part(self.outputs, block, begin, end, *runs[at])
                at += 1
            self.progress(written)
        if record.crc32 is not None and crc != record.crc32:
            raise CorruptCheckpoint(
                f"{record.path}: the bytes from {record.offset} to "
                f"{record.offset + record.length} do not have the checksum that was saved with "
                "them; the file is damaged. Copy it again from the machine that wrote it, or use "
                "an earlier save."
            )


def _begin(run: Run, move: Move) -> int:
    return run.start * move.dtype.itemsize


def _end(run: Run, move: Move) -> int:
    return (run.start + run.numel) * move.dtype.itemsize


def _read(source: int, block: memoryview, record: Record, begin: int) -> None:
    filled = 0
    while filled < len(block):
        count = _read_into(source, block[filled:], record.offset + begin + filled)
        if not count:
            raise CorruptCheckpoint(f"{record.path}: ends before its tensors do; truncated")
        filled += count


def _read_into(source: int, block: memoryview, offset: int) -> int:
    """Fill a block from a file; the bytes read."""
    if hasattr(os, "preadv"):
        return os.preadv(source, [block], offset)
    data = os.pread(source, len(block), offset)  # macOS has no preadv in Python
    block[: len(data)] = data
    return len(data)


def _write_part(
    outputs: _Outputs, block: memoryview, begin: int, end: int, run: Run, move: Move
) -> int:
    """Write what the block [begin, end) holds of a run; the bytes written."""
    start, stop = max(_begin(run, move), begin), min(_end(run, move), end)
    if start >= stop:
        return 0
    data: Any = block[start - begin : stop - begin]
    if move.out_dtype is not move.dtype:
        data = _cast(data, move)
    element = run.out_start + (start - _begin(run, move)) // move.dtype.itemsize
    position = move.base + element * move.out_dtype.itemsize
    size, done = len(data), 0
    with outputs.descriptor(move.path) as target:
        while done < size:
            done += os.pwrite(target, data[done:], position + done)
    return size


def _cast(data: memoryview, move: Move) -> memoryview:
    """The elements in another dtype, rounded as torch does."""
    import torch

    before, after = (getattr(torch, d.torch_name) for d in (move.dtype, move.out_dtype))
    out = bytearray(len(data) // move.dtype.itemsize * move.out_dtype.itemsize)
    source, cast = torch.frombuffer(data, dtype=before), torch.frombuffer(out, dtype=after)
    cast.copy_(source)
    _refuse_overflow(source, cast, move)
    return memoryview(out)


def _refuse_overflow(before: Any, after: Any, move: Move) -> None:
    """Raises Unsupported when a number became infinite, as those above 65504 do in fp16."""
    if move.out_dtype is DType.float16 and int(after.isinf().sum()) > int(before.isinf().sum()):
        raise Unsupported(
            f"{move.record.path}: a weight is too large for fp16, whose largest number is 65504; "
            "use --dtype bf16 or fp32"
        )


def _copy_strided(source: int, target: int, move: Move) -> None:
    """Move a box element by element through memory-mapped files."""
    view = _mapped(source, move.record.offset, move.start, move.strides, move, writable=False)
    out = _mapped(target, move.base, move.out_start, move.out_strides, move, writable=True)
    out.copy_(view)
    _refuse_overflow(view, out, move)


def _mapped(
    descriptor: int,
    base: int,
    start: int,
    strides: tuple[int, ...],
    move: Move,
    *,
    writable: bool,
) -> Any:
    """A torch view of a box inside a memory-mapped file."""
    import torch

    dtype = move.out_dtype if writable else move.dtype
    begin = base + start * dtype.itemsize
    extent = 1 + sum((n - 1) * s for n, s in zip(move.sizes, strides, strict=True))
    aligned = begin - begin % mmap.ALLOCATIONGRANULARITY
    length = begin - aligned + extent * dtype.itemsize
    if os.fstat(descriptor).st_size < aligned + length:
        raise CorruptCheckpoint(f"{move.record.path}: ends before its tensors do; truncated")
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
    mapped = mmap.mmap(descriptor, length, access=access, offset=aligned)
    flat = torch.frombuffer(
        mapped,
        dtype=getattr(torch, dtype.torch_name),
        count=extent,
        offset=begin - aligned,
    )
    return flat.as_strided(move.sizes, strides)
