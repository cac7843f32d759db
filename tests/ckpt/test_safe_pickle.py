"""Unpickling that cannot execute anything: hostile, damaged and plain pickles.

`storage/safe_pickle.py` is tested here as a whole, together with the files that hold pickles.
"""

from __future__ import annotations

import argparse
import builtins
import copyreg
import datetime
import functools
import http
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.dtypes import DType
from ckpt.errors import CkptError, CorruptCheckpoint, UnsafePickle
from ckpt.model import Opaque, Record, StoredTensor
from ckpt.storage import safetensors_file, torch_file
from ckpt.storage.dcp_files import read_items
from ckpt.storage.safe_pickle import StorageRef, loads

PROTOCOLS = [2, 4, 5]


class Calls:
    """Pickles as a call of a function: what an attacker writes."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def text(value: str) -> bytes:
    """The opcode that pushes a string."""
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def call(module: str, name: str, *args: str) -> bytes:
    """A pickle of protocol 2 that calls a global with strings."""
    pushed = b"".join(text(arg) for arg in args)
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"(" + pushed + b"tR."


def rebuild_call(*args: Any) -> bytes:
    """A pickle that rebuilds a tensor of the only storage with these arguments."""
    pushed = b"".join(pickle.dumps(arg, 2)[2:-1] for arg in args)
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01Q" + pushed + b"tR."


def torch_archive(path: Path, pickled: bytes, tensor: torch.Tensor | None = None) -> Path:
    """A file that torch.save wrote, with another pickle in it."""
    torch.save({"w": torch.zeros(4) if tensor is None else tensor}, path)
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records:
            archive.writestr(name, pickled if name.endswith("data.pkl") else data)
    return path


def saved(tree: Any, folder: Path, **options: Any) -> Any:
    torch.save(tree, folder / "x.pt", **options)
    return torch_file.read(folder / "x.pt")


# --- plain data comes back ----------------------------------------------------------------------

PLAIN = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 1 << 40, -(1 << 90)],
    "floats": [0.5, -0.0, 1e300, float("inf")],
    "text": "Grüße \U0001f600 \x00",
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"\x00\xff"),
    "tuple": (1, (2, ())),
    "list": [1, [2, []]],
    "set": {1, 2},
    "frozenset": frozenset({3}),
    "dict": {1: "a", "b": {None: 2}, (1, 2): 3},
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "counter": Counter("aab"),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", list(PLAIN))
def test_plain_data_comes_back_equal(name: str, protocol: int) -> None:
    assert loads(pickle.dumps(PLAIN[name], protocol), "file") == PLAIN[name]


@pytest.mark.parametrize("name", list(PLAIN))
@pytest.mark.parametrize("is_zip", [True, False])
def test_plain_data_comes_back_from_torch_files(name: str, is_zip: bool, tmp_path: Path) -> None:
    tree = {"value": PLAIN[name], "w": torch.zeros(2)}
    found = saved(tree, tmp_path, _use_new_zipfile_serialization=is_zip)
    assert found["value"] == PLAIN[name]


@pytest.mark.parametrize(
    "value", [1 + 2j, b"", bytearray(), defaultdict(list, {"loss": [1.0]}), defaultdict(dict)]
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_data_whose_pickle_calls_a_builtin_comes_back_equal(
    value: Any, protocol: int
) -> None:
    assert loads(pickle.dumps(value, protocol), "file") == value


def test_an_ordered_dict_with_attributes_keeps_its_items(tmp_path: Path) -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    assert state._metadata
    assert list(saved(state, tmp_path)) == ["weight", "bias"]


def test_a_list_that_holds_itself_is_refused() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    with pytest.raises(CorruptCheckpoint, match="file: data contains itself"):
        loads(pickle.dumps(loop, 2), "file")


def test_a_dict_that_holds_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    with pytest.raises(CorruptCheckpoint, match="file: data contains itself"):
        loads(pickle.dumps(loop, 2), "file")


def test_data_nested_without_end_is_refused() -> None:
    deep = b"\x80\x02" + b"]" * 900 + b"a" * 899 + b"."
    with pytest.raises(CorruptCheckpoint, match="nested deeper"):
        loads(deep, "file")


def test_one_list_in_two_places_stays_one() -> None:
    shared = [1]
    found = loads(pickle.dumps([shared, shared], 2), "file")
    assert found[0] is found[1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "value",
    [
        np.float64(1.5),
        np.float32(-2.5),
        np.float16(0.25),
        np.int64(-(1 << 60)),
        np.int32(-7),
        np.int16(-300),
        np.int8(-1),
        np.uint64(1 << 63),
        np.uint32(7),
        np.uint16(7),
        np.uint8(255),
        np.bool_(True),
    ],
)
def test_numpy_scalars_come_back_as_numbers(value: Any, protocol: int) -> None:
    found = loads(pickle.dumps(value, protocol), "file")
    assert (found, type(found)) == (value.item(), type(value.item()))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("code", ["<f4", ">f4", "<i8", ">u2", "<f2", "i1", "<u4", "?"])
def test_numpy_arrays_come_back_as_tensors(code: str, order: Any, protocol: int) -> None:
    array = np.array([[0, 1, 2], [1, 0, 1]]).astype(code, order=order)
    found = loads(pickle.dumps(array, protocol), "file")
    assert found.type_name == "numpy.ndarray"
    assert found.state.shape == (2, 3)
    little = array.astype(array.dtype.newbyteorder("<"))
    assert found.state.data == np.ascontiguousarray(little).tobytes()
    assert found.state.dtype.torch_name == array.dtype.newbyteorder("=").name


def test_numpys_random_state_comes_back_as_data() -> None:
    name, keys, position, has_gauss, gauss = np.random.RandomState(3).get_state(legacy=True)
    found = loads(pickle.dumps((name, keys, position, has_gauss, gauss), 2), "file")
    assert found[1].state.data == keys.tobytes()


def test_a_numpy_array_with_too_few_numbers_is_corrupt() -> None:
    data = pickle.dumps(np.zeros((2, 3), "u1"), 2).replace(b"K\x02K\x03\x86", b"K\x02K\x04\x86")
    with pytest.raises(CorruptCheckpoint):
        loads(data, "file")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_options_of_a_script_come_back_as_data(protocol: int) -> None:
    found = loads(pickle.dumps(argparse.Namespace(lr=0.1, layers=[2, 3]), protocol), "file")
    assert isinstance(found, Opaque)
    assert (found.type_name, found.state) == ("argparse.Namespace", {"lr": 0.1, "layers": [2, 3]})


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "value",
    [
        pathlib.PurePosixPath("/a/b"),
        pathlib.PosixPath("a"),
        datetime.datetime(2026, 1, 2, 3, 4, 5),
        datetime.date(2026, 1, 2),
        datetime.timedelta(hours=1),
    ],
)
def test_paths_and_dates_come_back_as_data(value: Any, protocol: int) -> None:
    assert isinstance(loads(pickle.dumps(value, protocol), "file"), Opaque)


def test_different_objects_of_one_class_stay_different() -> None:
    days = [datetime.date(2026, 1, day) for day in range(1, 29)]
    found = loads(pickle.dumps(days), "file")
    assert len({repr(day.state) for day in found}) == len(days)


def test_a_date_with_a_time_zone_comes_back_as_data() -> None:
    value = datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)
    assert isinstance(loads(pickle.dumps(value, 2), "file"), Opaque)


def test_dtypes_devices_and_sizes_come_back_as_data(tmp_path: Path) -> None:
    tree = {"dtype": torch.bfloat16, "device": torch.device("cuda", 1), "size": torch.Size([2, 3])}
    assert saved(tree, tmp_path) == {"dtype": DType.bfloat16, "device": "cuda:1", "size": (2, 3)}


# --- hostile pickles ----------------------------------------------------------------------------


def test_a_class_that_is_not_data_is_refused_with_its_name_and_the_file() -> None:
    with pytest.raises(UnsafePickle, match=r"^job\.pt: the pickle asks for http\.HTTPStatus"):
        loads(pickle.dumps(http.HTTPStatus.OK, 2), "job.pt")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, "posix.system"),
        (subprocess.check_output, "check_output"),
        (functools.partial(os.system), "functools.partial"),
    ],
)
def test_a_command_is_refused_and_not_run(
    function: Callable[..., Any], name: str, protocol: int, tmp_path: Path
) -> None:
    marker = tmp_path / "executed"
    hostile = pickle.dumps(Calls(function, f"touch {marker}"), protocol)
    with pytest.raises(UnsafePickle, match=f"file: .*{name}"):
        loads(hostile, "file")
    assert not marker.exists()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("function", [builtins.eval, builtins.exec, builtins.__import__])
def test_code_is_refused_and_not_run(
    function: Callable[..., Any], protocol: int, tmp_path: Path
) -> None:
    marker = tmp_path / "executed"
    hostile = pickle.dumps(Calls(function, f"open({str(marker)!r}, 'w')"), protocol)
    with pytest.raises(UnsafePickle, match=function.__name__):
        loads(hostile, "file")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("nt", "system"),
        ("__builtin__", "eval"),
        ("__builtin__", "getattr"),
        ("__builtin__", "open"),
        ("builtins", "getattr"),
        ("builtins", "open"),
        ("builtins", "int.__class__"),
        ("builtins", "dict.__subclasses__"),
        ("torch", "load"),
        ("torch", "hub.load"),
        ("torch.storage", "_load_from_bytes"),
        ("torch._utils", "_rebuild_device_tensor_from_numpy"),
        ("torch.serialization", "os.system"),
        ("collections", "OrderedDict.__init__.__globals__"),
        ("_codecs", "lookup"),
        ("copyreg", "_reconstructor"),
        ("copy_reg", "_reconstructor"),
        ("operator", "attrgetter"),
        ("importlib", "import_module"),
        ("ckpt.storage.safe_pickle", "loads"),
        ("numpy", "load"),
        ("numpy.testing._private.utils", "runstring"),
    ],
)
def test_a_global_that_is_not_data_is_refused_with_its_name(module: str, name: str) -> None:
    with pytest.raises(UnsafePickle, match=f"file: the pickle asks for {module}.{name}"):
        loads(call(module, name, "echo"), "file")


def test_a_command_inside_a_command_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    inner = Calls(os.system, f"touch {marker}")
    hostile = pickle.dumps({"a": [(1, Calls(OrderedDict, [("k", inner)]))]}, 2)
    with pytest.raises(UnsafePickle, match="system"):
        loads(hostile, "file")
    assert not marker.exists()


def test_a_pickle_inside_of_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    inner = pickle.dumps(Calls(os.system, f"touch {marker}"))
    with pytest.raises(UnsafePickle, match="loads"):
        loads(pickle.dumps(Calls(pickle.loads, inner)), "file")
    assert not marker.exists()


def test_a_command_behind_the_first_pickle_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    hostile = pickle.dumps(Calls(os.system, f"touch {marker}"))
    assert loads(pickle.dumps(1) + hostile, "file") == 1
    assert not marker.exists()


def test_a_command_in_a_torch_file_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    path = torch_archive(tmp_path / "x.pt", pickle.dumps(Calls(os.system, f"touch {marker}"), 2))
    with pytest.raises(UnsafePickle, match=r"x\.pt: .*system"):
        torch_file.read(path)
    assert not marker.exists()


def test_a_command_in_a_legacy_torch_file_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    with pytest.raises(UnsafePickle, match=r"x\.pt: .*system"):
        saved(
            {"w": torch.zeros(2), "x": Calls(os.system, f"touch {marker}")},
            tmp_path,
            _use_new_zipfile_serialization=False,
        )
    assert not marker.exists()


def test_a_command_in_place_of_dcp_metadata_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Calls(os.system, f"touch {marker}")))
    with pytest.raises(UnsafePickle, match=r"\.metadata: .*system"):
        read_items(tmp_path)
    assert not marker.exists()


@pytest.fixture
def registered() -> Iterator[int]:
    """The number of os.system in the registry of pickle extensions."""
    copyreg.add_extension("posix", "system", 240)  # type: ignore[no-untyped-call]
    yield 240
    copyreg.remove_extension("posix", "system", 240)  # type: ignore[no-untyped-call]


def test_a_registered_extension_is_refused_like_any_global(registered: int, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    hostile = b"\x80\x02\x82" + bytes([registered]) + b"(" + text(f"touch {marker}") + b"tR."
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        loads(hostile, "file")
    assert not marker.exists()


def test_an_extension_that_somebody_unpickled_before_is_refused_too(
    registered: int, tmp_path: Path
) -> None:
    marker = tmp_path / "executed"
    pickle.loads(b"\x80\x02\x82" + bytes([registered]) + b".")
    hostile = b"\x80\x02\x82" + bytes([registered]) + b"(" + text(f"touch {marker}") + b"tR."
    with pytest.raises(CkptError):
        loads(hostile, "file")
    assert not marker.exists()


def test_an_unregistered_extension_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint):
        loads(b"\x80\x02\x82\xf1.", "file")


def outcome_in_a_process(hostile: bytes, question: str) -> str:
    """What a new process prints for an expression after it has read a hostile pickle."""
    program = (
        "import sys, collections\n"
        "from ckpt.dtypes import DType\n"
        "from ckpt.errors import CkptError\n"
        "from ckpt.storage import pickle_data, safe_pickle\n"
        "try:\n"
        f"    safe_pickle.loads({hostile!r}, 'file')\n"
        "except CkptError:\n"
        "    pass\n"
        f"print({question})\n"
    )
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_pickle_cannot_change_a_dtype_for_the_rest_of_the_process() -> None:
    hostile = b"\x80\x02ctorch\nfloat32\n}" + text("_value_") + text("x") + b"sb."
    assert outcome_in_a_process(hostile, "DType.float32.value[0]") == "float32"


def test_a_pickle_cannot_change_a_class_for_the_rest_of_the_process() -> None:
    hostile = b"\x80\x02ccollections\nCounter\nN}" + text("update") + b"K\x07s\x86b."
    assert outcome_in_a_process(hostile, "callable(collections.Counter.update)") == "True"


def test_a_pickle_cannot_change_what_later_pickles_get() -> None:
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n"
    hostile = b"\x80\x02" + rebuild + b"N}" + text("__defaults__") + b"K\x07\x85s\x86b."
    question = "pickle_data.rebuild_tensor.__defaults__"
    assert outcome_in_a_process(hostile, question) == "(False, None, None, None)"


def test_a_pickle_cannot_point_a_tensor_at_another_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    storage = b"(" + text("storage") + b"ctorch\nByteStorage\n" + text("0") + text("cpu")
    place = text("path") + text(str(secret)) + text("offset") + b"K\x00"
    place += text("length") + b"K\x10" + text("crc32") + b"N"
    elsewhere = b"}" + text("record") + b"ctorch\nTensor\n}(" + place + b"ubsb"
    hostile = b"\x80\x02}" + text("w") + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage
    hostile += b"K\x10tQ" + elsewhere + b"K\x00K\x10\x85K\x01\x85\x89}tRs."
    path = torch_archive(tmp_path / "x.pt", hostile, torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(CkptError):
        torch_file.read(path)


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (-1, (1,), (1,)),
        (0, (5,), (1,)),
        (4, (1,), (1,)),
        (0, (2, 2), (3, 1)),
        (0, (2,), (-1,)),
        (3, (2,), (-9,)),
        (0, (-1,), (1,)),
        (0, (-2, -2), (1, 1)),
        (0, (2, 2), (1,)),
        (1 << 70, (1,), (1,)),
        ("0", (1,), (1,)),
        (None, (1,), (1,)),
        (0, None, None),
    ],
)
def test_a_tensor_that_reaches_out_of_its_storage_is_refused(
    offset: Any, size: Any, stride: Any
) -> None:
    storage = StorageRef(DType.float32, Record("file", 64, 16))
    with pytest.raises(CorruptCheckpoint):
        loads(rebuild_call(offset, size, stride), "file", lambda pid: storage)


def test_data_that_expands_without_end_is_refused_in_bounded_time() -> None:
    doubled = b"\x80\x02)" + b"".join(b"2\x86" for _ in range(60)) + b"."
    program = (
        "import sys; from ckpt.storage.safe_pickle import loads; "
        f"loads({doubled!r}, 'file'); print('read')"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=5, capture_output=True)
    assert b"read" in done.stdout or b"CkptError" in done.stderr or b"Corrupt" in done.stderr


# --- whole models -------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """Somebody's model, which needs its source code."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    "model", [torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)), Net()]
)
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickled_whole_model_is_refused_with_what_to_do(
    model: torch.nn.Module, is_zip: bool, tmp_path: Path
) -> None:
    with pytest.raises(UnsafePickle, match=r"x\.pt: holds a pickled whole model.*state_dict\(\)"):
        saved(model, tmp_path, _use_new_zipfile_serialization=is_zip)


def test_a_pickled_wrapper_around_a_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnsafePickle, match="pickled whole model"):
        saved({"epoch": 1, "model": torch.nn.DataParallel(Net())}, tmp_path)


# --- damage -------------------------------------------------------------------------------------

# Bits 0 and 6 only: others turn opcodes into LONG_BINPUT with a huge number, for which Python's
# own unpickler allocates gigabytes before it fails.


def complaint(read: Callable[[], Any]) -> str:
    """Empty for a result or a CkptError; else what escaped."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read()
    except CkptError:
        return ""
    except Exception as escaped:
        return f"{type(escaped).__name__}: {escaped}"
    return ""


def flipped(data: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[place % len(data)] ^= 1 << bit
    return bytes(changed)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


RICH = {
    "w": torch.arange(4.0),
    "half": torch.zeros(2, 2, dtype=torch.float16).T,
    "f8": torch.zeros(2).to(torch.float8_e5m2),
    "array": np.arange(3),
    "scalar": np.float32(1),
    "args": argparse.Namespace(path=pathlib.PurePosixPath("/a"), when=datetime.date(2026, 1, 2)),
    "set": {1},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Small files of the real tools, by what they are."""
    folder = tmp_path_factory.mktemp("files")
    torch.save(RICH, folder / "zip")
    torch.save(RICH, folder / "legacy", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file({"a": torch.zeros(2, 2)}, folder / "safetensors", {"k": "v"})
    tree = {"w": torch.zeros(2, 2), "step": 3, "none": torch.zeros(0), "list": [torch.ones(1)]}
    dcp.save(tree, storage_writer=dcp.FileSystemWriter(folder / "dcp"), no_dist=True)
    names = ("zip", "legacy", "safetensors", "dcp/.metadata", "dcp/__0_0.distcp")
    return {name: (folder / name).read_bytes() for name in names}


def read_dcp(folder: Path, metadata: bytes, data: bytes) -> Any:
    (folder / ".metadata").write_bytes(metadata)
    (folder / "__0_0.distcp").write_bytes(data)
    return read_items(folder)


def test_the_undamaged_files_are_read(files: dict[str, bytes], tmp_path: Path) -> None:
    assert torch_file.read(written(tmp_path / "x", files["zip"])).keys() == RICH.keys()
    assert torch_file.read(written(tmp_path / "x", files["legacy"])).keys() == RICH.keys()
    assert list(safetensors_file.read(written(tmp_path / "x", files["safetensors"]))[0]) == ["a"]
    assert len(read_dcp(tmp_path, files["dcp/.metadata"], files["dcp/__0_0.distcp"])) == 4


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_cut_at_any_byte_is_corrupt(protocol: int) -> None:
    tree = {name: value for name, value in RICH.items() if name not in ("w", "half", "f8")}
    data = pickle.dumps(tree, protocol if protocol < 5 else 4)
    escaped = {complaint(lambda at=at: loads(data[:at], "file")) for at in range(len(data))}
    assert escaped == {""}


@pytest.mark.parametrize("name", ["zip", "legacy"])
def test_a_torch_file_cut_at_any_byte_is_refused(
    name: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    data, path = files[name], tmp_path / "x"
    for at in range(len(data)):
        path.write_bytes(data[:at])
        with pytest.raises(CkptError):
            torch_file.read(path)


def test_a_safetensors_file_cut_at_any_byte_is_refused(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    data, path = files["safetensors"], tmp_path / "x"
    for at in range(len(data)):
        path.write_bytes(data[:at])
        with pytest.raises(CorruptCheckpoint):
            safetensors_file.read(path)


def test_dcp_metadata_cut_at_any_byte_is_refused(files: dict[str, bytes], tmp_path: Path) -> None:
    data = files["dcp/.metadata"]
    for at in range(len(data)):
        with pytest.raises(CkptError):
            read_dcp(tmp_path, data[:at], files["dcp/__0_0.distcp"])


def test_a_dcp_data_file_cut_anywhere_is_refused(files: dict[str, bytes], tmp_path: Path) -> None:
    data = files["dcp/__0_0.distcp"]
    for at in range(0, len(data), 7):
        with pytest.raises(CkptError):
            read_dcp(tmp_path, files["dcp/.metadata"], data[:at])


@pytest.mark.parametrize("bit", [0, 6])
@pytest.mark.parametrize("name", ["zip", "legacy"])
def test_a_torch_file_with_any_bit_flipped_is_read_or_refused(
    name: str, bit: int, files: dict[str, bytes], tmp_path: Path
) -> None:
    data, path = files[name], tmp_path / "x"
    escaped = {
        complaint(lambda at=at: torch_file.read(written(path, flipped(data, at, bit))))
        for at in range(len(data))
    }
    assert escaped == {""}


@pytest.mark.parametrize("bit", range(8))
def test_a_safetensors_file_with_any_bit_flipped_is_read_or_refused(
    bit: int, files: dict[str, bytes], tmp_path: Path
) -> None:
    data, path = files["safetensors"], tmp_path / "x"
    escaped = {
        complaint(lambda at=at: safetensors_file.read(written(path, flipped(data, at, bit))))
        for at in range(len(data))
    }
    assert escaped == {""}


@pytest.mark.parametrize("bit", [0, 6])
def test_dcp_metadata_with_any_bit_flipped_is_read_or_refused(
    bit: int, files: dict[str, bytes], tmp_path: Path
) -> None:
    data, items = files["dcp/.metadata"], files["dcp/__0_0.distcp"]
    escaped = {
        complaint(lambda at=at: read_dcp(tmp_path, flipped(data, at, bit), items))
        for at in range(len(data))
    }
    assert escaped == {""}


@pytest.mark.parametrize("bit", [0, 6])
def test_a_dcp_data_file_with_any_bit_flipped_is_read_or_refused(
    bit: int, files: dict[str, bytes], tmp_path: Path
) -> None:
    data = files["dcp/__0_0.distcp"]
    escaped = {
        complaint(lambda at=at: read_dcp(tmp_path, files["dcp/.metadata"], flipped(data, at, bit)))
        for at in range(0, len(data), 9)
    }
    assert escaped == {""}


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_are_read_or_refused(data: bytes) -> None:
    assert complaint(lambda: loads(b"\x80\x02" + data, "file")) == ""


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 7)), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_a_pickle_with_several_bits_flipped_is_read_or_refused(
    flips: list[tuple[int, int]],
) -> None:
    tree = {"a": np.arange(3), "b": np.float64(2), "c": OrderedDict(x=1), "d": {1, (2, "x")}}
    data = functools.reduce(lambda d, flip: flipped(d, *flip), flips, pickle.dumps(tree, 2))
    assert complaint(lambda: loads(data, "file")) == ""


def test_numpy_data_of_another_length_than_its_dtype_needs_is_corrupt() -> None:
    data = pickle.dumps(np.arange(3, dtype="f4"), 4).replace(b"f4", b"f8")
    with pytest.raises(CorruptCheckpoint):
        loads(data, "file")


def test_a_pickle_nested_too_deep_is_corrupt() -> None:
    with pytest.raises(CorruptCheckpoint):
        loads(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", "file")


def test_a_storage_where_none_can_be_is_corrupt() -> None:
    with pytest.raises(CorruptCheckpoint, match="file: the pickle points to storages"):
        loads(b"\x80\x02K\x01Q.", "file")


def test_an_empty_file_is_corrupt() -> None:
    with pytest.raises(CorruptCheckpoint, match="file"):
        loads(b"", "file")


def test_tensors_of_a_storage_share_the_view(tmp_path: Path) -> None:
    weight = torch.zeros(2)
    found = saved([weight.detach(), weight.detach(), weight[:1]], tmp_path)
    assert found[0] is found[1]
    assert isinstance(found[2], StoredTensor)
    assert found[2] is not found[0]
