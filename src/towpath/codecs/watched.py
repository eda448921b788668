"""Kernels that tell a trace when they work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from towpath.codecs.kernels.dispatch import Kernels
from towpath.core.formats import Codec

# Called with the codec, what it does, and with how many elements; around the work.
Watch = Callable[[Codec, str, int], AbstractContextManager[None]]


def watched(kernels: Kernels, watch: Watch | None) -> Kernels:
    """The kernels themselves, where nobody watches."""
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
