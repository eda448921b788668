"""Reductions by all-to-all, in one hop or two (ZeRO++, section 3.3): slices travel whole and are summed on arrival.

A hop takes a buffer that holds one segment for each of its members, in order. Every member is sent its segment, and
sums what it gets from all in rank order; that sum is the next hop's buffer. Two hops: first among a node's members,
then among those of equal place. So the segments of the first are the slices of a whole column of the grid, which lie
apart in the region: they are brought together first, in ZeRO++'s slice order

    position = place in the node · nodes + node

    region ─(reorder)→ [width, nodes] ─(exchange in the node, sum)→ [nodes] ─(exchange between nodes, sum)→ own slice

In stages: while one part of every slice takes its second hop, another takes its first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import torch

from towpath.collectives.collective import Binding, Collective, Members, Scratch
from towpath.collectives.messages import Message, Posted, post
from towpath.spec.formats import NARROW, dtype_name
from towpath.spec.routes import AllToAll, Piece, bounds, hops_of, piece_bounds


@dataclass(frozen=True, slots=True)
class _Hop:
    """With whom (positions, this member among them), and over which links."""

    peers: tuple[int, ...]
    mine: int
    crossing: bool


@dataclass(frozen=True, slots=True)
class _Stage:
    """One part of every slice: where the pieces lie in the region, in the order in which they travel; by hop, the
    boundaries of the segments in the buffer; and where the sum belongs."""

    pieces: tuple[tuple[int, int], ...]
    segments: tuple[tuple[int, ...], ...]
    own: tuple[int, int]


@dataclass(slots=True)
class _Wire:
    """The buffers of one hop of one stage."""

    sent: torch.Tensor
    received: torch.Tensor
    posted: Posted | None = None


@final
class AllToAllReduceScatter(Collective):
    def __init__(self, route: str, binding: Binding, members: Members, scratch: Scratch) -> None:
        self._route, self._binding, self._members, self._scratch = route, binding, members, scratch
        self._buffers = AllToAll(hops_of(route, members.grid), binding.elements)
        self._hops = _hops(members, len(self._buffers.hops))
        self._stages = [self._stage(part) for part in range(self._buffers.stages)]

    def _stage(self, part: int) -> _Stage:
        members, grid, elements = self._members, self._members.grid, self._binding.elements
        count = len(members.group.ranks)

        def piece(position: int) -> tuple[int, int]:
            return piece_bounds(elements, count, Piece(members.group.slots[position], part, self._buffers.stages))

        if len(self._hops) == 1:
            order = list(range(count))
        else:
            order = [grid.at(node, place) for place in range(grid.width) for node in range(grid.nodes)]
        pieces = tuple(map(piece, order))
        ends = tuple(accumulate((end - start for start, end in pieces), initial=0))
        segments: list[tuple[int, ...]] = []
        for hop in self._hops:
            each = (len(ends) - 1) // len(hop.peers)
            segments.append(tuple(end - ends[0] for end in ends[::each]))
            ends = ends[hop.mine * each : (hop.mine + 1) * each + 1]
        return _Stage(pieces, tuple(segments), piece(members.position))

    def run(self, region: torch.Tensor, shard: torch.Tensor) -> None:
        wires = self._wires(region.dtype)
        start, _ = bounds(self._binding.elements, len(self._members.group.ranks), self._members.slot)
        last = len(self._hops) - 1
        # In turn t, stage t − h begins its hop h: later stages first, so that their first hop is under way meanwhile.
        for turn in range(len(self._stages) + last + 1):
            for number in range(min(turn, len(self._stages) - 1), -1, -1):
                hop = turn - number
                if hop > last + 1:
                    break
                stage, mine = self._stages[number], wires[number % len(wires)]
                if hop == 0:
                    self._reorder(region, stage, mine[0].sent)
                elif hop <= last:
                    self._sum(number, hop - 1, mine[hop - 1], mine[hop].sent)
                else:
                    own = shard[stage.own[0] - start : stage.own[1] - start]
                    self._sum(number, last, mine[last], own)
                if hop <= last:
                    self._send(number, hop, mine[hop])

    def _wires(self, dtype: torch.dtype) -> list[list[_Wire]]:
        buffers = self._buffers
        sizes = [n for h in range(len(self._hops)) for n in (buffers.sent(h), buffers.received(h))] * buffers.sets
        pieces = list(self._scratch.take(buffers.wire_elements, dtype).split(sizes))
        wires = [_Wire(sent, received) for sent, received in zip(pieces[::2], pieces[1::2], strict=True)]
        return [wires[i : i + len(self._hops)] for i in range(0, len(wires), len(self._hops))]

    # The three things a codec takes part in: it encodes what is reordered, and decodes, sums and encodes after a hop.

    def _reorder(self, region: torch.Tensor, stage: _Stage, sent: torch.Tensor) -> None:
        pieces = [region[start:end] for start, end in stage.pieces]
        torch.cat(pieces, out=sent[: sum(p.numel() for p in pieces)])

    def _send(self, number: int, index: int, wire: _Wire) -> None:
        hop, segments = self._hops[index], self._stages[number].segments[index]
        rows = self._rows(number, index, wire)
        messages = [
            Message(leaves, peer, content)
            for row, peer, (start, end) in zip(rows, hop.peers, pairwise(segments), strict=True)
            for leaves, content in ((True, wire.sent[start:end]), (False, row))
            if peer != self._members.position and content.numel()
        ]
        where = f"{self._binding.op.value} by {self._route}, stage {number}, hop {index}"
        wire.posted = post(messages, self._members, where, hop.crossing) if messages else None

    def _rows(self, number: int, index: int, wire: _Wire) -> list[torch.Tensor]:
        """What each member of a hop has for this one, in order; its own is where it was to be sent from."""
        hop, segments = self._hops[index], self._stages[number].segments[index]
        start, end = segments[hop.mine], segments[hop.mine + 1]
        numel = end - start
        rows = [wire.received[i * numel : (i + 1) * numel] for i in range(len(hop.peers) - 1)]
        return [*rows[: hop.mine], wire.sent[start:end], *rows[hop.mine :]]

    def _sum(self, number: int, index: int, wire: _Wire, out: torch.Tensor) -> None:
        if wire.posted is not None:
            wire.posted.wait()
        rows = self._rows(number, index, wire)
        out = out[: rows[0].numel()]
        narrow = dtype_name(out.dtype) in NARROW
        total = self._scratch.take(self._buffers.sum_elements, torch.float32)[: out.numel()] if narrow else out
        total.copy_(rows[0])
        for row in rows[1:]:
            total.add_(row)
        if narrow:
            out.copy_(total)


def _hops(members: Members, count: int) -> list[_Hop]:
    grid, everyone = members.grid, range(len(members.group.ranks))
    if count == 1:
        return [_Hop(tuple(everyone), members.position, crossing=False)]
    node, place = divmod(members.position, grid.width)
    in_node = tuple(grid.at(node, m) for m in range(grid.width))
    in_column = tuple(grid.at(j, place) for j in range(grid.nodes))
    return [_Hop(in_node, place, crossing=False), _Hop(in_column, node, crossing=True)]
