"""Collectives that are calls of the backend, through `torch.distributed`.

They serve the route 'flat', and the others in the form of collectives. All-gathers of encoded slices wrap a collective
of any route.

A group of several nodes is a grid. A *column* has one member of each node, and a *row* has the members of one node. An
all-gather over columns and rows first gathers this member's column into a *bundle*, one slice of each node. The row
then shares out the bundles of all its members. A reduce-scatter does the same in reverse.

In memory, either the slices of each row are contiguous, or those of each column. If rows are, the row makes one call
for each node, and NCCL launches them together. If columns are, the bundle is a part of the region, and the row makes a
single call. If neither are, or if a row would make too many calls, the region is copied so that columns are contiguous.

In parts, columns and rows work at the same time. The slices of a part are apart in the region, so each part is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist

from towpath.codecs.kernels import kernels_for
from towpath.codecs.kernels.pieces import PiecePlace, PieceTable
from towpath.codecs.packing import RoundingSeeds
from towpath.collectives.collective import Collective, GroupRank, Workspace
from towpath.core.formats import Codec
from towpath.core.routes import Group, Op, Order, call_parts, columns_first, encoded_slice, order_of
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Range


def all_gather_single(
    region: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """All-gather `shard` into `region`, under the name that the installed PyTorch has for it."""
    # PyTorch 2.13 and later warn about the older name.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(region, shard, group=group, async_op=async_op)


def reduce_scatter_single(
    shard: torch.Tensor, region: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """Reduce-scatter `region` into `shard`, under the name that the installed PyTorch has for it."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    return getattr(dist, name)(shard, region, group=group, async_op=async_op)


def launched_together(group: dist.ProcessGroup, calls: int) -> AbstractContextManager[object]:
    """Return a context in which `calls` calls of one kind become one launch of `group`. gloo makes them one by one."""
    # Private, and what torch.distributed itself offers for this. FSDP2 copies all tensors to one buffer instead.
    if calls == 1 or group.name() == "gloo":
        return nullcontext()
    return dist.distributed_c10d._coalescing_manager(group)  # pyright: ignore[reportPrivateUsage]


@final
@dataclass(frozen=True, slots=True)
class FlatAllGather(Collective):
    """An all-gather by the backend's own collective. Member i holds slice i."""

    members: GroupRank

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        all_gather_single(region, shard, self.members.process_group)

    def run_all(self, regions: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], workspace: Workspace) -> None:
        """Gather `shards[i]` of every member into `regions[i]`, all of them with one launch."""
        group = self.members.process_group
        with launched_together(group, len(regions)):
            for region, shard in zip(regions, shards, strict=True):
                all_gather_single(region, shard, group)


@final
@dataclass(frozen=True, slots=True)
class FlatReduceScatter(Collective):
    """A reduce-scatter by the backend's own collective. Member i holds slice i."""

    members: GroupRank

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Sum the regions of all members, and write this member's slice of the sum to `shard`."""
        reduce_scatter_single(shard, region, self.members.process_group)


@final
@dataclass(frozen=True, slots=True)
class FlatAllReduce(Collective):
    """An all-reduce by the backend's own collective: a sum, or a maximum, which unites bitmaps of used parameters."""

    members: GroupRank
    operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        dist.all_reduce(region, self.operation, group=self.members.process_group)


@final
@dataclass(frozen=True, slots=True)
class ReduceThenGather(Collective):
    """An all-reduce that runs a reduce-scatter and then an all-gather. `own` is this rank's slice of the region."""

    own: slice
    reduce: Collective
    gather: Collective

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return (*self.reduce.state, *self.gather.state)

    @property
    def seeds(self) -> tuple[RoundingSeeds, ...]:
        return (*self.reduce.seeds, *self.gather.seeds)

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        # In place: the slice of the sum is where the all-gather reads it.
        mine = region[self.own]
        self.reduce.run(region, mine, workspace)
        self.gather.run(region, mine, workspace)


# Each member encodes its slice, unless it is stored encoded already. After the gather it decodes all slices. It decodes
# its own slice too, so that every member has the same values.


@final
class EncodedAllGather(Collective):
    """An all-gather of encoded slices. `inner` gathers their bytes: it executes `of_bytes(transfer)`."""

    def __init__(self, transfer: Transfer, members: GroupRank, inner: Collective, device: torch.device) -> None:
        assert isinstance(transfer.payload, Range) and transfer.transport.encoding is not None
        codec, count = transfer.transport.encoding, len(members.group.ranks)
        self._inner, self._rests, self._kernels = inner, transfer.payload.encoded, kernels_for(device)
        # All slices have the same encoded length, because collectives of the backend take equal ones.
        cell = encoded_slice(codec, transfer.elements, count)
        self._bytes, self._mine = cell * count, slice(members.slot * cell, (members.slot + 1) * cell)
        bounds = [transfer.bounds(slot) for slot in range(count)]
        start, end = bounds[members.slot]
        self._own = PieceTable(codec, [PiecePlace(end - start, target=self._mine.start)], device)
        slices = [PiecePlace(end - start, start, source=slot * cell) for slot, (start, end) in enumerate(bounds)]
        self._slices = PieceTable(codec, slices, device)
        self._seeds = RoundingSeeds(members.slot)
        # Sums that an all-reduce gathers may have error feedback.
        keeps = transfer.transport.feedback == "all"
        self._kept = torch.zeros(end - start, device=device) if keeps else None
        self._begun: torch.Tensor | None = None  # the messages between `begin` and `run`, with this member's encoded

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """The error feedback of this member's slice, if it keeps any."""
        return () if self._kept is None else (self._kept,)

    @property
    def seeds(self) -> tuple[RoundingSeeds, ...]:
        """The seeds of stochastic rounding, unless slices are stored encoded."""
        return () if self._rests else (self._seeds,)

    def begin(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Encode this member's slice, and begin to gather."""
        # The wire buffer belongs to this job until its end, so the encoded slice may wait there for `run`.
        messages = self._begun = self._encoded(shard, workspace)
        self._inner.begin(messages, messages[self._mine], workspace)

    def _encoded(self, shard: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        messages = workspace.take(self._bytes, torch.uint8)
        # Slices that rest encoded are sent as they are. They were rounded when they were written.
        if self._rests:
            messages[self._mine][: shard.numel()].copy_(shard)
        else:
            kernels = self._kernels.watched(workspace.watch)
            kept = self._kept
            scratch = None if kept is None else workspace.take(2 * kept.numel(), torch.float32)
            kernels.encode_pieces(self._own, shard, messages, self._seeds.draw(self._own), kept, scratch)
        return messages

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Gather all slices, and decode them into the region."""
        messages, self._begun = self._encoded(shard, workspace) if self._begun is None else self._begun, None
        self._inner.run(messages, messages[self._mine], workspace)
        # Decoded from the messages on every member, its own slice too: all ranks compute with the same rounded weights.
        self._kernels.watched(workspace.watch).decode_pieces(self._slices, messages, region)


def of_bytes(transfer: Transfer, codec: Codec) -> Transfer:
    """Return the all-gather that sends the encoded slices of `transfer` as plain bytes."""
    count = transfer.move.members
    nbytes = count * encoded_slice(codec, transfer.elements, count)
    payload = Range(transfer.unit, transfer.bucket, nbytes, "uint8")
    return replace(transfer, payload=payload, transport=Transport(transfer.transport.route))


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


class _OnCopies(Collective):
    """A gather or a reduce-scatter that copies slices from a wire buffer with another order, or to it.

    `slots`: The slice of the copy that each member holds. `start`: Where the caller's part of the wire buffer ends.
    """

    def __init__(self, op: Op, members: GroupRank, slots: Sequence[int], device: torch.device, start: int) -> None:
        self._op, self._start = op, start
        pairs = zip(members.group.slots, slots, strict=True)
        # For each slice that is written, the slice that is read: from the copy in a gather, and from the region else.
        order = [read for _, read in sorted(pairs if op is Op.ALL_GATHER else ((b, a) for a, b in pairs))]
        self._order = torch.tensor(order, device=device)
        grid, count = members.grid, len(order)
        # If the order exchanges rows and columns, one strided copy is faster. This is then the number of rows written.
        self._rows = next((n for n in (1, grid.nodes, grid.width) if order == _transposed(n, count // n)), 0)

    def _slices(self, region: torch.Tensor) -> torch.Tensor:
        return region.view(len(self._order), -1)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all slices of `source`, or the same part of each, to their places in `target`: [slices, elements]."""
        count, item = len(self._order), source.element_size()
        # The copy of a GPU moves one element per thread, so that wider elements take less time.
        starts = (n for each in (source, target) for n in (each.shape[1], each.stride(0), each.storage_offset()))
        if all(n * item % 8 == 0 for n in starts):
            source, target = source.view(torch.int64), target.view(torch.int64)
        if rows := self._rows:
            target.view(rows, count // rows, -1).copy_(source.view(count // rows, rows, -1).transpose(0, 1))
        else:
            torch.index_select(source, 0, self._order, out=target)


@final
class Reordered(_OnCopies):
    """A collective on slices in an order that the backend's collectives cannot work on. `inner` works on the copy."""

    def __init__(
        self, op: Op, members: GroupRank, slots: Sequence[int], inner: Collective, device: torch.device, start: int
    ) -> None:
        super().__init__(op, members, slots, device, start)
        self._inner = inner

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        copy = workspace.take(self._start + len(region), region.dtype)[self._start :]
        if self._op is Op.ALL_GATHER:
            self._inner.run(copy, shard, workspace)
            self._copy(self._slices(copy), self._slices(region))
        else:
            self._copy(self._slices(region), self._slices(copy))
            self._inner.run(copy, shard, workspace)


@final
class InParts(_OnCopies):
    """A gather or a reduce-scatter over columns and rows, which work on two parts of all slices at a time (HO-Ring).

    Calls over the column are not waited for at once. So NCCL runs them with those over the row, and events order the
    two calls of a part. All ranks launch all calls in one order, because both communicators share the device.
    """

    def __init__(self, op: Op, members: GroupRank, parts: int, device: torch.device, start: int) -> None:
        super().__init__(op, members, columns_first(members.grid), device, start)
        assert members.column is not None and members.row is not None
        self._column, self._row, self._parts, self._nodes = members.column, members.row, parts, members.grid.nodes

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        slices, nodes, cuts = self._slices(region), self._nodes, call_parts(len(shard), self._parts)
        sizes = [nodes * len(shard), len(slices) * cuts[0][1]]
        bundle, copies = workspace.take(self._start + sum(sizes), region.dtype)[self._start :].split(sizes)
        # Of each part: all slices, their copy, the bundle of this member's column, and its own slice.
        parts = [
            (slices[:, a:b], copies[: len(slices) * (b - a)], bundle[nodes * a : nodes * b], shard[a:b])
            for a, b in cuts
        ]
        if self._op is Op.ALL_GATHER:
            crossing = [all_gather_single(column, own, self._column, async_op=True) for *_, column, own in parts]
            for work, (part, copy, column, _) in zip(crossing, parts, strict=True):
                work.wait()
                all_gather_single(copy, column, self._row)
                self._copy(self._slices(copy), part)
            return
        crossing = list[dist.Work]()
        for part, copy, column, own in parts:
            self._copy(part, self._slices(copy))
            reduce_scatter_single(column, copy, self._row)
            crossing.append(reduce_scatter_single(own, column, self._column, async_op=True))
        for work in crossing:
            work.wait()


def _transposed(rows: int, columns: int) -> list[int]:
    """Return, for each element of a matrix of `rows` rows, its position in the transposed matrix."""
    return [column * rows + row for row in range(rows) for column in range(columns)]


def grouped(
    op: Op, route: str, members: GroupRank, elements: int, device: torch.device, start: int = 0, parts: int = 1
) -> Collective:
    """Return a gather or reduce-scatter as calls of the backend, if all slices have the same length."""
    # `start`: The elements of the wire buffer that the caller uses itself.
    if route == "ho-ring":
        return InParts(op, members, parts, device, start)
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
