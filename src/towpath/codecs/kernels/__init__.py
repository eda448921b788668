"""The kernels of a device: the C++ extension, Triton, or the reference in plain torch where neither exists.

    reference.py      plain torch       native.py        C++, on the CPU
    triton_codecs.py  Triton, on GPUs   registered.py    codecs that a user registers, on any device

The log reports once which back end a device uses, and what the slow one costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import Protocol

import torch

from towpath.codecs.kernels import reference, registered
from towpath.core.formats import Codec, registered_formats
from towpath.logs import logger

_log = logger("codecs")
# Threads may ask at the same time. Only one of them logs.
_choosing = Lock()

# A watch is called with the codec, the name of the operation, and the number of elements. It wraps the operation.
Watch = Callable[[Codec, str, int], AbstractContextManager[None]]

# The cost of the reference where kernels could run (benchmarks/results/kernels.jsonl), and the remedy.
_COST = {
    "cpu": (
        " Encoding int8 or int4 takes 30 to 120 times as long as in C++.",
        " With a C++ compiler at hand, install towpath again.",
    ),
    "cuda": (" Encoding passes over memory many times in place of once.", " Install triton."),
}


class Encode(Protocol):
    """The type of `Kernels.encode`."""

    def __call__(self, codec: Codec, x: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None: ...


class DecodeSumEncode(Protocol):
    """The type of `Kernels.decode_sum_encode`."""

    def __call__(
        self, codec: Codec, rows: Sequence[torch.Tensor], elements: int, out: torch.Tensor, seed: int = 0
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """A back end: the four functions of `reference`, and its name."""

    name: str
    encode: Encode
    decode: Callable[[Codec, torch.Tensor, torch.Tensor], None]
    decode_sum: Callable[[Codec, Sequence[torch.Tensor], torch.Tensor], None]
    decode_sum_encode: DecodeSumEncode


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels for tensors on `device`."""
    with _choosing:
        return _kernels(device.type)


@cache
def _kernels(device_type: str) -> Kernels:
    fast = {"cpu": "native", "cuda": "triton_codecs"}.get(device_type)
    if fast is None:
        return _slow(device_type, "there are no kernels for this device")
    try:
        module = import_module(f"towpath.codecs.kernels.{fast}")
    except ImportError as error:
        return _slow(device_type, str(error))
    level = f", for {module.LEVELS[0]}" if fast == "native" else ""
    _log.info("codecs on %s: %s%s", device_type, fast, level)
    return _of(module)


def _slow(device_type: str, reason: str) -> Kernels:
    cost, remedy = _COST.get(device_type, ("", ""))
    _log.warning("codecs on %s: plain torch (%s).%s%s", device_type, reason, cost, remedy)
    return _of(reference)


def _of(module: ModuleType) -> Kernels:
    """Return the functions of `module`. For registered codecs, they call the functions of the registration."""

    def chosen(codec: Codec) -> ModuleType:
        return registered if codec.name in registered_formats() else module

    def encode(codec: Codec, x: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        chosen(codec).encode(codec, x, out, seed)

    def decode(codec: Codec, data: torch.Tensor, out: torch.Tensor) -> None:
        chosen(codec).decode(codec, data, out)

    def decode_sum(codec: Codec, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        chosen(codec).decode_sum(codec, rows, out)

    def decode_sum_encode(
        codec: Codec, rows: Sequence[torch.Tensor], elements: int, out: torch.Tensor, seed: int = 0
    ) -> None:
        chosen(codec).decode_sum_encode(codec, rows, elements, out, seed)

    name = module.__name__.rpartition(".")[2]
    return Kernels(name, encode, decode, decode_sum, decode_sum_encode)


def watched(kernels: Kernels, watch: Watch | None) -> Kernels:
    """Return kernels that report each operation to `watch`. Without a watch, return `kernels` itself."""
    if watch is None:
        return kernels

    def encode(codec: Codec, x: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        with watch(codec, "encode", x.numel()):
            kernels.encode(codec, x, out, seed)

    def decode(codec: Codec, message: torch.Tensor, out: torch.Tensor) -> None:
        with watch(codec, "decode", out.numel()):
            kernels.decode(codec, message, out)

    def decode_sum(codec: Codec, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        with watch(codec, "decode+sum", len(rows) * out.numel()):
            kernels.decode_sum(codec, rows, out)

    def decode_sum_encode(
        codec: Codec, rows: Sequence[torch.Tensor], elements: int, out: torch.Tensor, seed: int = 0
    ) -> None:
        with watch(codec, "decode+sum+encode", len(rows) * elements):
            kernels.decode_sum_encode(codec, rows, elements, out, seed)

    return Kernels(kernels.name, encode, decode, decode_sum, decode_sum_encode)
