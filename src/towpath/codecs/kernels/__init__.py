"""The kernels of a device: the C++ extension, Triton, or the reference in plain torch where neither exists.

    plain.py          plain torch       cpp.py           C++, on the CPU
    triton_codecs.py  Triton, on GPUs   registered.py    codecs that a user registers, on any device
    pieces.py         the places of many pieces, and loops over them

The log reports once which back end a device uses, and what the slow one costs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import Any

import torch

from towpath.codecs.kernels import pieces as loops
from towpath.codecs.kernels import plain
from towpath.codecs.kernels.pieces import PieceTable
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


@dataclass(frozen=True, slots=True)
class Kernels:
    """A back end: functions for one message, and functions for many pieces at a time.

    On a GPU, each function for pieces is one launch for any number of pieces and rows. Codecs with one scale for each
    message need a second one, which finds the largest values. `kept` is the error feedback of all pieces, in float32:
    it is added before the encoding, and then it becomes what the encoding rounded away. Back ends without such a
    kernel compute it in `scratch`, which has twice the elements of the longest piece, in float32.
    """

    name: str
    encode: Callable[..., None]  # (codec, x, out, seed=0)
    decode: Callable[[Codec, torch.Tensor, torch.Tensor], None]
    # (pieces, values, wire, seed, kept=None, scratch=None): encode each piece of `values` into its cell of `wire`.
    # `seed` is the one before the first.
    encode_pieces: Callable[..., None]
    # (pieces, wire, seed, kept=None, scratch=None): decode each piece of all rows of `wire`, sum them, and encode the
    # sum into the piece's cell.
    sum_pieces: Callable[..., None]
    # Decode each piece of all rows of `wire`, and sum them into the piece of `out`.
    decode_pieces: Callable[[PieceTable, torch.Tensor, torch.Tensor], None]


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels for tensors on `device`."""
    with _choosing:
        return _kernels(device.type)


@cache
def _kernels(device_type: str) -> Kernels:
    fast = {"cpu": "cpp", "cuda": "triton_codecs"}.get(device_type)
    if fast is None:
        return _slow(device_type, "there are no kernels for this device")
    try:
        module = import_module(f"towpath.codecs.kernels.{fast}")
    except ImportError as error:
        return _slow(device_type, str(error))
    level = f", for {module.LEVELS[0]}" if fast == "cpp" else ""
    _log.info("codecs on %s: %s%s", device_type, fast, level)
    return _of(module)


def _slow(device_type: str, reason: str) -> Kernels:
    cost, remedy = _COST.get(device_type, ("", ""))
    _log.warning("codecs on %s: plain torch (%s).%s%s", device_type, reason, cost, remedy)
    return _of(plain)


def _of(module: ModuleType) -> Kernels:
    """Return the functions of `module`. For registered codecs, they are those of the reference."""

    def chosen(codec: Codec) -> ModuleType:
        return plain if codec.name in registered_formats() else module

    def encode(codec: Codec, x: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        chosen(codec).encode(codec, x, out, seed)

    def decode(codec: Codec, data: torch.Tensor, out: torch.Tensor) -> None:
        chosen(codec).decode(codec, data, out)

    def of_pieces(name: str) -> Any:
        loop, launch = getattr(loops, name), getattr(module, name, None)

        def run(pieces: PieceTable, *args: Any) -> None:
            if pieces.pieces:
                one = chosen(pieces.codec)
                if one is module and launch is not None:
                    launch(pieces, *args)
                else:
                    loop(one, pieces, *args)

        return run

    name = module.__name__.rpartition(".")[2]
    return Kernels(
        name, encode, decode, of_pieces("encode_pieces"), of_pieces("sum_pieces"), of_pieces("decode_pieces")
    )


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

    def of_pieces(operation: str, work: Callable[..., None]) -> Any:
        def run(pieces: PieceTable, *args: Any) -> None:
            with watch(
                pieces.codec,
                operation if pieces.rows > 1 else operation.replace("+sum", ""),
                pieces.rows * pieces.elements,
            ):
                work(pieces, *args)

        return run

    return Kernels(
        kernels.name,
        encode,
        decode,
        of_pieces("encode", kernels.encode_pieces),
        of_pieces("decode+sum+encode", kernels.sum_pieces),
        of_pieces("decode+sum", kernels.decode_pieces),
    )
