"""A stand-in for CUDA on a machine without it: every CUDA device is the CPU.

`torch.device("cuda", 0)` stays what it is, prints and compares as always; what takes a device is
wrapped so that the work lands on the CPU. The wrappers sit on torch's own names, not in a
TorchFunctionMode: a mode is off in other threads and inside `Tensor.backward`.
"""

from __future__ import annotations

import functools
import time
import warnings
from types import SimpleNamespace
from typing import Any

import torch

from migrate.runner.devices import FLEET, index_of
from migrate.runner.tensors import wrap_modules, wrap_tensors

GIB = 2**30
NOTHING = (
    "synchronize", "empty_cache", "ipc_collect", "init", "_lazy_init", "manual_seed",
    "manual_seed_all", "seed", "seed_all", "reset_peak_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached", "set_sync_debug_mode",
    "reset_accumulated_memory_stats", "set_per_process_memory_fraction", "set_stream",
    "_lazy_call",
)  # fmt: skip
ZERO = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "memory_cached", "max_memory_cached", "utilization", "initial_seed",
    "get_sync_debug_mode",
)  # fmt: skip


def install(devices: int) -> None:
    """Pretend `devices` GPUs for this process; nothing where CUDA is really there."""
    if torch.cuda.is_available():
        return
    FLEET.count, FLEET.current = devices, 0
    wrap_tensors()
    wrap_modules()
    _replace_queries()
    _replace_memory()
    _replace_randomness()
    _replace_streams()
    _replace_legacy_types()
    _disable_autocast()
    _compile_eagerly()
    warnings.filterwarnings("ignore", message=".*pin_memory.*no accelerator is found")


class Event:
    """torch.cuda.Event: the moment when it was recorded, by this process's clock."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.moment_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.moment_s = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.moment_s - self.moment_s) * 1000

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


class Stream:
    """torch.cuda.Stream: everything has been done by the time that anybody asks."""

    cuda_stream = 0

    def __init__(self, device: Any = None, *_args: Any, **_kwargs: Any) -> None:
        self.device = torch.device("cuda", index_of(device))

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_error: object) -> None: ...


class _Device:
    """torch.cuda.device: the current device within a block."""

    def __init__(self, device: Any) -> None:
        wanted = None if isinstance(device, torch.device) and device.type == "cpu" else device
        self.idx, self.previous = index_of(wanted), 0

    def __enter__(self) -> _Device:
        self.previous, FLEET.current = FLEET.current, self.idx
        return self

    def __exit__(self, *_error: object) -> None:
        FLEET.current = self.previous


class _DeviceOf(_Device):
    """torch.cuda.device_of: no tensor has a device of its own here."""

    def __init__(self, _tensor: Any) -> None:
        super().__init__(None)


class _StreamBlock:
    """torch.cuda.stream, which also takes None."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        return self.stream

    def __exit__(self, *_error: object) -> None: ...


class _GeneratorType(type):
    """Makes real generators, on the CPU, so that isinstance and torch's own checks hold."""

    real: type = torch.Generator

    def __call__(cls, device: Any = "cpu") -> Any:
        # A fresh generator has the same first seed wherever it lives.
        wanted = "cpu" if torch.device(device).type == "cuda" else device
        return cls.real(wanted)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)


def _set_device(device: Any) -> None:
    FLEET.current = index_of(device)


def _properties(device: Any = None) -> SimpleNamespace:
    name = f"Stand-in {index_of(device)}"
    return SimpleNamespace(
        name=name, major=8, minor=0, total_memory=16 * GIB, multi_processor_count=1
    )


def _replace_queries() -> None:
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: FLEET.count
    cuda.current_device = lambda: FLEET.current
    cuda.set_device = _set_device
    cuda.get_device_name = lambda device=None: _properties(device).name
    cuda.get_device_properties = _properties
    cuda.get_device_capability = lambda device=None: (8, 0)
    cuda.get_arch_list = lambda: ["sm_80"]
    cuda.is_bf16_supported = lambda *_args, **_kwargs: True
    cuda.can_device_access_peer = lambda *_args: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.device, cuda.device_of = _Device, _DeviceOf
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.nvtx.mark = lambda *_args: 0


def _replace_memory() -> None:
    for name in NOTHING:
        setattr(torch.cuda, name, lambda *_args, **_kwargs: None)
    for name in ZERO:
        setattr(torch.cuda, name, lambda *_args, **_kwargs: 0)
    cuda: Any = torch.cuda
    cuda.memory_stats = lambda device=None: {}
    cuda.memory_summary = lambda *_args, **_kwargs: ""
    cuda.mem_get_info = lambda device=None: (16 * GIB, 16 * GIB)


def _replace_randomness() -> None:
    """CUDA's own random state is a constant: what it would draw is drawn on the CPU."""
    cuda: Any = torch.cuda
    state = torch.zeros(16, dtype=torch.uint8)
    cuda.get_rng_state = lambda device="cuda": state.clone()
    cuda.get_rng_state_all = lambda: [state.clone() for _ in range(FLEET.count)]
    cuda.set_rng_state = lambda new_state, device="cuda": None
    cuda.set_rng_state_all = lambda new_states: None
    cuda.default_generators = (torch.default_generator,) * FLEET.count
    torch.Generator = _GeneratorType("Generator", (), {})  # type: ignore[assignment,misc]


def _replace_streams() -> None:
    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream, cuda.stream = Event, Stream, _StreamBlock
    cuda.StreamContext = _StreamBlock
    cuda.current_stream = cuda.default_stream = Stream


def _replace_legacy_types() -> None:
    for name in dir(torch.cuda):
        if name.endswith(("Tensor", "Storage")) and hasattr(torch, name):
            setattr(torch.cuda, name, getattr(torch, name))
    set_default = torch.set_default_tensor_type

    @functools.wraps(set_default)
    def on_cpu(kind: Any, /) -> None:
        set_default(kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind)

    torch.set_default_tensor_type = on_cpu


def _disable_autocast() -> None:
    """CUDA's autocast computes in fp32 here, so that two runs can be compared closely.

    GradScaler needs nothing: its scales are powers of two, and fp32 does not overflow.
    """
    start = torch.autocast.__init__

    @functools.wraps(start)
    def start_disabled(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type != "cuda":
            start(self, device_type, *args, **kwargs)
            return
        start(self, "cpu", dtype=torch.bfloat16, enabled=False)

    torch.autocast.__init__ = start_disabled  # type: ignore[method-assign]


def _compile_eagerly() -> None:
    """torch.compile wraps the model and its names as ever, and compiles nothing."""
    compile_really = torch.compile

    @functools.wraps(compile_really)
    def eagerly(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.set_stance("force_eager")
        return compile_really(*args, **kwargs)

    torch.compile = eagerly
