"""The messages of a reduction in hops: pieces of a region, sent as they are or encoded.

A hop's buffer holds packed pieces one after another. The pieces of a region are packed before the first hop. Each
member of a hop receives buffers with the same pieces, and sums them. The sums are packed for the next hop, or unpacked
into elements after the last one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Protocol, final

import torch

from towpath.codecs.kernels import Watch, kernels_for, watched
from towpath.core.formats import NARROW, Codec, dtype_name


class PackingBuffers(Protocol):
    """The part of a transfer's workspace that packing uses."""

    watch: Watch | None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the wire buffer. Every call returns the same memory."""
        ...


class Packing(ABC):
    """How the pieces of a reduction are written into messages. `hop` is the number of the next hop."""

    dtype: torch.dtype

    @abstractmethod
    def size(self, elements: int) -> int:
        """Return the size of a packed piece of `elements` elements, in elements of `dtype`."""

    @abstractmethod
    def pack(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, stage: int, workspace: PackingBuffers) -> None:
        """Pack pieces of a region into `out`."""

    @abstractmethod
    def sum(
        self,
        rows: Sequence[torch.Tensor],
        lengths: Sequence[int],
        out: torch.Tensor,
        stage: int,
        hop: int,
        workspace: PackingBuffers,
    ) -> None:
        """Sum the pieces of all rows, and pack the sums into `out`. `lengths` are the pieces' numbers of elements."""

    @abstractmethod
    def unpack(self, rows: Sequence[torch.Tensor], out: torch.Tensor, workspace: PackingBuffers) -> None:
        """Sum the piece of all rows into the elements of `out`."""


@final
class PlainPacking(Packing):
    """Pieces in their dtype. Sums of narrow dtypes are computed in float32."""

    def __init__(self, dtype: torch.dtype, sum_elements: int) -> None:
        self.dtype, self._sum_elements = dtype, sum_elements

    def size(self, elements: int) -> int:
        return elements

    def pack(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, stage: int, workspace: PackingBuffers) -> None:
        torch.cat(list(pieces), out=out[: sum(p.numel() for p in pieces)])

    def sum(
        self,
        rows: Sequence[torch.Tensor],
        lengths: Sequence[int],
        out: torch.Tensor,
        stage: int,
        hop: int,
        workspace: PackingBuffers,
    ) -> None:
        self.unpack(rows, out[: sum(lengths)], workspace)

    def unpack(self, rows: Sequence[torch.Tensor], out: torch.Tensor, workspace: PackingBuffers) -> None:
        narrow = dtype_name(out.dtype) in NARROW
        total = workspace.take(self._sum_elements, torch.float32)[: out.numel()] if narrow else out
        total.copy_(rows[0])
        for row in rows[1:]:
            total.add_(row)
        if narrow:
            out.copy_(total)


@final
class EncodedPacking(Packing):
    """Pieces encoded by a codec, with optional error feedback.

    Args:
        codec: The codec.
        device: The device of the pieces.
        sum_elements: The number of elements of the buffer for sums.
        kept: For each hop, the rounding errors that are added before the next encoding, or None without error feedback.
            Their shape is [stages, pieces, longest piece].
        seed: The seed of stochastic rounding. Members need different seeds, or their errors would add up.
    """

    dtype = torch.uint8

    def __init__(
        self,
        codec: Codec,
        device: torch.device,
        sum_elements: int,
        kept: Sequence[torch.Tensor | None],
        seed: int,
    ) -> None:
        self._codec, self._kernels, self._sum_elements = codec, kernels_for(device), sum_elements
        self.kept, self.seeds = kept, RoundingSeeds(seed)

    def size(self, elements: int) -> int:
        return self._codec.encoded_bytes(elements)

    def pack(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, stage: int, workspace: PackingBuffers) -> None:
        for number, place in enumerate(self._places([p.numel() for p in pieces])):
            self._encode(pieces[number], out[place], self._error(stage, 0, number), workspace)

    def sum(
        self,
        rows: Sequence[torch.Tensor],
        lengths: Sequence[int],
        out: torch.Tensor,
        stage: int,
        hop: int,
        workspace: PackingBuffers,
    ) -> None:
        kernels = watched(self._kernels, workspace.watch)
        for number, (place, elements) in enumerate(zip(self._places(lengths), lengths, strict=True)):
            arrived, error = [row[place] for row in rows], self._error(stage, hop, number)
            if elements == 0:
                continue
            if error is None:
                kernels.decode_sum_encode(self._codec, arrived, elements, out[place], self.seeds.next())
            else:
                total = workspace.take(self._sum_elements, torch.float32)[:elements]
                kernels.decode_sum(self._codec, arrived, total)
                self._encode(total, out[place], error, workspace)

    def unpack(self, rows: Sequence[torch.Tensor], out: torch.Tensor, workspace: PackingBuffers) -> None:
        if out.numel():
            sent = [row[: self.size(out.numel())] for row in rows]
            watched(self._kernels, workspace.watch).decode_sum(self._codec, sent, out)

    def _places(self, lengths: Sequence[int]) -> Iterator[slice]:
        ends = accumulate(map(self.size, lengths), initial=0)
        return (slice(start, end) for start, end in pairwise(ends))

    def _error(self, stage: int, hop: int, number: int) -> torch.Tensor | None:
        kept = self.kept[hop]
        return None if kept is None else kept[stage, number]

    def _encode(
        self, values: torch.Tensor, out: torch.Tensor, error: torch.Tensor | None, workspace: PackingBuffers
    ) -> None:
        n = values.numel()
        if n == 0:
            return
        kernels = watched(self._kernels, workspace.watch)
        if error is None:
            kernels.encode(self._codec, values, out, self.seeds.next())
            return
        total, decoded = workspace.take(self._sum_elements, torch.float32).view(2, -1)[:, :n]
        error = error[:n]
        torch.add(values, error, out=total)  # `values` may be `total`
        kernels.encode(self._codec, total, out, self.seeds.next())
        kernels.decode(self._codec, out, decoded)
        total.sub_(decoded)
        # A block that overflowed has no useful rounding error, so the previous error is kept.
        torch.where(total.isfinite(), total, error, out=error)


class RoundingSeeds:
    """The seeds of stochastic rounding. Each message has a new one."""

    __slots__ = ("seed",)

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def next(self) -> int:
        """Return the seed of the next message."""
        self.seed = (self.seed * 0x9E3779B1 + 0x7FEB352D) & 0xFFFFFFFF
        return self.seed
