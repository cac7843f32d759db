"""Wrappers around everything of torch that takes a device, so that CUDA devices mean the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins
from torch.utils import _device as device_context

from migrate.runner.devices import FLEET, called_by_torch, index_of, is_cuda, to_cpu

jit_builtins: Any = _builtins
FACTORIES = (
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty",
    "empty_like", "empty_permuted", "empty_strided", "eye", "full", "full_like",
    "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "normal",
    "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm", "range", "scalar_tensor", "sparse_coo_tensor",
    "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
METHODS = (
    "new_tensor", "new_full", "new_empty", "new_ones", "new_zeros", "new_empty_strided",
    "new",
)  # fmt: skip


def wrap_tensors() -> None:
    """Wrap the functions that make tensors and the methods that move them."""
    device_context._device_constructors()  # cached by identity, before the names change
    for name in FACTORIES:
        _wrap_factory(torch, name)
    for name in ("fftfreq", "rfftfreq"):
        _wrap_factory(torch.fft, name)
    for name in METHODS:
        _wrap_factory(torch.Tensor, name)
    _wrap_moves()
    _wrap_questions()
    _wrap_default_device()
    _wrap_storages()
    torch.load = _load_on_cpu(torch.load)


def wrap_modules() -> None:
    """Wrap nn.Module's methods; `cuda` and `cpu` call the tensors' own."""
    move, empty = torch.nn.Module.to, torch.nn.Module.to_empty

    @functools.wraps(move)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return move(self, *_first_to_cpu(args), **_device_to_cpu(kwargs))

    @functools.wraps(empty)
    def to_empty(self: Any, *, device: Any, recurse: bool = True) -> Any:
        return empty(self, device=to_cpu(device), recurse=recurse)

    torch.nn.Module.to = to  # type: ignore[method-assign]
    torch.nn.Module.to_empty = to_empty  # type: ignore[method-assign]


def _first_to_cpu(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (to_cpu(args[0]), *args[1:]) if args else args


def _device_to_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": to_cpu(kwargs["device"])} if "device" in kwargs else kwargs


def _wrap_factory(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        return original(*args, **_device_to_cpu(kwargs))

    setattr(owner, name, factory)
    operator = jit_builtins._find_builtin(original)
    if operator is not None:  # torch.jit.script finds functions by identity
        jit_builtins._register_builtin(factory, operator)


def _wrap_moves() -> None:
    move, cast, copy_to_cpu = torch.Tensor.to, torch.Tensor.type, torch.Tensor.cpu

    @functools.wraps(move)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        target = kwargs["device"] if "device" in kwargs else (args[0] if args else None)
        moved = move(self, *_first_to_cpu(args), **_device_to_cpu(kwargs))
        leaves = isinstance(target, str | torch.device) and str(target) == "cpu"
        if moved is self and leaves and not self.requires_grad and not called_by_torch():
            return self.clone()
        return moved

    @functools.wraps(copy_to_cpu)
    def cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A copy, as when a tensor leaves a GPU: a kept state must not follow training."""
        moved = copy_to_cpu(self, *args, **kwargs)
        return self.clone() if moved is self and not called_by_torch() else moved

    @functools.wraps(torch.Tensor.cuda)
    def cuda(self: Any, device: Any = None, *_args: Any, **_kwargs: Any) -> Any:
        index_of(device)
        return self

    @functools.wraps(cast)
    def to_type(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return cast(self, dtype, *args, **kwargs)

    tensor: Any = torch.Tensor
    tensor.to, tensor.cpu, tensor.cuda, tensor.type = to, cpu, cuda, to_type
    tensor.pin_memory = lambda self, *_args, **_kwargs: self
    tensor.record_stream = lambda self, stream: None


def _wrap_questions() -> None:
    """Scripts hear that their tensors are on a GPU; torch, which would act on it, does not."""
    tensor: Any = torch.Tensor
    truly_cuda, true_index = torch.Tensor.is_cuda, torch.Tensor.get_device

    def is_cuda_here(self: Any) -> bool:
        return not called_by_torch() or truly_cuda.__get__(self)  # type: ignore[attr-defined]

    def get_device(self: Any) -> int:
        return true_index(self) if called_by_torch() else FLEET.current

    tensor.is_cuda, tensor.get_device = property(is_cuda_here), get_device


def _wrap_default_device() -> None:
    """Reaches torch.set_default_device and `with torch.device("cuda")`."""
    start = device_context.DeviceContext.__init__

    def on_cpu(self: Any, device: Any) -> None:
        start(self, to_cpu(device))

    device_context.DeviceContext.__init__ = on_cpu  # type: ignore[method-assign]


def _wrap_storages() -> None:
    """For `torch.load(map_location=lambda storage, location: storage.cuda(0))`."""

    def stay(self: Any, device: Any = None, *_args: Any, **_kwargs: Any) -> Any:
        index_of(device)
        return self

    for storage in (torch.UntypedStorage, torch.TypedStorage):
        storage.cuda = stay  # type: ignore[method-assign]


def _load_on_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, _location(map_location), *args, **kwargs)

    return on_cpu


def _location(wanted: Any) -> Any:
    if wanted is None:  # files may have been written on a real GPU
        return "cpu"
    if isinstance(wanted, dict):
        return {old: str(to_cpu(new)) for old, new in wanted.items()}
    return str(to_cpu(wanted)) if is_cuda(wanted) else wanted
