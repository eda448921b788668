"""A device "cuda:0" for a build of PyTorch without CUDA: its memory is the host's, and the kernels are the CPU's.

Tensors there are ordinary: `type(t) is torch.Tensor`, `t.is_cuda`, `t.device == cuda:0`. PyTorch dispatches them with
the keys of CUDA, runs their backward passes on autograd's device thread, and refuses to mix them with tensors on the
host. Their values are real. So code for GPUs runs as it is, and what it computes can be compared.

PyTorch's FakeTensor would not do. It has no values, so a step that reads a size or a digest on the host ends there. It
is a subclass of Tensor, which `shard()` refuses and `.data` loses. A build without CUDA cannot run a backward pass
through it. A device type of our own (PrivateUse1) would not be "cuda", which the branches ask for.

`device.cpp` adds the memory and the device guard. Here every operator gets a kernel: the fallback for the dispatch key
CUDA takes the memory of its tensors as tensors on the CPU, calls the operator with them, and hands its results back.
Views share memory, so the CPU's own kernels make them. A real device has more: an order of its own. Here work is done
when it is submitted. `tests/order` checks the order.
"""

# Operators are objects that PyTorch generates, and this file registers kernels for them.
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_map_only

_SOURCE = Path(__file__).with_name("device.cpp")
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# Operators whose result the host has to see before it can go on, because their shape or value depends on data.
_READ_BY_HOST = {
    *("_local_scalar_dense", "equal", "is_nonzero", "item", "nonzero", "masked_select", "repeat_interleave.Tensor"),
    *("unique_consecutive", "_unique2", "unique_dim", "bincount", "histc", "linalg_eigh"),
}
# Kernels that change where a tensor is in memory, and not what lies there.
_IN_PLACE = {"set_", "resize_", "resize_as_"}
# On a GPU they take indices from the host: they copy them to the device first, and wait.
_TAKE_HOST_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


# A function for `sys.settrace` on each thread after its first operator: autograd's threads are not Python's own.
# Operators themselves run without it, because it would make them several times slower.
trace: Callable[..., Any] | None = None


def _untraced(operate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(operate)
    def call(*args: Any, **kwargs: Any) -> Any:
        if trace is None:
            return operate(*args, **kwargs)
        sys.settrace(None)
        try:
            return operate(*args, **kwargs)
        finally:
            sys.settrace(trace)

    return call


@cache
def library() -> ctypes.CDLL:
    """Return the library of `device.cpp`. It is compiled once for each version of PyTorch."""
    root = Path(torch.__file__).parent
    what = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"towpath-fake-cuda-{what}.so")
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}")
        includes = [f"-I{root / folder}" for folder in ("include", "include/torch/csrc/api/include")]
        links = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O0", "-fPIC", "-shared", *includes, str(_SOURCE)]
        subprocess.run([*command, "-o", str(made), *links], check=True)
        made.replace(path)  # another process may compile it at the same time
    loaded = ctypes.CDLL(str(path))
    loaded.fake_cuda_stream.restype = ctypes.c_int64
    loaded.fake_cuda_use_stream.argtypes = [ctypes.c_int64]
    loaded.fake_cuda_resize.argtypes = [ctypes.c_int64, ctypes.c_int64]
    return loaded


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor on the device as a tensor on the CPU."""
    return torch.ops.fake_cuda.moved(tensor, False) if tensor.is_cuda else tensor


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor on the CPU as a tensor on the device."""
    return tensor if tensor.is_cuda else torch.ops.fake_cuda.moved(tensor, True)


@dataclass(frozen=True, slots=True)
class _Operator:
    """What the fallback has to know of an operator."""

    is_view: bool
    in_place: bool
    tensors: tuple[int, ...]  # the positions of its parameters that are tensors
    written: tuple[tuple[int, str], ...]  # the positions and names of the arguments that it writes
    takes_host_scalars: bool
    takes_host_indices: bool
    is_read_by_host: bool

    @staticmethod
    @cache
    def of(op: Any) -> _Operator:
        name = op._schema.name.partition("::")[2]
        aliases = [a.alias_info for a in op._schema.arguments]
        overloads = [getattr(op.overloadpacket, each) for each in op.overloadpacket.overloads()]
        return _Operator(
            is_view=any(alias is not None and not alias.is_write for alias in aliases),
            in_place=name in _IN_PLACE,
            tensors=tuple(i for i, a in enumerate(op._schema.arguments) if str(a.type) == "Tensor"),
            written=tuple((i, a.name) for i, a in enumerate(op._schema.arguments) if a.alias_info is not None),
            takes_host_scalars=any(torch.Tag.pointwise in each.tags for each in overloads) or name == "fill_",
            takes_host_indices=name in _TAKE_HOST_INDICES,
            is_read_by_host=name in _READ_BY_HOST or f"{name}.{op._overloadname}" in _READ_BY_HOST,
        )


class Device:
    """The operators of the device. `on_wait` is called with the reason whenever the host would wait for the device."""

    def __init__(self, on_wait: Callable[[str], None]) -> None:
        self._on_wait = on_wait
        self.launched = 0  # operations so far, views not among them

    @_untraced
    def run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operator that has at least one argument on the device, or makes a tensor there."""
        known = _Operator.of(op)
        if known.is_view or known.in_place:
            return op.redispatch(_CPU, *args, **kwargs)
        self.launched += 1
        self._check(op, known, args, kwargs)
        originals: dict[int, torch.Tensor] = {}  # by the number of their copies on the host

        def lent(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_cuda:
                return tensor
            alias = on_host(tensor)
            originals[id(alias)] = tensor
            lent_out.append(alias)
            return alias

        lent_out: list[torch.Tensor] = []
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        on_cpu, named = _mapped(lent, args), _mapped(lent, kwargs)
        if any(argument.name == "device" for argument in op._schema.arguments):
            named["device"] = torch.device("cpu")
        # PyTorch hands numbers over as they are, also to parameters that are tensors. Another overload takes them.
        has_number = any(i < len(args) and isinstance(args[i], (int, float)) for i in known.tensors)
        out = (op.overloadpacket if has_number else op)(*on_cpu, **named)
        for position, name in known.written:
            for alias in _tensors(on_cpu[position] if position < len(on_cpu) else named.get(name)):
                if id(alias) in originals:
                    _take_shape(originals[id(alias)], alias)
        return _mapped(lambda t: originals[id(t)] if id(t) in originals else on_device(t), out)

    def _check(self, op: Any, known: _Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise for tensors on two devices, and report if the host waits for the result."""
        if known.is_read_by_host:
            self._on_wait(str(op))
        found = list(_tensors((args, kwargs)))
        if known.takes_host_indices:
            masks = [t for t in found[1:] if t.dtype in (torch.bool, torch.uint8)]
            if masks or not all(t.is_cuda for t in found):
                self._on_wait(f"{op} with {'a mask' if masks else 'indices on the host'}")
        host = [t for t in found if not t.is_cuda and (t.dim() or not known.takes_host_scalars)]
        if host and not known.takes_host_indices:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                f"{host[0].device}! ({op} of {', '.join(f'{tuple(t.shape)} on {t.device}' for t in found)})"
            )

    @_untraced
    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Copy between the device and the host, or inside the device."""
        self.launched += 1
        if target.is_cuda != source.is_cuda:
            if not non_blocking:
                self._on_wait(f"a blocking copy {_direction(target)}")
            elif source.is_cuda and not target.is_pinned():
                self._on_wait(f"a copy {_direction(target)} that is not page-locked")
        on_host(target).copy_(on_host(source))
        return target


def _direction(target: torch.Tensor) -> str:
    return "to the device" if target.is_cuda else "to host memory"


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Apply `change` to each tensor among the arguments or results of an operator.

    PyTorch's own functions for trees take most of the time of a small operator.
    """
    if isinstance(values, torch.Tensor):
        return change(values)
    kind = type(values)
    if kind is tuple or kind is list:
        return kind(_mapped(change, value) for value in values)
    if kind is dict:
        return {name: _mapped(change, value) for name, value in values.items()}
    return tree_map_only(torch.Tensor, change, values) if isinstance(values, tuple) else values


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _mapped(note, values)
    return found


def _take_shape(original: torch.Tensor, alias: torch.Tensor) -> None:
    """Give `original` the shape and the values of `alias`, which an operator may have resized."""
    if original.shape == alias.shape and original.data_ptr() == alias.data_ptr():
        return
    torch.ops.aten.resize_.default.redispatch(_CPU, original, list(alias.shape))
    on_host(original).copy_(alias)


@contextmanager
def operators(device: Device) -> Generator[None]:
    """Let `device` run every operator on tensors of the device, on all threads."""
    library().fake_cuda_start()
    resized = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if not storage.is_cuda:
            return resized(storage, nbytes)
        library().fake_cuda_resize(storage._cdata, nbytes)
        return storage

    fallback = torch.library.Library("_", "IMPL")
    copies = torch.library.Library("aten", "IMPL")
    try:
        fallback.fallback(device.run, "CUDA")
        # PyTorch has a kernel for all devices, which would look for the parts of CUDA.
        copies.impl("copy_", device.copy, "CUDA")
        copies.impl("record_stream", lambda tensor, stream: None, "CUDA")  # the allocator waits for nothing
        with mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield
    finally:
        for made in (fallback, copies):
            made._destroy()
