"""The kernels of a device: the C++ extension, Triton, or the reference in plain torch where neither exists.

    plain.py          plain torch, and codecs that a user registers     cpp_codecs.py  C++, on the CPU
    triton_codecs.py  Triton, on GPUs                                   pieces.py      the places of many pieces

The log reports once which back end a device uses, and what the slow one costs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import Any, final

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

# By device: the back end, what plain torch costs in its place (benchmarks/results/kernels.jsonl), and the remedy.
_FAST = {
    "cpu": (
        "cpp_codecs",
        " Encoding int8 or int4 takes 30 to 120 times as long as in C++."
        " With a C++ compiler at hand, install towpath again.",
    ),
    "cuda": ("triton_codecs", " Encoding passes over memory many times in place of once. Install triton."),
}


@final
class Kernels:
    """The codecs on one kind of device, by one back end: a module with `encode`, `decode` and functions for pieces.

    On a GPU, each method for pieces is one launch for any number of pieces and rows. Codecs with one scale for each
    message need a second one, which finds the largest values. `kept` is the error feedback of all pieces, in float32:
    it is added before the encoding, and then it becomes what the encoding rounded away. Back ends without such a
    kernel compute it in `scratch`, which has twice the elements of the longest piece, in float32.
    """

    def __init__(self, back_end: ModuleType, watch: Watch | None = None) -> None:
        self.name = back_end.__name__.rpartition(".")[2]
        self._back_end, self._watch = back_end, watch

    def watched(self, watch: Watch | None) -> Kernels:
        """Return kernels that report each operation to `watch`. Without a watch, return these."""
        return self if watch is None else Kernels(self._back_end, watch)

    def encode(self, codec: Codec, x: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        with self._reported(codec, "encode", x.numel()):
            self._chosen(codec).encode(codec, x, out, seed)

    def decode(self, codec: Codec, message: torch.Tensor, out: torch.Tensor) -> None:
        with self._reported(codec, "decode", out.numel()):
            self._chosen(codec).decode(codec, message, out)

    def encode_pieces(
        self, pieces: PieceTable, values: torch.Tensor | None, wire: torch.Tensor, *feedback: Any
    ) -> None:
        """Encode each piece of `values` into its cell of `wire`.

        Without `values`, decode each piece of all rows of `wire`, and encode the sum. `feedback` is the seed before the
        first one, and optionally `kept` and `scratch`.
        """
        operation = "decode+sum+encode" if values is None else "encode"
        self._run("encode_pieces", operation, pieces, values, wire, *feedback)

    def decode_pieces(self, pieces: PieceTable, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Decode each piece of all rows of `wire`, and sum them into the piece of `out`."""
        self._run("decode_pieces", "decode+sum", pieces, wire, out)

    def _run(self, name: str, operation: str, pieces: PieceTable, *args: Any) -> None:
        if not pieces.pieces:
            return
        back_end = self._chosen(pieces.codec)
        launch = getattr(back_end, name, None) or partial(getattr(loops, name), back_end)
        what = operation if pieces.rows > 1 else operation.replace("+sum", "")
        with self._reported(pieces.codec, what, pieces.rows * pieces.elements):
            launch(pieces, *args)

    def _chosen(self, codec: Codec) -> ModuleType:
        return plain if codec.name in registered_formats() else self._back_end

    def _reported(self, codec: Codec, operation: str, elements: int) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch(codec, operation, elements)


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels for tensors on `device`."""
    with _choosing:
        return _kernels(device.type)


@cache
def _kernels(device_type: str) -> Kernels:
    reason, (fast, cost) = "there are no kernels for this device", _FAST.get(device_type, ("", ""))
    try:
        if fast:
            module = import_module(f"towpath.codecs.kernels.{fast}")
            level = f", for {module.LEVELS[0]}" if device_type == "cpu" else ""
            _log.info("codecs on %s: %s%s", device_type, fast, level)
            return Kernels(module)
    except ImportError as error:
        reason = str(error)
    _log.warning("codecs on %s: plain torch (%s).%s", device_type, reason, cost)
    return Kernels(plain)
