"""torch.save files: what torch writes is read, and what is laid out torch reads."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.copying import copy
from ckpt.dtypes import DType
from ckpt.errors import CkptError, CorruptCheckpoint, Unsupported
from ckpt.model import InlineTensor, StoredTensor
from ckpt.moves import moves_of
from ckpt.plan import OutTensor
from ckpt.storage import torch_file
from ckpt.storage.torch_file import TorchFile, is_torch_file, read

DTYPES = [getattr(torch, dtype.torch_name) for dtype in DType]


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    most = 2 if dtype is torch.bool else 256
    numel = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, most, (numel,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return bytes(flat.view(torch.uint8).numpy())


def saved(tree: Any, folder: Path, *, is_zip: bool = True) -> Path:
    torch.save(tree, folder / "x.pt", _use_new_zipfile_serialization=is_zip)
    return folder / "x.pt"


def elements(tensor: StoredTensor) -> torch.Tensor:
    """What the description says, read without the copy engine."""
    (stored,) = tensor.chunks
    dtype = getattr(torch, tensor.dtype.torch_name)
    data = bytearray(Path(stored.record.path).read_bytes())
    end = stored.record.offset + stored.record.length
    flat = torch.frombuffer(data[stored.record.offset : end] or bytearray(16), dtype=dtype)
    if stored.strides is None:
        return flat[stored.start : stored.start + tensor.numel].reshape(tensor.shape)
    return flat.as_strided(tensor.shape, stored.strides, stored.start)


def written(tree: Any, path: Path) -> Path:
    """A file laid out for the tree and filled by the copy engine."""
    with path.open("w+b") as stream:
        layout = TorchFile("", tree).lay_out(stream)
    copy(moves_of(str(path), layout.placements))
    return path


def load(path: Path, **options: Any) -> Any:
    return torch.load(path, weights_only=True, **options)


# --- recognising --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_torch_file_is_one(is_zip: bool, tmp_path: Path) -> None:
    assert is_torch_file(saved({"w": torch.zeros(2)}, tmp_path, is_zip=is_zip))


@pytest.mark.parametrize("data", [b"", b"PK", b"{}", b"\x80\x02K\x01.", bytes(100)])
def test_another_file_is_none(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    assert not is_torch_file(tmp_path / "x")


def test_a_folder_or_nothing_is_none(tmp_path: Path) -> None:
    assert not is_torch_file(tmp_path)
    assert not is_torch_file(tmp_path / "nothing")


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_every_dtype_is_found_where_it_lies(
    dtype: torch.dtype, is_zip: bool, tmp_path: Path
) -> None:
    tensor = random_tensor(dtype, 3, 4)
    found = read(saved({"w": tensor}, tmp_path, is_zip=is_zip))["w"]
    assert (found.dtype.torch_name, found.shape) == (str(dtype).removeprefix("torch."), (3, 4))
    assert bits(elements(found)) == bits(tensor)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (1, 1, 5), (2, 3, 4, 5)])
def test_a_tensor_of_every_shape_is_found_where_it_lies(
    shape: tuple[int, ...], is_zip: bool, tmp_path: Path
) -> None:
    tensor = torch.randn(shape)
    found = read(saved([tensor], tmp_path, is_zip=is_zip))[0]
    assert torch.equal(elements(found), tensor)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(
    "view",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0).reshape(3, 4)[1:],
        torch.arange(12.0).reshape(3, 4)[:, 1:3],
        torch.arange(12.0)[::3],
        torch.arange(3.0).reshape(3, 1).expand(3, 4),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(12.0).reshape(3, 4)[1, 1],
        torch.tensor(5.0).expand(2, 2),
        torch.arange(12.0).reshape(3, 1, 4).transpose(0, 1),
    ],
)
def test_a_view_is_found_where_it_lies(view: torch.Tensor, is_zip: bool, tmp_path: Path) -> None:
    found = read(saved({"w": view}, tmp_path, is_zip=is_zip))["w"]
    assert torch.equal(elements(found), view)


@pytest.mark.parametrize("is_zip", [True, False])
def test_parameters_and_what_needs_gradients_are_tensors(is_zip: bool, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(2, 2))
    tree = {"p": weight, "b": torch.nn.Buffer(torch.ones(2)), "g": torch.ones(2).requires_grad_()}
    found = read(saved(tree, tmp_path, is_zip=is_zip))
    assert torch.equal(elements(found["p"]), weight)
    assert torch.equal(elements(found["g"]), torch.ones(2))


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16])
def test_the_same_view_is_the_same_object(dtype: torch.dtype, is_zip: bool, tmp_path: Path) -> None:
    weight = random_tensor(dtype, 2, 3)
    found = read(saved([weight.detach(), weight.detach()], tmp_path, is_zip=is_zip))
    assert found[0] is found[1]


@pytest.mark.parametrize("is_zip", [True, False])
def test_two_views_of_a_storage_share_a_record_and_not_a_tensor(
    is_zip: bool, tmp_path: Path
) -> None:
    fused = torch.arange(12.0).reshape(4, 3)
    upper, lower = read(saved([fused[:2], fused[2:]], tmp_path, is_zip=is_zip))
    assert upper is not lower
    assert upper.chunks[0].record == lower.chunks[0].record
    assert torch.equal(elements(lower), fused[2:])


def test_a_contiguous_tensor_needs_no_strides(tmp_path: Path) -> None:
    found = read(saved([torch.zeros(1, 3, 1)], tmp_path))[0]
    assert found.chunks[0].strides is None


def test_a_record_has_the_checksum_of_its_bytes(tmp_path: Path) -> None:
    path = saved([torch.randn(100)], tmp_path)
    record = read(path)[0].chunks[0].record
    with zipfile.ZipFile(path) as archive:
        assert record.crc32 == archive.getinfo("x/data/0").CRC


def test_a_record_of_a_legacy_file_has_no_checksum(tmp_path: Path) -> None:
    found = read(saved([torch.randn(100)], tmp_path, is_zip=False))[0]
    assert found.chunks[0].record.crc32 is None


def test_a_file_that_was_renamed_is_read(tmp_path: Path) -> None:
    path = saved([torch.ones(2)], tmp_path).rename(tmp_path / "other.bin")
    assert torch.equal(elements(read(path)[0]), torch.ones(2))


def test_an_archive_inside_of_a_file_is_read_from_there(tmp_path: Path) -> None:
    inner = io.BytesIO()
    torch.save(torch.arange(5.0), inner)
    path = tmp_path / "x"
    path.write_bytes(b"before" + inner.getvalue() + b"behind")
    with path.open("rb") as stream:
        found = torch_file.read_item(stream, str(path), 6, len(inner.getvalue()))
    assert torch.equal(elements(found), torch.arange(5.0))


def test_a_bare_number_is_read(tmp_path: Path) -> None:
    assert read(saved(7, tmp_path)) == 7


# --- refusing -----------------------------------------------------------------------------------


def edited(path: Path, changes: dict[str, bytes | None], kind: int = zipfile.ZIP_STORED) -> Path:
    """The archive with records replaced, added, or removed where the change is None."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    records |= {name: data for name, data in changes.items() if data is not None}
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in records.items():
            if changes.get(name, b"") is not None:
                archive.writestr(name, data)
    return path


def test_a_file_of_a_big_endian_machine_is_refused(tmp_path: Path) -> None:
    path = edited(saved([torch.ones(2)], tmp_path), {"x/byteorder": b"big"})
    with pytest.raises(Unsupported, match=r"x\.pt: .*big-endian"):
        read(path)


def test_a_file_of_a_torch_that_did_not_write_the_byte_order_is_read(tmp_path: Path) -> None:
    path = edited(saved([torch.ones(2)], tmp_path), {"x/byteorder": None, "x/.data/x": None})
    assert torch.equal(elements(read(path)[0]), torch.ones(2))


def test_a_torch_script_is_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(str(tmp_path / "x.pt"))
    with pytest.raises(Unsupported, match=r"TorchScript.*state_dict\(\)"):
        read(tmp_path / "x.pt")


def test_a_zip_of_something_else_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(CorruptCheckpoint, match=r"not one that torch\.save wrote"):
        read(tmp_path / "x.pt")


def test_an_empty_zip_is_refused(tmp_path: Path) -> None:
    zipfile.ZipFile(tmp_path / "x.pt", "w").close()
    with pytest.raises(CorruptCheckpoint):
        read(tmp_path / "x.pt")


def test_a_file_that_is_not_there_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"nothing\.pt"):
        read(tmp_path / "nothing.pt")


def test_a_missing_record_is_refused_with_its_name(tmp_path: Path) -> None:
    path = edited(saved([torch.ones(2)], tmp_path), {"x/data/0": None})
    with pytest.raises(CorruptCheckpoint, match="data/0 holds nothing, expected 8"):
        read(path)


def test_a_record_of_another_size_is_refused_with_both_sizes(tmp_path: Path) -> None:
    path = edited(saved([torch.ones(2)], tmp_path), {"x/data/0": bytes(4)})
    with pytest.raises(CorruptCheckpoint, match="holds 4 bytes, expected 8"):
        read(path)


def test_compressed_records_are_refused_as_compressed(tmp_path: Path) -> None:
    path = edited(saved([torch.ones(200)], tmp_path), {}, kind=zipfile.ZIP_DEFLATED)
    with pytest.raises(Unsupported, match="compressed"):
        read(path)


def test_a_truncated_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = saved([torch.ones(200)], tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptCheckpoint, match=r"x\.pt: .*truncated or damaged"):
        read(path)


def test_a_truncated_legacy_file_is_refused_with_both_sizes(tmp_path: Path) -> None:
    path = saved([torch.ones(200)], tmp_path, is_zip=False)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptCheckpoint, match=f"{size - 100} bytes, expected {size}"):
        read(path)


@pytest.mark.parametrize("data", [b"", b"hello", b"\x80\x02K\x01.", b"PK\x03\x04", bytes(1000)])
def test_something_else_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(CorruptCheckpoint):
        read(tmp_path / "x.pt")


def test_a_sparse_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CkptError):
        read(saved([torch.eye(3).to_sparse()], tmp_path))


# --- writing ------------------------------------------------------------------------------------


def out(tensor: torch.Tensor, folder: Path, name: str = "source") -> OutTensor:
    """A tensor that torch saved, on its way into another file."""
    path = folder / f"{name}.pt"
    torch.save(tensor, path)
    return OutTensor.of(read(path))


PLAIN_TREES = [
    {},
    {"a": 1, "b": [1.5, None, True, "text"], "c": {"d": ()}, 3: (1, 2)},
    {"bytes": b"\x00\xff", "array": bytearray(b"\x01")},
    {"empty": b""},
    {"complex": 1 + 2j},
]


@pytest.mark.parametrize("tree", PLAIN_TREES)
def test_plain_data_is_loaded_by_torch(tree: Any, tmp_path: Path) -> None:
    assert load(written(tree, tmp_path / "out.pt")) == tree


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_written_tensor_of_every_dtype_is_loaded_by_torch(
    dtype: torch.dtype, mmap: bool, tmp_path: Path
) -> None:
    tensor = random_tensor(dtype, 3, 5)
    path = written({"w": out(tensor, tmp_path)}, tmp_path / "out.pt")
    found = load(path, mmap=mmap)["w"]
    assert (found.dtype, found.shape) == (dtype, (3, 5))
    assert bits(found) == bits(tensor)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 4, 5)])
def test_a_written_tensor_of_every_shape_is_loaded_by_torch(
    shape: tuple[int, ...], mmap: bool, tmp_path: Path
) -> None:
    tensor = torch.randn(shape)
    found = load(written([out(tensor, tmp_path)], tmp_path / "out.pt"), mmap=mmap)[0]
    assert torch.equal(found, tensor)


def test_a_view_is_written_contiguous(tmp_path: Path) -> None:
    tensor = torch.randn(5, 7).T
    found = load(written([out(tensor, tmp_path)], tmp_path / "out.pt"))[0]
    assert torch.equal(found, tensor)
    assert found.is_contiguous()


@pytest.mark.parametrize("mmap", [False, True])
def test_tied_tensors_share_their_storage(mmap: bool, tmp_path: Path) -> None:
    tied = out(torch.randn(2, 3), tmp_path)
    found = load(written({"a": tied, "b": tied}, tmp_path / "out.pt"), mmap=mmap)
    assert found["a"].data_ptr() == found["b"].data_ptr()


def test_equal_tensors_that_are_not_tied_have_storages_of_their_own(tmp_path: Path) -> None:
    one, two = out(torch.ones(2), tmp_path, "one"), out(torch.ones(2), tmp_path, "two")
    found = load(written([one, two], tmp_path / "out.pt"))
    assert found[0].data_ptr() != found[1].data_ptr()


def test_many_tensors_and_small_ones_at_hand_are_loaded_together(tmp_path: Path) -> None:
    tensors = {f"{at}": torch.randn(at, 3) for at in range(20)}
    tree = {name: out(tensor, tmp_path, name) for name, tensor in tensors.items()}
    step = InlineTensor(DType.float32, (), torch.tensor(7.0).numpy().tobytes())
    found = load(written({"model": tree, "step": step}, tmp_path / "out.pt"))
    assert all(torch.equal(found["model"][name], tensors[name]) for name in tensors)
    assert found["step"] == torch.tensor(7.0)


def test_a_cast_tensor_is_loaded_in_its_new_dtype(tmp_path: Path) -> None:
    tensor = torch.randn(10)
    half = OutTensor.of(out(tensor, tmp_path).source, DType.bfloat16)
    assert torch.equal(load(written([half], tmp_path / "out.pt"))[0], tensor.bfloat16())


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    tied = out(torch.randn(4, 3), tmp_path)
    found = read(written({"a": tied, "b": tied, "n": 3}, tmp_path / "out.pt"))
    assert found["a"] is found["b"]
    assert torch.equal(elements(found["a"]), elements(tied.source))


def test_records_lie_at_multiples_of_64_bytes_as_torch_puts_them(tmp_path: Path) -> None:
    tree = [out(torch.ones(n), tmp_path, f"{n}") for n in (1, 2, 3)]
    with (tmp_path / "out.pt").open("w+b") as stream:
        layout = torch_file.lay_out(stream, tree)
    assert [placement.offset % 64 for placement in layout.placements] == [0, 0, 0]


def test_bytes_of_shared_tensors_count_once(tmp_path: Path) -> None:
    tied = out(torch.ones(4), tmp_path)
    assert TorchFile("", {"a": tied, "b": [tied], "n": 1}).nbytes == 16


def test_archives_are_laid_out_one_behind_the_other(tmp_path: Path) -> None:
    one, two = out(torch.arange(3.0), tmp_path, "one"), out(torch.arange(5.0), tmp_path, "two")
    path = tmp_path / "out"
    with path.open("w+b") as stream:
        placements = list(torch_file.lay_out(stream, one).placements)
        border = stream.tell()
        placements += torch_file.lay_out(stream, two).placements
    copy(moves_of(str(path), placements))
    data = path.read_bytes()
    assert torch.equal(load(io.BytesIO(data[:border])), torch.arange(3.0))  # type: ignore[arg-type]
    assert torch.equal(load(io.BytesIO(data[border:])), torch.arange(5.0))  # type: ignore[arg-type]


def test_laying_out_again_leaves_the_bytes_of_the_tensors_in_place(tmp_path: Path) -> None:
    tensors = [torch.randn(n) for n in (3, 50, 7)]
    tree = [out(tensor, tmp_path, f"{at}") for at, tensor in enumerate(tensors)]
    path = written(tree, tmp_path / "out.pt")
    with path.open("r+b") as stream:
        torch_file.lay_out(stream, tree)
    found = load(path)
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))


def test_laying_out_again_one_behind_the_other_gives_the_same_file(tmp_path: Path) -> None:
    items = [out(torch.ones(n), tmp_path, f"{n}") for n in (3, 5)]
    path = tmp_path / "out"
    with path.open("w+b") as stream:
        first = [torch_file.lay_out(stream, item).placements[0].offset for item in items]
    size = path.stat().st_size
    with path.open("r+b") as stream:
        again = [torch_file.lay_out(stream, item).placements[0].offset for item in items]
    assert (again, path.stat().st_size) == (first, size)


def test_files_saved_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(5.0)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    (found,) = read(tmp_path / "x.pt").values()
    assert found.chunks[0].record.crc32 is None
    assert found.shape == (5,)
