"""The exact codecs in C++, for tensors on the CPU. They equal `specification` to the bit, and run on one thread.

Importing this file fails where the extension was not built.
"""

from __future__ import annotations

from functools import cache

import torch

from towpath.codecs.kernels import _native
from towpath.core.formats import dtype_name


class Native:
    """The kernels of one processor level."""

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


@cache
def best() -> Native:
    return Native(_native.levels()[0])
