"""Kernels that tell a trace when they work; while none is taken, that costs looking at one variable a call."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from towpath.codecs.kernels.dispatch import Kernels
from towpath.spec.formats import Codec

# Called with the codec, what it does, and with how many elements; around the work.
Watch = Callable[[Codec, str, int], AbstractContextManager[None]]

# Of the running thread alone: several models may train in one process, and one of them be traced.
_watch: ContextVar[Watch | None] = ContextVar("towpath_codec_watch", default=None)


@contextmanager
def watching(watch: Watch) -> Generator[None]:
    """Inside, on this thread, watched kernels tell `watch`."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def watched(kernels: Kernels) -> Kernels:
    def encode(codec: Codec, x: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        with _telling(codec, "encode", x.numel()):
            kernels.encode(codec, x, out, seed)

    def decode(codec: Codec, message: torch.Tensor, out: torch.Tensor) -> None:
        with _telling(codec, "decode", out.numel()):
            kernels.decode(codec, message, out)

    def decode_sum(codec: Codec, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        with _telling(codec, "decode+sum", len(rows) * out.numel()):
            kernels.decode_sum(codec, rows, out)

    def decode_sum_encode(
        codec: Codec, rows: Sequence[torch.Tensor], elements: int, out: torch.Tensor, seed: int = 0
    ) -> None:
        with _telling(codec, "decode+sum+encode", len(rows) * elements):
            kernels.decode_sum_encode(codec, rows, elements, out, seed)

    return Kernels(kernels.name, encode, decode, decode_sum, decode_sum_encode)


def _telling(codec: Codec, work: str, elements: int) -> AbstractContextManager[None]:
    watch = _watch.get()
    return nullcontext() if watch is None else watch(codec, work, elements)
