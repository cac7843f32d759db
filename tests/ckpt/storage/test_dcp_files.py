"""The files of torch.distributed.checkpoint, against torch in one process, both ways."""

from __future__ import annotations

import argparse
import pickle
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import ckpt
import ckpt.formats.dcp
from ckpt.chunks import Chunk
from ckpt.copying import copy
from ckpt.dtypes import DType
from ckpt.errors import CkptError, CorruptCheckpoint, MissingPart, Unsupported
from ckpt.model import InlineTensor, StoredTensor
from ckpt.moves import moves_of
from ckpt.plan import OutTensor, Placement
from ckpt.storage import torch_file
from ckpt.storage.dcp_files import DcpDataFile, OutItem, metadata_file, read_items

pytestmark = pytest.mark.filterwarnings("ignore")
Path_ = tuple[str | int, ...]


def save(tree: Mapping[str, Any], folder: Path) -> Path:
    writer = dcp.FileSystemWriter(folder)
    dcp.save(dict(tree), storage_writer=writer, no_dist=True)
    return folder


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The state after torch has filled it from a folder."""
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def load_all(folder: Path, tmp_path: Path) -> Any:
    """Everything in a folder, by torch's own converter."""
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    return torch.load(tmp_path / "all.pt", weights_only=False)


def by_path(folder: Path) -> dict[Path_, Any]:
    return {item.path: item.value for item in read_items(folder)}


def elements(tensor: StoredTensor, folder: Path) -> torch.Tensor:
    """The tensor as the copy engine assembles it."""
    out = OutTensor.of(tensor)
    path = folder / "elements"
    path.write_bytes(bytes(out.nbytes))
    copy(moves_of(str(path), [Placement(0, out)]))
    dtype = getattr(torch, tensor.dtype.torch_name)
    flat = torch.frombuffer(bytearray(path.read_bytes()) or bytearray(16), dtype=dtype)
    return flat[: tensor.numel].reshape(tensor.shape)


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def change_metadata(folder: Path, **changes: Any) -> Path:
    """The folder after some fields of its metadata have been replaced."""
    (folder / ".metadata").write_bytes(pickle.dumps(replace(metadata_of(folder), **changes)))
    return folder


def change_places(folder: Path, **changes: Any) -> Path:
    """The folder after a field of every item's place has been replaced."""
    places = metadata_of(folder).storage_data
    changed = {index: replace(place, **changes) for index, place in places.items()}
    return change_metadata(folder, storage_data=changed)


# --- reading ------------------------------------------------------------------------------------

TREE = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "half": torch.ones(5).bfloat16()},
    "flag": torch.tensor([True, False]),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 3),
    "step": 7,
    "name": "run",
    "nothing": None,
    "betas": (0.9, 0.95),
    "numbers": [1, 2, 3],
    "mixed": [1, {"a": 2}, torch.ones(2)],
    "deep": {"er": {"est": {"x": 1.5}}},
    "with.dot": {"a.b": torch.full((2,), 9.0)},
}


def test_every_entry_has_its_path_in_the_saved_dict(tmp_path: Path) -> None:
    assert set(by_path(save(TREE, tmp_path / "dcp"))) == {
        ("model", "w"),
        ("model", "half"),
        ("flag",),
        ("scalar",),
        ("empty",),
        ("step",),
        ("name",),
        ("nothing",),
        ("betas",),
        ("numbers",),
        ("mixed", 0),
        ("mixed", 1, "a"),
        ("mixed", 2),
        ("deep", "er", "est", "x"),
        ("with.dot", "a.b"),
    }


def test_plain_values_are_read(tmp_path: Path) -> None:
    found = by_path(save(TREE, tmp_path / "dcp"))
    assert (found["step",], found["name",], found["nothing",]) == (7, "run", None)
    assert (found["betas",], found["numbers",]) == ((0.9, 0.95), [1, 2, 3])
    assert (found["mixed", 0], found["mixed", 1, "a"]) == (1, 2)
    assert found["deep", "er", "est", "x"] == 1.5


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("model", "w"), TREE["model"]["w"]),
        (("model", "half"), TREE["model"]["half"]),
        (("flag",), TREE["flag"]),
        (("scalar",), TREE["scalar"]),
        (("empty",), TREE["empty"]),
        (("mixed", 2), torch.ones(2)),
        (("with.dot", "a.b"), torch.full((2,), 9.0)),
    ],
)
def test_tensors_are_found_where_they_lie(
    path: Path_, expected: torch.Tensor, tmp_path: Path
) -> None:
    found = by_path(save(TREE, tmp_path / "dcp"))[path]
    assert (found.shape, found.dtype.torch_name) == (
        tuple(expected.shape),
        str(expected.dtype).removeprefix("torch."),
    )
    assert torch.equal(elements(found, tmp_path), expected)


@pytest.mark.parametrize("dtype", list(DType))
def test_a_tensor_of_every_dtype_is_found_where_it_lies(dtype: DType, tmp_path: Path) -> None:
    tensor = torch.zeros(3, dtype=getattr(torch, dtype.torch_name))
    found = by_path(save({"w": tensor}, tmp_path / "dcp"))["w",]
    assert found.dtype is dtype
    assert elements(found, tmp_path).dtype is tensor.dtype


def test_a_view_is_found_where_it_lies(tmp_path: Path) -> None:
    tensor = torch.randn(5, 7).T[2:]
    found = by_path(save({"w": tensor}, tmp_path / "dcp"))["w",]
    assert torch.equal(elements(found, tmp_path), tensor)


def test_tensors_inside_of_an_object_are_found_where_they_lie(tmp_path: Path) -> None:
    pair = (torch.arange(3.0), torch.arange(5.0))
    tree = {"before": 1, "pair": pair, "w": torch.zeros(100)}
    found = by_path(save(tree, tmp_path / "dcp"))["pair",]
    assert torch.equal(elements(found[0], tmp_path), pair[0])
    assert torch.equal(elements(found[1], tmp_path), pair[1])


def test_options_of_a_script_are_read_as_data(tmp_path: Path) -> None:
    found = by_path(save({"args": argparse.Namespace(lr=0.1)}, tmp_path / "dcp"))["args",]
    assert (found.type_name, found.state) == ("argparse.Namespace", {"lr": 0.1})


def test_a_save_without_paths_is_read_by_its_keys(tmp_path: Path) -> None:
    folder = change_metadata(save({"a": {"b": torch.ones(2)}}, tmp_path / "dcp"), planner_data=None)
    assert set(by_path(folder)) == {("a.b",)}


def test_several_files_of_a_rank_are_read(tmp_path: Path) -> None:
    tensors = {f"{at}": torch.full((at,), float(at)) for at in range(1, 9)}
    writer = dcp.FileSystemWriter(tmp_path / "dcp", single_file_per_rank=False)
    dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    found = by_path(tmp_path / "dcp")
    assert all(torch.equal(elements(found[name,], tmp_path), t) for name, t in tensors.items())


# --- refusing -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A save of two tensors and a number."""
    return save({"a": torch.arange(50.0), "b": torch.ones(3, 3), "n": 3}, tmp_path / "dcp")


def data_file(folder: Path) -> Path:
    (path,) = folder.glob("*.distcp")
    return path


def test_a_folder_without_metadata_did_not_finish(folder: Path) -> None:
    (folder / ".metadata").unlink()
    with pytest.raises(MissingPart, match=r"dcp: no \.metadata"):
        read_items(folder)


def test_a_missing_data_file_is_named(folder: Path) -> None:
    name = data_file(folder).name
    data_file(folder).unlink()
    with pytest.raises(MissingPart, match=f"{name} is missing"):
        read_items(folder)


@pytest.mark.parametrize("left", [0, 1, 500, -1])
def test_a_truncated_data_file_is_named(left: int, folder: Path) -> None:
    path = data_file(folder)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CorruptCheckpoint, match=path.name):
        read_items(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.distcp",
        "/outside.distcp",
        "inner/x.distcp",
        "..",
        ".",
        "",
        "x\x00y",
    ],
)
def test_metadata_cannot_point_outside_of_the_folder(
    name: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copy(data_file(folder), tmp_path / "outside.distcp")
    change_places(folder, relative_path=name)
    with pytest.raises(CkptError):
        read_items(folder)


def test_an_absolute_path_to_an_existing_file_is_refused(folder: Path, tmp_path: Path) -> None:
    outside = shutil.copy(data_file(folder), tmp_path / "outside.distcp")
    change_places(folder, relative_path=str(outside))
    with pytest.raises(CorruptCheckpoint, match="points outside"):
        read_items(folder)


def test_a_data_file_of_another_save_is_refused(folder: Path, tmp_path: Path) -> None:
    other = save({"a": torch.arange(50.0), "b": torch.ones(9), "n": 3}, tmp_path / "other")
    shutil.copy(data_file(other), data_file(folder))
    with pytest.raises(CorruptCheckpoint):
        read_items(folder)


def test_a_data_file_of_something_else_is_refused(folder: Path) -> None:
    path = data_file(folder)
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(CorruptCheckpoint, match=path.name):
        read_items(folder)


@pytest.mark.parametrize("content", [b"", b"hello", pickle.dumps(1), pickle.dumps({"a": 1})])
def test_metadata_that_is_none_is_refused(content: bytes, folder: Path) -> None:
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"\.metadata"):
        read_items(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"storage_data": None},
        {"storage_data": {}},
        {"storage_data": {1: 2}},
        {"storage_data": []},
        {"state_dict_metadata": None},
        {"state_dict_metadata": {"a": 3}},
        {"planner_data": 3},
        {"planner_data": {"a": 3}},
    ],
)
def test_metadata_of_another_shape_is_refused(changes: dict[str, Any], folder: Path) -> None:
    change_metadata(folder, **changes)
    with pytest.raises(CorruptCheckpoint):
        read_items(folder)


@pytest.mark.parametrize(
    "changes", [{"offset": -1}, {"length": -1}, {"offset": None}, {"length": 1 << 60}]
)
def test_impossible_places_are_refused(changes: dict[str, Any], folder: Path) -> None:
    change_places(folder, **changes)
    with pytest.raises(CorruptCheckpoint):
        read_items(folder)


def with_chunk(folder: Path, offsets: Sequence[int], sizes: Sequence[int]) -> Path:
    """The folder after the only chunk of `a` has been said to be another."""
    metadata = metadata_of(folder)
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    tensors = dict(metadata.state_dict_metadata)
    tensors["a"] = replace(tensors["a"], chunks=[chunk])
    places = {
        (MetadataIndex("a", torch.Size(offsets), 0) if index.fqn == "a" else index): place
        for index, place in metadata.storage_data.items()
    }
    return change_metadata(folder, state_dict_metadata=tensors, storage_data=places)


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [((0,), (49,)), ((0,), (51,)), ((1,), (50,)), ((0, 0), (50, 1)), ((0,), (5, 10)), ((), ())],
)
def test_chunks_that_contradict_the_files_are_refused(
    offsets: Sequence[int], sizes: Sequence[int], folder: Path
) -> None:
    with pytest.raises(CorruptCheckpoint):
        read_items(with_chunk(folder, offsets, sizes))


def test_a_tensor_of_which_nothing_is_stored_is_refused_with_its_name(folder: Path) -> None:
    places = metadata_of(folder).storage_data
    left = {index: place for index, place in places.items() if index.fqn != "a"}
    with pytest.raises(CorruptCheckpoint, match="dcp: a: chunks leave 50 elements out"):
        read_items(change_metadata(folder, storage_data=left))


def test_compressed_items_are_refused(folder: Path) -> None:
    change_places(folder, transform_descriptors=["zstd"])
    with pytest.raises(Unsupported, match="compressed"):
        read_items(folder)


# --- writing ------------------------------------------------------------------------------------


def stored(tensor: torch.Tensor, folder: Path, name: str) -> StoredTensor:
    torch.save(tensor, folder / f"{name}.pt")
    found = torch_file.read(folder / f"{name}.pt")
    assert isinstance(found, StoredTensor)
    return found


def write(files: Sequence[DcpDataFile], folder: Path) -> Path:
    """The files, laid out and filled, and their metadata."""
    folder.mkdir()
    spans = {}
    for file in files:
        path = folder / file.path
        with path.open("w+b") as stream:
            layout = file.lay_out(stream)
        copy(moves_of(str(path), layout.placements))
        spans[file.path] = layout.spans
    commit = metadata_file(files)
    (folder / commit.path).write_bytes(commit.render(spans))
    return folder


def whole(tensor: torch.Tensor, folder: Path, *path: str | int) -> OutItem:
    fqn = ".".join(map(str, path))
    out = OutTensor.of(stored(tensor, folder, fqn))
    return OutItem(fqn, path, out, tuple(tensor.shape))


def test_written_tensors_and_objects_are_loaded_by_torch(tmp_path: Path) -> None:
    step = InlineTensor(DType.float32, (), torch.tensor(7.0).numpy().tobytes())
    items = (
        OutItem("n", ("n",), 3),
        OutItem("text", ("text",), "ü"),
        OutItem("list", ("list",), [1, {"a": None}]),
        whole(torch.arange(12.0).reshape(3, 4), tmp_path, "model", "w"),
        whole(torch.ones(2).bfloat16(), tmp_path, "model", "half"),
        OutItem("step", ("step",), step),
    )
    folder = write([DcpDataFile("__0_0.distcp", items)], tmp_path / "dcp")
    model = {"w": torch.zeros(3, 4), "half": torch.zeros(2).bfloat16()}
    found = load({"model": model, "n": 0, "text": "", "list": 0, "step": torch.zeros(())}, folder)
    assert torch.equal(found["model"]["w"], torch.arange(12.0).reshape(3, 4))
    assert torch.equal(found["model"]["half"], torch.ones(2).bfloat16())
    assert (found["n"], found["text"], found["list"]) == (3, "ü", [1, {"a": None}])
    assert found["step"] == 7


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 4)])
def test_a_written_tensor_of_every_shape_is_loaded_by_torch(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = torch.randn(shape)
    files = [DcpDataFile("__0_0.distcp", (whole(tensor, tmp_path, "w"),))]
    found = load({"w": torch.zeros(shape)}, write(files, tmp_path / "dcp"))
    assert torch.equal(found["w"], tensor)


@pytest.mark.parametrize("dtype", list(DType))
def test_a_written_tensor_of_every_dtype_is_loaded_by_torch(dtype: DType, tmp_path: Path) -> None:
    torch_dtype = getattr(torch, dtype.torch_name)
    tensor = torch.tensor([0, 1, 1], dtype=torch.uint8).to(torch_dtype)
    files = [DcpDataFile("__0_0.distcp", (whole(tensor, tmp_path, "w"),))]
    found = load({"w": torch.zeros(3, dtype=torch_dtype)}, write(files, tmp_path / "dcp"))
    assert torch.equal(found["w"].view(torch.uint8), tensor.view(torch.uint8))


def test_a_tensor_in_boxes_of_both_dimensions_is_loaded_by_torch(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    source = stored(tensor, tmp_path, "w")
    boxes = [
        Chunk((0, 0), (3, 2)),
        Chunk((0, 2), (3, 4)),
        Chunk((3, 0), (1, 2)),
        Chunk((3, 2), (1, 4)),
    ]
    items = [OutItem("w", ("w",), OutTensor(source, source.dtype, box), (4, 6)) for box in boxes]
    files = [
        DcpDataFile("__0_0.distcp", tuple(items[:1])),
        DcpDataFile("__1_0.distcp", tuple(items[1:])),
    ]
    folder = write(files, tmp_path / "dcp")
    assert torch.equal(load({"w": torch.zeros(4, 6)}, folder)["w"], tensor)
    assert torch.equal(elements(by_path(folder)["w",], tmp_path), tensor)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    items = (OutItem("n", ("n",), 3), whole(torch.arange(5.0), tmp_path, "a", 0, "b"))
    found = by_path(write([DcpDataFile("__0_0.distcp", items)], tmp_path / "dcp"))
    assert found["n",] == 3
    assert torch.equal(elements(found["a", 0, "b"], tmp_path), torch.arange(5.0))


def test_the_bytes_of_a_file_are_those_of_its_tensors(tmp_path: Path) -> None:
    items = (OutItem("n", ("n",), 3), whole(torch.arange(5.0), tmp_path, "w"))
    assert DcpDataFile("__0_0.distcp", items).nbytes == 20


# --- whole conversions --------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """A training dict that torch has saved as `job.pt`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    job = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "history": [1.5, {"loss": 0.5}],
        "rng": torch.get_rng_state(),
    }
    (tmp_path / "source").mkdir()
    torch.save(job, tmp_path / "source" / "job.pt")
    return job


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of at most 64 bytes in files of at most 100."""
    monkeypatch.setattr(ckpt.formats.dcp, "MAX_CHUNK_BYTES", 64)
    monkeypatch.setattr(ckpt.formats.dcp, "MAX_FILE_BYTES", 100)


def check_converted(job: Mapping[str, Any], folder: Path, tmp_path: Path) -> None:
    found = load_all(folder, tmp_path)
    assert found["model"].keys() == job["model"].keys()
    assert all(torch.equal(found["model"][name], value) for name, value in job["model"].items())
    names = job["optimizer"]["param_groups"][0]["param_names"]
    for number, name in enumerate(names):
        state = job["optimizer"]["state"][number]
        assert all(torch.equal(found["optimizer"]["state"][name][key], state[key]) for key in state)
    assert found["optimizer"]["param_groups"][0]["params"] == names
    assert (found["epoch"], found["history"]) == (3, [1.5, {"loss": 0.5}])
    assert torch.equal(found["rng"], job["rng"])


def test_a_converted_job_is_loaded_by_torch_in_full(job: dict[str, Any], tmp_path: Path) -> None:
    folder = ckpt.convert(tmp_path / "source/job.pt", "dcp", tmp_path / "out")
    assert len(list(folder.glob("*.distcp"))) == 1
    check_converted(job, folder, tmp_path)


@pytest.mark.usefixtures("small_pieces")
def test_a_converted_job_in_many_small_pieces_is_loaded_by_torch_in_full(
    job: dict[str, Any], tmp_path: Path
) -> None:
    folder = ckpt.convert(tmp_path / "source/job.pt", "dcp", tmp_path / "out")
    assert len(list(folder.glob("*.distcp"))) > 5
    check_converted(job, folder, tmp_path)


@pytest.mark.usefixtures("small_pieces")
def test_a_tensor_in_many_small_pieces_is_put_together_again(
    job: dict[str, Any], tmp_path: Path
) -> None:
    folder = ckpt.convert(tmp_path / "source/job.pt", "dcp", tmp_path / "out")
    found = by_path(folder)["model", "0.weight"]
    assert [stored.chunk.sizes for stored in found.chunks] == [(2, 7), (2, 7), (1, 7)]
    assert torch.equal(elements(found, tmp_path), job["model"]["0.weight"])


@pytest.mark.usefixtures("small_pieces")
def test_a_cast_job_in_many_small_pieces_is_loaded_by_torch(
    job: dict[str, Any], tmp_path: Path
) -> None:
    folder = ckpt.convert(tmp_path / "source/job.pt", "dcp", tmp_path / "out", dtype="bf16")
    found = load_all(folder, tmp_path)["model"]["0.weight"]
    assert torch.equal(found, job["model"]["0.weight"].bfloat16())


def test_two_values_with_one_key_are_refused(tmp_path: Path) -> None:
    job = {"model": {"w": torch.ones(2)}, "a": {"b": 1}, "a.b": 2}
    torch.save(job, tmp_path / "job.pt")
    with pytest.raises(CkptError, match=r"a\.b: two values"):
        ckpt.convert(tmp_path / "job.pt", "dcp", tmp_path / "dcp")
