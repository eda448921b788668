"""The codecs in C++, for tensors on the CPU. They equal `plain` to the bit, and run on one thread.

Importing this file fails where the extension was not built. The codecs then run in plain torch, and the log says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from towpath.codecs.kernels import _native
from towpath.core.formats import Codec, dtype_name

# The processor levels that the extension was compiled for and that this processor runs, best first.
LEVELS = tuple(_native.levels())


def encode(codec: Codec, x: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
    """Encode as `plain.encode` does. Tensors that are not contiguous are copied first."""
    x = x.contiguous()
    _check(x)
    _check_message(codec, out, x.numel())
    _coder(codec).encode(x.data_ptr(), dtype_name(x.dtype), x.numel(), out.data_ptr(), seed & 0xFFFFFFFF)


def decode(codec: Codec, data: torch.Tensor, out: torch.Tensor) -> None:
    decode_sum(codec, (data,), out)


def decode_sum(codec: Codec, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    _check(out)
    for row in rows:
        _check_message(codec, row, out.numel())
    addresses = [row.data_ptr() for row in rows]
    _coder(codec).decode_sum(addresses, out.numel(), out.data_ptr(), dtype_name(out.dtype))


def decode_sum_encode(
    codec: Codec, rows: Sequence[torch.Tensor], elements: int, out: torch.Tensor, seed: int = 0
) -> None:
    for message in (*rows, out):
        _check_message(codec, message, elements)
    addresses = [row.data_ptr() for row in rows]
    _coder(codec).decode_sum_encode(addresses, elements, out.data_ptr(), seed & 0xFFFFFFFF)


@cache
def _coder(codec: Codec, level: str = LEVELS[0]) -> _native.Coder:
    return _native.Coder(codec.name, codec.block, codec.hadamard, codec.stochastic, level)


def _check_message(codec: Codec, message: torch.Tensor, elements: int) -> None:
    _check(message)
    assert message.dtype == torch.uint8 and message.numel() == codec.encoded_bytes(elements), (codec, message.shape)


def _check(tensor: torch.Tensor) -> None:
    """Check the layout. The extension only gets an address, so another layout would access other memory."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), (tensor.device, tensor.shape, tensor.stride())


class ExactKernels:
    """The exact codecs of one processor level. They equal `exact.specification` to the bit."""

    def __init__(self, level: str) -> None:
        self._coders = {name: _native.ExactCoder(name, level) for name in ("bfloat16", "float16", "float32")}

    def digest(self, values: torch.Tensor, first: int) -> int:
        return self._coders["float32"].digest(values.data_ptr(), values.nbytes, first)

    def encode(self, old: torch.Tensor | None, values: torch.Tensor, out: torch.Tensor) -> int:
        """Write the table and the payloads into `out`. Return their bytes."""
        coder = self._coders[dtype_name(values.dtype)]
        return coder.encode(0 if old is None else old.data_ptr(), values.data_ptr(), values.numel(), out.data_ptr())

    def decode(self, body: torch.Tensor, values: torch.Tensor, difference: bool) -> bool:
        """Decode the table and the payloads into `values`. Return whether the content is possible."""
        coder = self._coders[dtype_name(values.dtype)]
        return coder.decode(difference, body.data_ptr(), body.numel(), values.data_ptr(), values.numel())
