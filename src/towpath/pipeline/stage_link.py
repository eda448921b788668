"""What a stage sends to its neighbour in fewer bytes: by low-rank factors, or in a codec of blocks.

Both ends are made alike, and know which messages are encoded: nothing tells them on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from zlib import crc32

import torch

from towpath.codecs.kernels import kernels_for
from towpath.codecs.low_rank import columns_of, first_factor, orthonormal, with_unit_columns
from towpath.core.formats import dtype_name, wide
from towpath.core.transport import Transport, matrix_of
from towpath.engine.layout import torch_dtype


@dataclass(frozen=True, slots=True)
class Encoding:
    """Of the tensors of one shape that a link carries by `transport`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    transport: Transport

    @property
    def used(self) -> bool:
        """Whether they travel otherwise than as they are."""
        if self.transport.low_rank is not None:
            return self.transport.low_rank.pays(self.shape)
        return self.transport.encoding is not None

    def message(self, device: torch.device) -> torch.Tensor:
        """Room for one."""
        if self.transport.low_rank is not None:
            return torch.empty(self.transport.low_rank.encoded_elements(self.shape), dtype=self.dtype, device=device)
        assert self.transport.encoding is not None
        return torch.empty(self.transport.encoding.encoded_bytes(prod(self.shape)), dtype=torch.uint8, device=device)

    def factors(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """P and Q, in its memory."""
        assert self.transport.low_rank is not None
        rows, columns = matrix_of(self.shape)
        p, q = message.split([rows * self.transport.low_rank.rank, columns * self.transport.low_rank.rank])
        return p.view(rows, -1), q.view(columns, -1)

    def decoded(self, message: torch.Tensor) -> torch.Tensor:
        if self.transport.low_rank is not None:
            p, q = self.factors(message)
            return (p @ q.T).view(self.shape)
        assert self.transport.encoding is not None
        made = torch.empty(prod(self.shape), dtype=self.dtype, device=message.device)
        kernels_for(message.device).decode(self.transport.encoding, message, made)
        return made.view(self.shape)


class Sender:
    """Encodes one tensor of a link's messages after the other. What a message misses is added to the next one that is
    encoded, in the next step if it was the last of its own (lazy error propagation)."""

    def __init__(self, encoding: Encoding, device: torch.device, label: str) -> None:
        self.encoding = encoding
        self._dtype = torch_dtype(wide(dtype_name(encoding.dtype)))
        self._seed = crc32(label.encode())
        rows, columns = matrix_of(encoding.shape)
        low_rank = encoding.transport.low_rank
        self._factor = torch.empty(columns if low_rank else 0, low_rank.rank if low_rank else 0, device=device)
        self._factor = self._factor.to(self._dtype)
        keeps = encoding.transport.feedback != "none"
        self._error = torch.empty((rows, columns) if keeps else (0, 0), dtype=self._dtype, device=device)
        self._drawn = torch.zeros(1, dtype=torch.int64)
        self.restart()

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """What it keeps from one message to the next."""
        codec = self.encoding.transport.encoding
        drawn = (self._drawn,) if codec is not None and codec.stochastic else ()
        return (*(kept for kept in (self._factor, self._error) if kept.numel()), *drawn)

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.encoding.shape, dtype=self.encoding.dtype, device=self._error.device)

    def restart(self) -> None:
        self._error.zero_()
        if self._factor.numel():
            columns, rank = self._factor.shape
            self._factor.copy_(first_factor(columns, rank, self._seed, self._dtype, self._factor.device))

    def encoded(self, tensor: torch.Tensor) -> torch.Tensor:
        message = self.encoding.message(tensor.device)
        x = tensor.detach().reshape(matrix_of(self.encoding.shape)).to(self._dtype)
        if self._error.numel():
            x = x + self._error
        if self.encoding.transport.low_rank is not None:
            finite = self._factored(x, message)
        else:
            finite = self._in_blocks(x, message)
        if self._error.numel():
            missed = x - self.encoding.decoded(message).view(x.shape).to(self._dtype)
            # What is not finite arrives so; but no later message is to hear of it.
            self._error.copy_(torch.where(finite, missed, self._error))
        return message

    def _factored(self, x: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        p, q = self.encoding.factors(message)
        basis = orthonormal(columns_of(x, self._factor))
        factor = columns_of(x.T, basis)
        p.copy_(basis)
        q.copy_(factor)
        finite = message.isfinite().all()
        self._factor.copy_(torch.where(finite, with_unit_columns(factor, self._factor), self._factor))
        return finite

    def _in_blocks(self, x: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        codec = self.encoding.transport.encoding
        assert codec is not None
        self._drawn += 1
        values = x.to(self.encoding.dtype).reshape(-1)
        kernels_for(x.device).encode(codec, values, message, self._seed + int(self._drawn))
        return values.isfinite().all()
