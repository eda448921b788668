"""The messages of a reduction in hops: pieces of a region, sent as they are or encoded.

The wire buffer has a cell for each piece. A packing packs the pieces of a region into cells before the first hop. Each
member of a hop receives rows with the same pieces. `sum` adds them up and packs the sums for the next hop, and `unpack`
writes them into elements after the last one. Where everything is in memory is settled when the collective is made:
`table` returns it for pieces that are handled together. Places in the wire buffer, and the `stride` between rows, are
in elements of the packing's `dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar, final

import torch

from towpath.codecs.kernels import Watch, kernels_for
from towpath.codecs.kernels.pieces import PiecePlace, PieceTable
from towpath.core.formats import NARROW, Codec, dtype_name

T = TypeVar("T")


class PackingBuffers(Protocol):
    """The part of a transfer's workspace that packing uses."""

    watch: Watch | None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the wire buffer. Every call returns the same memory."""
        ...


@dataclass(frozen=True, slots=True)
class _PieceGrid:
    """Pieces of equal length at equal distances, in two levels, so that one call handles all of them."""

    piece: PiecePlace  # the first one
    counts: tuple[int, int]  # the number of pieces in each level
    # For each level, the distances between the starts, sources and targets of pieces.
    steps: tuple[tuple[int, int, int], tuple[int, int, int]]
    rows: tuple[int, int]  # how many rows are summed, and the elements from one to the next

    def of(self, flat: torch.Tensor, field: int, *lead: tuple[int, int]) -> torch.Tensor:
        """Return a view of the pieces, by their starts (0), sources (1) or targets (2) in `flat`.

        `lead` has the size and the stride of a dimension before them.
        """
        first = _places(self.piece)[field] + flat.storage_offset()
        sizes = (*(size for size, _ in lead), *self.counts, self.piece.length)
        strides = (*(stride for _, stride in lead), *(step[field] for step in self.steps), 1)
        return flat.as_strided(sizes, strides, first)


@final
class UncompressedPacking:
    """Pieces in their dtype. Sums of narrow dtypes are computed in float32.

    On a CPU, rows are summed in their order. On a GPU, one call sums all rows, in an order that depends on the shape.
    """

    def __init__(self, dtype: torch.dtype, sum_elements: int) -> None:
        self.dtype, self._sum_elements = dtype, sum_elements
        self._narrow = dtype_name(dtype) in NARROW

    def table(self, pieces: Sequence[PiecePlace], rows: int = 1, stride: int = 0) -> tuple[_PieceGrid, ...]:
        return tuple(_grids([piece for piece in pieces if piece.length], (rows, stride)))

    def pack(
        self, table: Sequence[_PieceGrid], region: torch.Tensor, wire: torch.Tensor, workspace: PackingBuffers
    ) -> None:
        for grid in table:
            grid.of(wire, 2).copy_(grid.of(region, 0))

    def sum(self, table: Sequence[_PieceGrid], hop: int, wire: torch.Tensor, workspace: PackingBuffers) -> None:
        for grid in table:
            self._sum(grid.of(wire, 1, grid.rows), grid.of(wire, 2), workspace)

    def unpack(
        self, table: Sequence[_PieceGrid], wire: torch.Tensor, out: torch.Tensor, workspace: PackingBuffers
    ) -> None:
        for grid in table:
            self._sum(grid.of(wire, 1, grid.rows), grid.of(out, 0), workspace)

    def _sum(self, rows: torch.Tensor, out: torch.Tensor, workspace: PackingBuffers) -> None:
        total = out
        if self._narrow:
            total = workspace.take(self._sum_elements, torch.float32)[: out.numel()].view(out.shape)
        if rows.device.type == "cpu":
            total.copy_(rows[0])
            for row in rows[1:]:
                total.add_(row)
        else:
            torch.sum(rows, 0, dtype=total.dtype, out=total)
        if self._narrow:
            out.copy_(total)


def _grids(pieces: Sequence[PiecePlace], rows: tuple[int, int]) -> Iterator[_PieceGrid]:
    """Group pieces into grids: first neighbors at equal distances, and then equal groups at equal distances."""
    groups = _grouped(pieces, lambda piece: piece.length, _places)
    for alike in _grouped(groups, lambda group: (len(group), _step(group), group[0].length), lambda g: _places(g[0])):
        firsts = [group[0] for group in alike]
        yield _PieceGrid(firsts[0], (len(alike), len(alike[0])), (_step(firsts), _step(alike[0])), rows)


def _grouped(
    items: Sequence[T], shape: Callable[[T], object], places: Callable[[T], tuple[int, int, int]]
) -> list[list[T]]:
    """Group neighbors of equal shape at equal distances, none of them negative, as in a view."""
    groups: list[list[T]] = []
    for item in items:
        group = groups[-1] if groups else []
        apart = _apart(places(group[-1]), places(item)) if group else (-1,)
        fits = min(apart) >= 0 and (len(group) < 2 or apart == _apart(*map(places, group[:2])))
        if fits and shape(group[0]) == shape(item):
            group.append(item)
        else:
            groups.append([item])
    return groups


def _apart(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return b[0] - a[0], b[1] - a[1], b[2] - a[2]


def _step(group: Sequence[PiecePlace]) -> tuple[int, int, int]:
    """Return the distances between neighbors of a group."""
    return _apart(_places(group[0]), _places(group[min(1, len(group) - 1)]))


def _places(piece: PiecePlace) -> tuple[int, int, int]:
    return piece.start, piece.source, piece.target


@final
class EncodedPacking:
    """Pieces encoded by a codec, with optional error feedback.

    Args:
        sum_elements: The number of elements of the scratch memory for error feedback.
        kept: For each hop, the rounding errors that are added before the next encoding, or None without error feedback.
            Their shape is [stages, pieces, longest piece].
        seed: The seed of stochastic rounding. Members need different seeds, or their errors would add up.
    """

    dtype = torch.uint8

    def __init__(
        self, codec: Codec, device: torch.device, sum_elements: int, kept: Sequence[torch.Tensor | None], seed: int
    ) -> None:
        self._codec, self._device, self._sum_elements = codec, device, sum_elements
        self._kernels = kernels_for(device)
        self.kept, self.seeds = kept, RoundingSeeds(seed)

    def table(self, pieces: Sequence[PiecePlace], rows: int = 1, stride: int = 0) -> PieceTable:
        return PieceTable(self._codec, pieces, self._device, rows, stride)

    def pack(self, table: PieceTable, region: torch.Tensor, wire: torch.Tensor, workspace: PackingBuffers) -> None:
        kept, scratch = self._feedback(0, workspace)
        self._kernels.watched(workspace.watch).encode_pieces(table, region, wire, self.seeds.draw(table), kept, scratch)

    def sum(self, table: PieceTable, hop: int, wire: torch.Tensor, workspace: PackingBuffers) -> None:
        kept, scratch = self._feedback(hop, workspace)
        self._kernels.watched(workspace.watch).encode_pieces(table, None, wire, self.seeds.draw(table), kept, scratch)

    def unpack(self, table: PieceTable, wire: torch.Tensor, out: torch.Tensor, workspace: PackingBuffers) -> None:
        self._kernels.watched(workspace.watch).decode_pieces(table, wire, out)

    def _feedback(self, hop: int, workspace: PackingBuffers) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        kept = self.kept[hop]
        return kept, None if kept is None else workspace.take(self._sum_elements, torch.float32)


Packing: TypeAlias = UncompressedPacking | EncodedPacking


class RoundingSeeds:
    """The seeds of stochastic rounding. Each message has a new one."""

    __slots__ = ("seed",)

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def draw(self, pieces: PieceTable) -> int:
        """Take a seed for each piece. Return the one before them, from which kernels derive theirs."""
        before, self.seed = self.seed, pieces.last_seed(self.seed)
        return before
