"""Reductions by all-to-all, in one hop or two (ZeRO++, section 3.3).

Members exchange slices, and sum them when they arrive. In each hop a member's buffer holds one row for each member of
the hop. The member sends each row to the member that it is for. It then sums what it receives in rank order, which
gives the buffer of the next hop.

With two hops, the first one is among the members of a node, and the second one among members of equal place in their
nodes. A row of the first hop contains the slices of one whole column of the grid. These are apart in the region, so
they are first copied next to each other, in ZeRO++'s slice order:

    position = place in the node · nodes + node

    region ─(reorder)→ [width, nodes] ─(exchange in the node, sum)→ [nodes] ─(exchange between nodes, sum)→ own slice

The two hops overlap: while one part of every slice takes its second hop, another part takes its first. With a codec,
pieces are encoded when they are copied into a buffer. After a hop they are decoded, summed and encoded again
(`codecs/packing.py`).

A hop is executed by messages between its members, or by one all-to-all of the backend. The buffers are the same.
Received rows are equally spaced, with this member's own row in its place. Messages leave that row out, so it is packed
where it would arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

import torch
import torch.distributed as dist

from towpath.codecs.kernels.pieces import PiecePlace
from towpath.codecs.packing import EncodedPacking, Packing, RoundingSeeds, UncompressedPacking
from towpath.collectives.collective import Collective, GroupRank, Workspace, message_tag
from towpath.collectives.point_to_point import PeerMessage, Posted, post
from towpath.core.buffers import AllToAll, exchanged_cells, kept_elements
from towpath.core.formats import message_cell
from towpath.core.routes import SlicePart, hops_of, piece_bounds
from towpath.core.transfer import Transfer


@dataclass(frozen=True, slots=True)
class _Hop:
    """The members of one hop, and the links between them."""

    peers: tuple[int, ...]  # the positions of the members, including this one
    mine: int  # the index of this member among them
    group: dist.ProcessGroup | None = None  # the process group of these members, if the backend exchanges the rows


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One hop of a stage. Places are in elements of the wire buffer."""

    sent: int  # where the rows start that this member sends
    received: int  # where the rows start that it receives
    row: int  # the distance between rows
    # The length of each row that is sent. All rows that are received have the length of the own one.
    contents: tuple[int, ...]
    table: Any  # what is packed for this hop: pieces of the region, or sums of the rows of the hop before


@dataclass(frozen=True, slots=True)
class _ReductionStage:
    """The part of a reduction that runs at a time: one piece of each slice. Hops of several stages overlap."""

    exchanges: tuple[_Exchange, ...]
    table: Any  # what is unpacked after the last hop: this member's piece of the sum


@final
class AllToAllReduceScatter(Collective):
    """A reduce-scatter by all-to-all, in one hop or two.

    It is used for the routes 'one-hop' and 'two-hop', with or without a codec.

    `members`: The group, and this rank's position in it. Two hops of collectives use its row and its column.
    `collectives`: Exchange the rows of a hop by one all-to-all of the backend. Otherwise send messages.
    """

    def __init__(self, transfer: Transfer, members: GroupRank, device: torch.device, collectives: bool = False) -> None:
        self._transfer, self._members, self._tag = transfer, members, message_tag(transfer)
        self._what = f"{transfer.move.op.value} by {transfer.route}"
        hops = hops_of(transfer.route, members.grid)
        self._buffers = AllToAll(hops, transfer.parts, transfer.elements, transfer.transport.encoding)
        self._hops = _hops(members, len(self._buffers.hops), collectives)
        self._packing = self._make_packing(device)
        self._stages = [self._stage(number) for number in range(self._buffers.stages)]
        # What is in flight, by stage and hop.
        self._posted: dict[tuple[int, int], Posted | dist.Work] = {}

    def _make_packing(self, device: torch.device) -> Packing:
        buffers, codec = self._buffers, self._transfer.transport.encoding
        if codec is None:
            return UncompressedPacking(getattr(torch, self._transfer.dtype), buffers.sum_elements)
        kept = [torch.zeros(n, device=device) if n else None for n in kept_elements(self._transfer)]
        shaped = [k if k is None else k.view(buffers.stages, -1, buffers.cell) for k in kept]
        return EncodedPacking(codec, device, buffers.sum_elements, shaped, self._members.position)

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """The error feedback of each hop that keeps any."""
        kept = self._packing.kept if isinstance(self._packing, EncodedPacking) else ()
        return tuple(k for k in kept if k is not None)

    @property
    def seeds(self) -> tuple[RoundingSeeds, ...]:
        """The seeds of stochastic rounding, if there is a codec."""
        return (self._packing.seeds,) if isinstance(self._packing, EncodedPacking) else ()

    def _stage(self, number: int) -> _ReductionStage:
        members, grid, transfer, buffers = self._members, self._members.grid, self._transfer, self._buffers
        count, table = len(members.group.ranks), self._packing.table

        def piece(position: int) -> tuple[int, int]:
            part = SlicePart(members.group.slots[position], number, buffers.stages)
            return piece_bounds(transfer.elements, count, part, transfer.grain)

        order = list(range(count))
        if len(self._hops) == 2:
            order = [grid.at(node, place) for place in range(grid.width) for node in range(grid.nodes)]
        pieces = [piece(position) for position in order]
        # Encoded cells have one size in all stages. Without a codec, each piece follows the one before it in its row.
        codec = buffers.codec
        cells = [buffers.wire_cell if codec else end - start for start, end in pieces]

        exchanges: list[_Exchange] = []
        sources = [0] * len(pieces)
        for index, hop in enumerate(self._hops):
            sent, received = buffers.starts(number, index)
            each = buffers.cells(index + 1)
            rows = [cells[i : i + each] for i in range(0, len(cells), each)]
            contents, row = tuple(map(sum, rows)), max(map(sum, rows))
            places = [n * row + place for n, of in enumerate(rows) for place in accumulate(of[:-1], initial=0)]
            own = range(hop.mine * each, (hop.mine + 1) * each)
            packed = [
                PiecePlace(
                    end - start,
                    start,
                    source,
                    place + (received if hop.group is None and i in own else sent),
                    (number * len(pieces) + i) * buffers.cell,
                )
                for i, ((start, end), source, place) in enumerate(zip(pieces, sources, places, strict=True))
            ]
            summed = (1, 0) if index == 0 else (buffers.hops[index - 1], exchanges[-1].row)
            exchanges.append(_Exchange(sent, received, row, contents, table(packed, *summed)))
            pieces, cells = [pieces[i] for i in own], [cells[i] for i in own]
            sources = [received + places[i] - places[own[0]] for i in own]
        ((start, end),) = pieces
        own_piece = PiecePlace(end - start, start - transfer.bounds(members.slot)[0], sources[0])
        return _ReductionStage(tuple(exchanges), table([own_piece], buffers.hops[-1], exchanges[-1].row))

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Sum the regions of all members, and write this member's slice of the sum to `shard`."""
        packing, last = self._packing, len(self._hops) - 1
        wire = workspace.take(self._buffers.wire_elements, packing.dtype)
        # In turn t, stage t − h starts its hop h. Later stages start first. Their first hop is then in flight while
        # earlier stages sum what has arrived.
        for turn in range(len(self._stages) + last + 1):
            for number in range(min(turn, len(self._stages) - 1), -1, -1):
                hop = turn - number
                if hop > last + 1:
                    break
                # Stage n + 2 packs into the buffers of stage n, in the turn in which stage n ends. Stage n has then
                # completed its first hop, and only reads the buffers of its second one.
                stage = self._stages[number]
                if hop == 0:
                    packing.pack(stage.exchanges[0].table, region, wire, workspace)
                else:
                    posted = self._posted.pop((number, hop - 1), None)
                    if posted is not None:
                        posted.wait()
                    if hop <= last:
                        packing.sum(stage.exchanges[hop].table, hop, wire, workspace)
                    else:
                        packing.unpack(stage.table, wire, shard, workspace)
                if hop <= last:
                    self._send(number, hop, wire, workspace)

    def _send(self, number: int, index: int, wire: torch.Tensor, workspace: Workspace) -> None:
        hop, exchange = self._hops[index], self._stages[number].exchanges[index]
        if not exchange.row:
            return
        size = len(hop.peers) * exchange.row
        sent, received = (wire[start : start + size] for start in (exchange.sent, exchange.received))
        if hop.group is not None:
            work = dist.all_to_all_single(received, sent, group=hop.group, async_op=True)
            assert work is not None
            self._posted[number, index] = work
            return
        own, cells = exchange.contents[hop.mine], self._cells(number, workspace)
        nodes, here = self._members.nodes, self._members.nodes[self._members.position]
        messages = [
            PeerMessage(
                leaves, peer, rows[i * exchange.row :][:length], None if nodes[peer] == here else next(cells, None)
            )
            for i, (peer, content) in enumerate(zip(hop.peers, exchange.contents, strict=True))
            for leaves, rows, length in ((True, sent, content), (False, received, own))
            if i != hop.mine and length
        ]
        where = f"{self._what}, stage {number}, hop {index}"
        if messages:
            self._posted[number, index] = post(messages, self._members, where, workspace, self._tag)

    def _cells(self, number: int, workspace: Workspace) -> Iterator[torch.Tensor]:
        """Yield the memory of encoded messages between nodes of stage `number`, if it has a coding."""
        if self._transfer.coding is not None:
            count, longest = exchanged_cells(self._buffers, self._members.grid)
            each, sets = message_cell(longest, self._transfer.dtype), self._buffers.sets
            wire = workspace.take(sets * count * each, torch.uint8)
            yield from wire.view(sets, count, each)[number % sets]


def _hops(members: GroupRank, count: int, collectives: bool) -> list[_Hop]:
    grid, everyone = members.grid, range(len(members.group.ranks))
    whole, row, column = (members.process_group, members.row, members.column) if collectives else (None, None, None)
    if count == 1:
        return [_Hop(tuple(everyone), members.position, whole)]
    assert not collectives or (row is not None and column is not None), "two hops of collectives need row and column"
    node, place = divmod(members.position, grid.width)
    in_node = tuple(grid.at(node, m) for m in range(grid.width))
    in_column = tuple(grid.at(j, place) for j in range(grid.nodes))
    return [_Hop(in_node, place, row), _Hop(in_column, node, column)]
