"""Gathers and reduce-scatters as two calls of the backend: one over a column, and one over each row.

A group of several nodes is a grid. A *column* has one member of each node, and a *row* has the members of one node. An
all-gather first gathers this member's column into a *bundle*, one slice of each node. The row then shares out the
bundles of all its members. A reduce-scatter does the same in reverse.

In memory, either the slices of each row are contiguous, or those of each column. If rows are, the row makes one call
for each node, and NCCL launches them together. If columns are, the bundle is a part of the region, and the row makes a
single call. If neither are, or if a row would make too many calls, the region is copied so that columns are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch

from towpath.collectives.collective import Collective, GroupRank, Workspace
from towpath.collectives.flat import (
    FlatAllGather,
    FlatReduceScatter,
    all_gather_single,
    launched_together,
    reduce_scatter_single,
)
from towpath.core.routes import Group, Op, Order, columns_first, order_of


class _OverColumnsAndRows(Collective):
    """A collective over the column and the row of this rank.

    `start`: Where the bundle starts in the wire buffer. Callers use the elements before it.
    """

    def __init__(self, members: GroupRank, start: int = 0) -> None:
        order = order_of(members.group.slots, members.grid)
        assert members.column is not None and members.row is not None and order is not Order.OTHER
        self._column, self._row, self._start = members.column, members.row, start
        self._nodes, self._width = members.grid.nodes, members.grid.width
        self._place, self._rows_are_contiguous = members.position % self._width, order is Order.ROWS
        self._first_slots = members.group.slots[:: self._width]  # the slot of the first member of each node

    def _row_of(self, region: torch.Tensor, node: int) -> torch.Tensor:
        """Return the slices of a node's members, if they are contiguous."""
        start = self._first_slots[node] * (size := len(region) // (self._nodes * self._width))
        return region[start : start + self._width * size]

    def _column_of(self, region: torch.Tensor) -> torch.Tensor:
        """Return the slices of this rank's column, if they are contiguous."""
        return region.chunk(self._width)[self._place]


@final
class ColumnRowAllGather(_OverColumnsAndRows):
    """An all-gather over columns and then over rows."""

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        self.run_all([region], [shard], workspace)

    def run_all(self, regions: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], workspace: Workspace) -> None:
        """Gather `shards[i]` of every member into `regions[i]`, all of them with two launches. They have one dtype."""
        if self._rows_are_contiguous:
            sizes = [self._nodes * len(shard) for shard in shards]
            bundles = workspace.take(self._start + sum(sizes), regions[0].dtype)[self._start :].split(sizes)
        else:
            bundles = [self._column_of(region) for region in regions]
        # The column first: the links between nodes carry every slice once. The row then sends inside the node.
        with launched_together(self._column, len(bundles)):
            for bundle, shard in zip(bundles, shards, strict=True):
                all_gather_single(bundle, shard, self._column)
        calls = [
            call
            for region, bundle in zip(regions, bundles, strict=True)
            for call in (
                [(self._row_of(region, j), mine) for j, mine in enumerate(bundle.chunk(self._nodes))]
                if self._rows_are_contiguous
                else [(region, bundle)]
            )
        ]
        with launched_together(self._row, len(calls)):
            for gathered, mine in calls:
                all_gather_single(gathered, mine, self._row)


@final
class RowColumnReduceScatter(_OverColumnsAndRows):
    """A reduce-scatter over rows and then over columns."""

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Sum the regions of all members, and write this member's slice of the sum to `shard`."""
        if self._rows_are_contiguous:
            # The sums over the row are apart in the region, one for each node. The column needs them contiguous.
            size = self._nodes * len(shard)
            bundle = workspace.take(self._start + size, region.dtype)[self._start :]
            calls = [(mine, self._row_of(region, j)) for j, mine in enumerate(bundle.chunk(self._nodes))]
        else:
            bundle = self._column_of(region)
            calls = [(bundle, region)]
        # The row first: only sums over a node's members cross nodes.
        with launched_together(self._row, len(calls)):
            for mine, summed in calls:
                reduce_scatter_single(mine, summed, self._row)
        reduce_scatter_single(shard, bundle, self._column)


@final
class Reordered(Collective):
    """A gather or a reduce-scatter of slices in an order that the backend's collectives cannot work on.

    The slices are copied to a wire buffer in another order, or from there. `inner` works on that buffer.

    `slots`: The slice of the copy that each member holds. `start`: Where the copy starts in the wire buffer. Callers
    use the elements before it.
    """

    def __init__(
        self,
        op: Op,
        members: GroupRank,
        slots: Sequence[int],
        inner: Collective,
        device: torch.device,
        start: int = 0,
    ) -> None:
        self._op, self._inner, self._start = op, inner, start
        pairs = zip(members.group.slots, slots, strict=True)
        # For each slice that is written, the slice that is read: from the copy in a gather, and from the region else.
        order = [read for _, read in sorted(pairs if op is Op.ALL_GATHER else ((b, a) for a, b in pairs))]
        self._order = torch.tensor(order, device=device)
        grid, count = members.grid, len(order)
        # If the order exchanges rows and columns, one strided copy is faster. This is then the number of rows written.
        self._rows = next((n for n in (grid.nodes, grid.width) if order == _transposed(n, count // n)), 0)

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        copy = workspace.take(self._start + len(region), region.dtype)[self._start :]
        if self._op is Op.ALL_GATHER:
            self._inner.run(copy, shard, workspace)
            self._copy(copy, region)
        else:
            self._copy(region, copy)
            self._inner.run(copy, shard, workspace)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        count, item = len(self._order), source.element_size()
        # The copy of a GPU moves one element per thread, so that wider elements take less time.
        if all(n * item % 8 == 0 for n in (len(source) // count, source.storage_offset(), target.storage_offset())):
            source, target = source.view(torch.int64), target.view(torch.int64)
        if rows := self._rows:
            target.view(rows, count // rows, -1).copy_(source.view(count // rows, rows, -1).transpose(0, 1))
        else:
            torch.index_select(source.view(count, -1), 0, self._order, out=target.view(count, -1))


def _transposed(rows: int, columns: int) -> list[int]:
    """Return, for each element of a matrix of `rows` rows, its position in the transposed matrix."""
    return [column * rows + row for row in range(rows) for column in range(columns)]


def grouped(op: Op, route: str, members: GroupRank, elements: int, device: torch.device, start: int = 0) -> Collective:
    """Return a gather or reduce-scatter as calls of the backend, if all slices have the same length.

    `start`: The elements of the wire buffer that the caller uses itself.
    """
    if not is_direct(route, members):
        slots = tuple(range(len(members.group.ranks))) if route == "flat" else columns_first(members.grid)
        ordered = replace(members, group=Group(members.group.ranks, slots))
        # The copy is in an order for which the call below needs no copy itself.
        inner = grouped(op, route, ordered, elements, device, start + elements)
        return Reordered(op, members, slots, inner, device, start)
    if route == "flat":
        return FlatAllGather(members) if op is Op.ALL_GATHER else FlatReduceScatter(members)
    return (ColumnRowAllGather if op is Op.ALL_GATHER else RowColumnReduceScatter)(members, start)


def is_direct(route: str, members: GroupRank) -> bool:
    """Return whether collectives of the backend can work on the region itself, without a copy in another order."""
    if route == "flat":
        return members.group.in_order
    return order_of(members.group.slots, members.grid) is not Order.OTHER
