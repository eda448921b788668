"""Reductions by all-to-all, in one hop or two (ZeRO++, section 3.3).

Members exchange slices, and sum them when they arrive. In each hop a member's buffer holds one segment for each member
of the hop. The member sends each segment to the member that it is for. It then sums what it receives in rank order,
which gives the buffer of the next hop.

With two hops, the first one is among the members of a node, and the second one among members of equal place in their
nodes. A segment of the first hop contains the slices of one whole column of the grid. These are apart in the region, so
they are first copied next to each other, in ZeRO++'s slice order:

    position = place in the node · nodes + node

    region ─(reorder)→ [width, nodes] ─(exchange in the node, sum)→ [nodes] ─(exchange between nodes, sum)→ own slice

The two hops overlap: while one part of every slice takes its second hop, another part takes its first. With a codec,
pieces are encoded when they are copied into a buffer. After a hop they are decoded, summed and encoded again
(`codecs/packing.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import torch

from towpath.codecs.packing import EncodedPacking, Packing, PlainPacking, RoundingSeeds
from towpath.collectives.collective import Collective, GroupRank, Workspace, message_tag
from towpath.collectives.point_to_point import Message, Posted, post
from towpath.core.routes import AllToAll, Piece, hops_of, piece_bounds
from towpath.core.transfer import Transfer


@dataclass(frozen=True, slots=True)
class _Hop:
    """The members of one hop, and the links between them.

    Attributes:
        peers: The positions of the members, including this one.
        mine: The index of this member among them.
        crossing: True if the members are in different nodes.
    """

    peers: tuple[int, ...]
    mine: int
    crossing: bool


@dataclass(frozen=True, slots=True)
class _Stage:
    """The part of a reduction that `AllToAll` runs at a time: one piece of each slice. Hops of several parts overlap.

    Attributes:
        pieces: The start and end of each piece in the flat buffer, in the order in which they are sent.
        lengths: For each hop, the lengths of the pieces that it sends, and at the end those that remain.
        own: The start and end of the piece whose sum this member keeps.
    """

    pieces: tuple[tuple[int, int], ...]
    lengths: tuple[tuple[int, ...], ...]
    own: tuple[int, int]


@dataclass(slots=True)
class _Wire:
    """The buffers of one hop of one stage, and the messages that are in flight between them."""

    sent: torch.Tensor
    received: torch.Tensor
    posted: Posted | None = None


@final
class AllToAllReduceScatter(Collective):
    """A reduce-scatter by all-to-all messages, in one hop or two.

    It is used for the routes 'one-hop' and 'two-hop', with or without a codec.
    """

    def __init__(self, transfer: Transfer, members: GroupRank, device: torch.device) -> None:
        self._transfer, self._members, self._tag = transfer, members, message_tag(transfer)
        self._what, self._start = f"{transfer.move.op.value} by {transfer.route}", transfer.bounds(members.slot)[0]
        hops = hops_of(transfer.route, members.grid)
        self._buffers = AllToAll(hops, transfer.parts, transfer.elements, transfer.transport.encoding)
        self._hops = _hops(members, len(self._buffers.hops))
        self._stages = [self._stage(part) for part in range(self._buffers.stages)]
        self._packing = self._make_packing(device)
        # For each stage and hop, these are the boundaries in the hop's buffer between the segments of its members.
        self._segments = [[self._ends(stage, hop) for hop in range(len(self._hops))] for stage in self._stages]

    def _make_packing(self, device: torch.device) -> Packing:
        buffers, codec = self._buffers, self._transfer.transport.encoding
        if codec is None:
            return PlainPacking(getattr(torch, self._transfer.dtype), buffers.sum_elements)
        kept = [torch.zeros(n, device=device) if n else None for n in self._transfer.kept_elements]
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

    def _stage(self, part: int) -> _Stage:
        members, grid, transfer = self._members, self._members.grid, self._transfer
        count = len(members.group.ranks)

        def piece(position: int) -> tuple[int, int]:
            piece = Piece(members.group.slots[position], part, self._buffers.stages)
            return piece_bounds(transfer.elements, count, piece, transfer.grain)

        if len(self._hops) == 1:
            order = list(range(count))
        else:
            order = [grid.at(node, place) for place in range(grid.width) for node in range(grid.nodes)]
        pieces = tuple(map(piece, order))
        lengths = [tuple(end - start for start, end in pieces)]
        for hop in self._hops:
            each = len(lengths[-1]) // len(hop.peers)
            lengths.append(lengths[-1][hop.mine * each : (hop.mine + 1) * each])
        return _Stage(pieces, tuple(lengths), piece(members.position))

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Sum the regions of all members, and write this member's slice of the sum to `shard`."""
        wires, packing, start = self._wires(workspace), self._packing, self._start
        last = len(self._hops) - 1
        # In turn t, stage t − h starts its hop h. Later stages start first. Their first hop is then in flight while
        # earlier stages sum what has arrived.
        for turn in range(len(self._stages) + last + 1):
            for number in range(min(turn, len(self._stages) - 1), -1, -1):
                hop = turn - number
                if hop > last + 1:
                    break
                # Stage n + 2 packs into the buffers of stage n, in the turn in which stage n ends. Stage n has then
                # completed its first hop, and only reads the buffers of its second one.
                stage, mine = self._stages[number], wires[number % len(wires)]
                if hop == 0:
                    packing.pack([region[a:b] for a, b in stage.pieces], mine[0].sent, number, workspace)
                else:
                    rows = self._arrived(number, hop - 1, mine[hop - 1])
                    if hop <= last:
                        packing.sum(rows, stage.lengths[hop], mine[hop].sent, number, hop, workspace)
                    else:
                        packing.unpack(rows, shard[stage.own[0] - start : stage.own[1] - start], workspace)
                if hop <= last:
                    self._send(number, hop, mine[hop], workspace)

    def _wires(self, workspace: Workspace) -> list[list[_Wire]]:
        buffers = self._buffers
        sizes = [
            n for h in range(len(self._hops)) for n in (buffers.sent_elements(h), buffers.received_elements(h))
        ] * buffers.sets
        pieces = list(workspace.take(buffers.wire_elements, self._packing.dtype).split(sizes))
        wires = [_Wire(sent, received) for sent, received in zip(pieces[::2], pieces[1::2], strict=True)]
        return [wires[i : i + len(self._hops)] for i in range(0, len(wires), len(self._hops))]

    def _send(self, number: int, index: int, wire: _Wire, workspace: Workspace) -> None:
        hop, segments = self._hops[index], self._segments[number][index]
        rows = self._rows(number, index, wire)
        messages = [
            Message(leaves, peer, content)
            for row, peer, (start, end) in zip(rows, hop.peers, pairwise(segments), strict=True)
            for leaves, content in ((True, wire.sent[start:end]), (False, row))
            if peer != self._members.position and content.numel()
        ]
        where = f"{self._what}, stage {number}, hop {index}"
        tag = workspace.tag(self._tag)
        wire.posted = post(messages, self._members, where, hop.crossing, tag) if messages else None

    def _arrived(self, number: int, index: int, wire: _Wire) -> list[torch.Tensor]:
        if wire.posted is not None:
            wire.posted.wait()
        return self._rows(number, index, wire)

    def _rows(self, number: int, index: int, wire: _Wire) -> list[torch.Tensor]:
        """Return what each member of a hop has for this one, in order. Its own segment is still in the sent buffer."""
        hop, segments = self._hops[index], self._segments[number][index]
        start, end = segments[hop.mine], segments[hop.mine + 1]
        size = end - start
        rows = [wire.received[i * size : (i + 1) * size] for i in range(len(hop.peers) - 1)]
        return [*rows[: hop.mine], wire.sent[start:end], *rows[hop.mine :]]

    def _ends(self, stage: _Stage, index: int) -> list[int]:
        lengths = stage.lengths[index]
        ends = list(accumulate(map(self._packing.size, lengths), initial=0))
        return ends[:: len(lengths) // len(self._hops[index].peers)]


def _hops(members: GroupRank, count: int) -> list[_Hop]:
    grid, everyone = members.grid, range(len(members.group.ranks))
    if count == 1:
        return [_Hop(tuple(everyone), members.position, crossing=False)]
    node, place = divmod(members.position, grid.width)
    in_node = tuple(grid.at(node, m) for m in range(grid.width))
    in_column = tuple(grid.at(j, place) for j in range(grid.nodes))
    return [_Hop(in_node, place, crossing=False), _Hop(in_column, node, crossing=True)]
