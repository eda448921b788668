"""A transfer: one collective of a step, and the bytes that it sends over each class of link."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from towpath.spec.formats import NARROW, item_bytes
from towpath.spec.routes import (
    AllToAll,
    Grid,
    Op,
    Piece,
    encoded_slice,
    hops_of,
    parts_of,
    piece_bounds,
    sends,
    slice_bytes,
    wire_elements,
)
from towpath.spec.strategy import Kind
from towpath.spec.transitions import Move
from towpath.spec.wire import Wire
from towpath.topology.cluster import Topology

Needs = dict[str, int]  # elements by dtype


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective of a step, on every group that runs it at once. `elements`: of one group's region."""

    kind: Kind
    unit: str
    bucket: str
    move: Move
    wire: Wire
    elements: int
    dtype: str
    topology: Topology
    micro_step: int = 0

    @property
    def grid(self) -> Grid:
        return Grid.of(self._nodes)

    @property
    def _nodes(self) -> tuple[int, ...]:
        """Where the members of a group live: alike in all groups, as far as routes go."""
        return tuple(map(self.topology.node_of, self.move.groups[0].ranks))

    @property
    def route(self) -> str:
        """The one that is taken: some make no difference where there is one kind of link only."""
        return self.wire.route_on(self.move.op, self.grid)

    @property
    def parts(self) -> int:
        """Into how many each slice is cut on its way."""
        size = slice_bytes(self.elements, self.move.members, item_bytes(self.dtype), self.wire.encoding)
        return parts_of(self.route, self.grid, size)

    @property
    def inter_bytes(self) -> int:
        """Sent between nodes, all ranks together."""
        return sum(map(self.cable_bytes, range(self.topology.nodes)))

    @property
    def intra_bytes(self) -> int:
        """Sent inside nodes, all ranks together."""
        return self._bytes(_messages(self.move, self.route, self.topology, self.parts)[0])

    def cable_bytes(self, node: int) -> int:
        """Sent by `node` over its cable."""
        return self._bytes(_messages(self.move, self.route, self.topology, self.parts)[1][node])

    def _bytes(self, messages: Counted) -> int:
        return sum(self._message_bytes(piece, adds) * count for (piece, adds), count in messages)

    def _message_bytes(self, piece: Piece, adds: bool) -> int:
        codec, members = self.wire.encoding, self.move.members
        if codec is not None and not adds:  # encoded slices, gathered like any bytes
            start, end = piece_bounds(encoded_slice(codec, self.elements, members) * members, members, piece)
            return end - start
        start, end = piece_bounds(self.elements, members, piece, codec.grain if codec else 1)
        return codec.encoded_bytes(end - start) if codec else (end - start) * item_bytes(self.dtype)

    @property
    def region_bytes(self) -> int:
        return self.elements * item_bytes(self.dtype)

    @property
    def wire_needs(self) -> Needs:
        """What one rank needs to receive in, beside the region."""
        if self.kind is Kind.USAGE:
            return {}
        codec, group = self.wire.encoding, self.move.groups[0]
        own, sums = wire_elements(self.move.op, self.route, group, self._nodes, self.parts, self.elements, codec)
        if codec is not None:
            return {"uint8": own, "float32": sums if any(self.kept_elements) else 0}
        if self.dtype not in NARROW:
            return {self.dtype: own}
        return {self.dtype: own, "float32": sums}

    @property
    def kept_elements(self) -> tuple[int, ...]:
        """By hop: how many float32 of what the codec rounds away one rank keeps, to be added the next time."""
        hops = hops_of(self.route, self.grid)
        if self.wire.encoding is None or self.move.op is Op.ALL_GATHER:
            return ()
        kept = AllToAll(hops, self.parts, self.elements, self.wire.encoding).kept_elements
        asked = {"none": (), "first": (0,), "second": (len(hops) - 1,), "both": (0, 1)}[self.wire.feedback]
        return tuple(n if hop in asked else 0 for hop, n in enumerate(kept))

    def __str__(self) -> str:
        where = f"{self.unit or 'root'} [{self.bucket}]" if self.bucket else "all units"
        return f"{self.kind.value} of {where}, {self.move.op.value} over {self.move.members} ranks"


# How many messages carry each piece of a region, and whether they add it.
Counted = tuple[tuple[tuple[Piece, bool], int], ...]


@lru_cache(maxsize=4096)
def _messages(move: Move, route: str, topology: Topology, parts: int) -> tuple[Counted, tuple[Counted, ...]]:
    """Inside nodes, and out of each node."""
    intra: Counter[tuple[Piece, bool]] = Counter()
    leaving: list[Counter[tuple[Piece, bool]]] = [Counter() for _ in range(topology.nodes)]
    for group in move.groups:
        nodes = tuple(map(topology.node_of, group.ranks))
        for send in sends(move.op, route, group, nodes, parts):
            crosses = nodes[send.source] != nodes[send.target]
            (leaving[nodes[send.source]] if crosses else intra)[send.piece, send.adds] += 1
    return tuple(intra.items()), tuple(tuple(counts.items()) for counts in leaving)
