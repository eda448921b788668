"""Which back end serves a device: the C++ extension, Triton, or where neither is there the oracle in plain torch.

The log says once which one, and what it costs if it is the slow one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
_choosing = Lock()  # of threads that ask at once, one logs

# What the oracle costs where kernels could serve (benchmarks/results/kernels.jsonl), and the remedy.
_COST = {
    "cpu": (
        " Encoding int8 or int4 takes 30 to 120 times as long as in C++.",
        " With a C++ compiler at hand, install towpath again.",
    ),
    "cuda": (" Encoding passes over memory many times in place of once.", " Install triton."),
}


class Encode(Protocol):
    def __call__(self, codec: Codec, x: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None: ...


class DecodeSumEncode(Protocol):
    def __call__(
        self, codec: Codec, rows: Sequence[torch.Tensor], elements: int, out: torch.Tensor, seed: int = 0
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """A back end: the four functions of `reference`."""

    name: str
    encode: Encode
    decode: Callable[[Codec, torch.Tensor, torch.Tensor], None]
    decode_sum: Callable[[Codec, Sequence[torch.Tensor], torch.Tensor], None]
    decode_sum_encode: DecodeSumEncode


def kernels_for(device: torch.device) -> Kernels:
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
    """The functions of `module`; of a registered codec those it was registered with, on any device."""

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
