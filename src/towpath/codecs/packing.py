"""What a reduction in hops makes of the pieces it sends: it leaves them as they are, or encodes them.

A hop's buffer holds one packed piece after the other. Before the first hop the pieces of a region are packed. After a
hop the buffers of all its members, which hold the same pieces, are summed: into packed pieces for the next hop, or at
last into elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Protocol, final

import torch

from towpath.codecs.kernels.dispatch import kernels_for
from towpath.codecs.watched import Watch, watched
from towpath.core.formats import NARROW, Codec, dtype_name


class Workspace(Protocol):
    """What packing asks of the workspace of a transfer."""

    watch: Watch | None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A wire buffer: the same one at every call."""
        ...


class Packing(ABC):
    """`hop`: the one that follows."""

    dtype: torch.dtype

    @abstractmethod
    def size(self, elements: int) -> int:
        """Of a packed piece, in elements of `dtype`."""

    @abstractmethod
    def pack(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, stage: int, workspace: Workspace) -> None: ...

    @abstractmethod
    def sum(
        self,
        rows: Sequence[torch.Tensor],
        lengths: Sequence[int],
        out: torch.Tensor,
        stage: int,
        hop: int,
        workspace: Workspace,
    ) -> None:
        """`lengths`: of the pieces in each row, in elements."""

    @abstractmethod
    def unpack(self, rows: Sequence[torch.Tensor], out: torch.Tensor, workspace: Workspace) -> None: ...


@final
class Plain(Packing):
    def __init__(self, dtype: torch.dtype, sum_elements: int) -> None:
        self.dtype, self._sum_elements = dtype, sum_elements

    def size(self, elements: int) -> int:
        return elements

    def pack(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, stage: int, workspace: Workspace) -> None:
        torch.cat(list(pieces), out=out[: sum(p.numel() for p in pieces)])

    def sum(
        self,
        rows: Sequence[torch.Tensor],
        lengths: Sequence[int],
        out: torch.Tensor,
        stage: int,
        hop: int,
        workspace: Workspace,
    ) -> None:
        self.unpack(rows, out[: sum(lengths)], workspace)

    def unpack(self, rows: Sequence[torch.Tensor], out: torch.Tensor, workspace: Workspace) -> None:
        narrow = dtype_name(out.dtype) in NARROW
        total = workspace.take(self._sum_elements, torch.float32)[: out.numel()] if narrow else out
        total.copy_(rows[0])
        for row in rows[1:]:
            total.add_(row)
        if narrow:
            out.copy_(total)


@final
class Encoded(Packing):
    """`kept`: what is rounded away before each hop, if it is kept: [stages, pieces, longest piece]; added the next
    time, so that in the long run nothing is lost. `seed`: of stochastic rounding; another one on every member, whose
    errors would else add up."""

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
        self.kept, self.draws = kept, Draws(seed)

    def size(self, elements: int) -> int:
        return self._codec.encoded_bytes(elements)

    def pack(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, stage: int, workspace: Workspace) -> None:
        for number, place in enumerate(self._places([p.numel() for p in pieces])):
            self._encode(pieces[number], out[place], self._error(stage, 0, number), workspace)

    def sum(
        self,
        rows: Sequence[torch.Tensor],
        lengths: Sequence[int],
        out: torch.Tensor,
        stage: int,
        hop: int,
        workspace: Workspace,
    ) -> None:
        kernels = watched(self._kernels, workspace.watch)
        for number, (place, elements) in enumerate(zip(self._places(lengths), lengths, strict=True)):
            arrived, error = [row[place] for row in rows], self._error(stage, hop, number)
            if elements == 0:
                continue
            if error is None:
                kernels.decode_sum_encode(self._codec, arrived, elements, out[place], self._next_seed())
            else:
                total = workspace.take(self._sum_elements, torch.float32)[:elements]
                kernels.decode_sum(self._codec, arrived, total)
                self._encode(total, out[place], error, workspace)

    def unpack(self, rows: Sequence[torch.Tensor], out: torch.Tensor, workspace: Workspace) -> None:
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
        self, values: torch.Tensor, out: torch.Tensor, error: torch.Tensor | None, workspace: Workspace
    ) -> None:
        n = values.numel()
        if n == 0:
            return
        kernels = watched(self._kernels, workspace.watch)
        if error is None:
            kernels.encode(self._codec, values, out, self._next_seed())
            return
        total, decoded = workspace.take(self._sum_elements, torch.float32).view(2, -1)[:, :n]
        error = error[:n]
        torch.add(values, error, out=total)  # `values` may be `total`
        kernels.encode(self._codec, total, out, self._next_seed())
        kernels.decode(self._codec, out, decoded)
        total.sub_(decoded)
        # A block that overflowed says nothing of what was rounded away: the error before it stays.
        torch.where(total.isfinite(), total, error, out=error)

    def _next_seed(self) -> int:
        return self.draws.next()


class Draws:
    """The seeds of stochastic rounding: every message has its own."""

    __slots__ = ("seed",)

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def next(self) -> int:
        self.seed = (self.seed * 0x9E3779B1 + 0x7FEB352D) & 0xFFFFFFFF
        return self.seed
