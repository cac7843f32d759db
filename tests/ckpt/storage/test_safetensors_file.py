"""safetensors files, against the safetensors library both ways."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt.copying import copy
from ckpt.dtypes import DType
from ckpt.errors import CorruptCheckpoint, Unsupported
from ckpt.model import StoredTensor
from ckpt.moves import moves_of
from ckpt.plan import OutTensor
from ckpt.storage.safetensors_file import SafetensorsFile, read
from ckpt.storage.torch_file import read as read_torch

DTYPES = [getattr(torch, dtype.torch_name) for dtype in DType if dtype.safetensors_code]


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    most = 2 if dtype is torch.bool else 256
    data = torch.randint(0, most, (torch.empty(shape, dtype=dtype).nbytes,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def stored_bits(tensor: StoredTensor) -> bytes:
    (stored,) = tensor.chunks
    record = stored.record
    return Path(record.path).read_bytes()[record.offset : record.offset + record.length]


def crafted(folder: Path, header: bytes | object, data: bytes = b"", length: int = -1) -> Path:
    """A file with this header, as bytes or as JSON, which need not be a valid one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length < 0 else length) + text + data)
    return path


def written(tensors: Mapping[str, torch.Tensor], folder: Path, metadata: Mapping[str, str]) -> Path:
    """A file laid out for tensors that torch saved, and filled by the copy engine."""
    torch.save(dict(tensors), folder / "source.pt")
    sources = read_torch(folder / "source.pt")
    outs = {name: OutTensor.of(tensor) for name, tensor in sources.items()}
    path = folder / "out.safetensors"
    with path.open("w+b") as stream:
        layout = SafetensorsFile("", outs, metadata).lay_out(stream)
    copy(moves_of(str(path), layout.placements))
    return path


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_every_dtype_is_found_where_it_lies(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = random_tensor(dtype, 3, 4)
    save_file({"w": tensor}, tmp_path / "x")
    found = read(tmp_path / "x")[0]["w"]
    assert (found.dtype.torch_name, found.shape) == (str(dtype).removeprefix("torch."), (3, 4))
    assert stored_bits(found) == bits(tensor)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 4, 5)])
def test_a_tensor_of_every_shape_is_found_where_it_lies(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = torch.randn(shape)
    save_file({"w": tensor}, tmp_path / "x")
    found = read(tmp_path / "x")[0]["w"]
    assert found.shape == shape
    assert stored_bits(found) == bits(tensor)


def test_all_tensors_of_a_file_are_found(tmp_path: Path) -> None:
    tensors = {f"layer.{at}": random_tensor(dtype, at, 2) for at, dtype in enumerate(DTYPES)}
    save_file(tensors, tmp_path / "x")
    found = read(tmp_path / "x")[0]
    assert {name: stored_bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }


def test_metadata_is_read(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "x", metadata={"format": "pt", "ü": "ö"})
    assert read(tmp_path / "x")[1] == {"format": "pt", "ü": "ö"}


def test_a_file_without_metadata_has_none(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "x")
    assert read(tmp_path / "x")[1] == {}


def test_a_file_without_tensors_has_none(tmp_path: Path) -> None:
    save_file({}, tmp_path / "x")
    assert read(tmp_path / "x") == ({}, {})


# --- refusing -----------------------------------------------------------------------------------

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def test_the_entry_that_is_damaged_below_is_read_while_it_is_whole(tmp_path: Path) -> None:
    assert read(crafted(tmp_path, {"w": ENTRY}, bytes(8)))[0]["w"].shape == (2,)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [3]},
        {"shape": None},
        {"shape": "ab"},
        {"shape": [-1, -2]},
        {"shape": [1e999]},
        {"data_offsets": [0, 7]},
        {"data_offsets": [4, 12]},
        {"data_offsets": [-4, 4]},
        {"data_offsets": [8, 0]},
        {"data_offsets": [0]},
        {"data_offsets": [0, 1e999]},
        {"data_offsets": [0, None]},
        {"data_offsets": [1 << 70, (1 << 70) + 8]},
        {"dtype": "F64"},
    ],
)
def test_a_damaged_entry_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"x\.safetensors"):
        read(crafted(tmp_path, {"w": ENTRY | change}, bytes(8)))


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_an_incomplete_entry_is_refused(key: str, tmp_path: Path) -> None:
    entry = {name: value for name, value in ENTRY.items() if name != key}
    with pytest.raises(CorruptCheckpoint, match="damaged"):
        read(crafted(tmp_path, {"w": entry}, bytes(8)))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"hello",
        b"[]",
        b"3",
        b"null",
        b'{"w": 3}',
        b'{"w": null}',
        b'{"__metadata__": 3}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
)
def test_a_header_that_is_none_is_refused(header: bytes, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"x\.safetensors"):
        read(crafted(tmp_path, header, bytes(8)))


@pytest.mark.parametrize("length", [0, 1 << 40, (1 << 64) - 1, 200_000_000])
def test_a_header_of_an_impossible_length_is_refused(length: int, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="truncated"):
        read(crafted(tmp_path, {"w": ENTRY}, bytes(8), length))


@pytest.mark.parametrize("data", [b"", b"1234567", bytes(8), bytes(16)])
def test_a_file_without_a_header_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="truncated"):
        read(tmp_path / "x")


def test_a_dtype_that_torch_cannot_compute_with_is_refused_with_its_name(tmp_path: Path) -> None:
    entry = {"dtype": "F8_E8M0", "shape": [8], "data_offsets": [0, 8]}
    with pytest.raises(Unsupported, match="w has dtype F8_E8M0"):
        read(crafted(tmp_path, {"w": entry}, bytes(8)))


def test_a_truncated_file_is_refused_with_the_tensor(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(100)}, tmp_path / "x")
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-1])
    with pytest.raises(CorruptCheckpoint, match="w does not lie inside the file"):
        read(tmp_path / "x")


# --- writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_written_tensor_of_every_dtype_is_loaded_by_the_library(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    tensor = random_tensor(dtype, 3, 5)
    found = load_file(written({"w": tensor}, tmp_path, {}))["w"]
    assert (found.dtype, found.shape) == (dtype, (3, 5))
    assert bits(found) == bits(tensor)


def test_tensors_of_all_dtypes_and_shapes_are_loaded_together(tmp_path: Path) -> None:
    tensors = {f"{at}": random_tensor(dtype, at, 3) for at, dtype in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(3.0), "odd": torch.ones(3, dtype=torch.int8)}
    found = load_file(written(tensors, tmp_path, {"format": "pt"}))
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }


def test_a_file_without_tensors_is_loaded_by_the_library(tmp_path: Path) -> None:
    assert load_file(written({}, tmp_path, {})) == {}


def test_metadata_is_found_by_the_library(tmp_path: Path) -> None:
    path = written({"w": torch.ones(1)}, tmp_path, {"format": "pt", "alias": "ü"})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "alias": "ü"}


def test_the_data_begin_at_a_multiple_of_8_bytes(tmp_path: Path) -> None:
    path = written({"a name of some length": torch.ones(1)}, tmp_path, {})
    assert struct.unpack("<Q", path.read_bytes()[:8])[0] % 8 == 0


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3), "b": torch.ones(2, dtype=torch.bool)}
    found, metadata = read(written(tensors, tmp_path, {"k": "v"}))
    assert list(found) == ["a", "b"]
    assert [stored_bits(tensor) for tensor in found.values()] == [
        bits(tensor) for tensor in tensors.values()
    ]
    assert metadata == {"k": "v"}


def test_laying_out_again_leaves_the_bytes_of_the_tensors_in_place(tmp_path: Path) -> None:
    path = written({"a": torch.arange(5.0)}, tmp_path, {})
    outs = {"a": OutTensor.of(read(path)[0]["a"])}
    with path.open("r+b") as stream:
        SafetensorsFile("", outs, {}).lay_out(stream)
    assert torch.equal(load_file(path)["a"], torch.arange(5.0))


def test_a_dtype_that_the_format_lacks_is_refused_with_the_tensor(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="w: safetensors cannot hold complex128"):
        written({"w": torch.zeros(2, dtype=torch.complex128)}, tmp_path, {})


def test_the_bytes_of_a_file_are_those_of_its_tensors(tmp_path: Path) -> None:
    torch.save([torch.zeros(4), torch.zeros(3, dtype=torch.int8)], tmp_path / "source.pt")
    one, two = (OutTensor.of(tensor) for tensor in read_torch(tmp_path / "source.pt"))
    assert SafetensorsFile("", {"a": one, "b": two}, {}).nbytes == 19
