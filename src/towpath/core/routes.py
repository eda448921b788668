"""What each route sends, message by message: who, to whom, which part of which slice. `collectives/` executes it.

A collective works on a *region* of a flat buffer that its group shares. The region has one slice per member;
`slots[i]` is the slice of member i. Members are listed in the order a ring visits them: node by node.

    flat, ring      each member passes on what it received last, round the group
    hierarchical    round the members of equal place in their nodes; then, whole, among those of a node (MiCS 3.3)
    ho-ring         both at once: while one item crosses, the node shares out the one that came before (PaRO 3.3)
    one-hop         everyone sends each slice straight to everyone who lacks it
    two-hop         straight to those of equal place in the other nodes; from there straight to all of the node

Only gathers are laid out by hand. In a gather every member receives each foreign part exactly once, and before it
passes it on; so the same messages turned back in time, each adding what it brings, form the trees of a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import ceil, prod
from typing import Literal, NamedTuple, get_args

from towpath.core.formats import Codec

Route = Literal["flat", "ring", "hierarchical", "ho-ring", "one-hop", "two-hop"]


class Op(StrEnum):
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    SEND = "send"  # the first of a group to the second, in one message: no route, no slices
    TO_OWNERS = "gather to owners"  # of matrices, each straight from who holds a piece to its owner: no route
    FROM_OWNERS = "scatter from owners"  # and back


COLLECTIVES = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE)
WITH_OWNERS = (Op.TO_OWNERS, Op.FROM_OWNERS)


# A node shares out the last part alone, when nothing crosses any more: the more parts, the shorter that is. With more
# members a node a part meets more receivers at a time, and is smaller in turn, so that they need no more memory.
HO_RING_PARTS = 4
# The hop inside the nodes of one part runs beside the hop between nodes of another (ZeRO++ 4.1.2, pipelining).
TWO_HOP_PARTS = 4
# Each part costs a fixed time of its own, which smaller ones do not win back (`benchmarks/collectives.py`).
SMALLEST_PART_BYTES = 1 << 18
# How many steps an item of the HO-Ring has: two are under way at a time, so that no link waits for the next one (but
# what travels whole has to be there before it goes on).
HO_RING_STEPS = 2


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one collective, in ring order, and the slice of the region that each of them holds."""

    ranks: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        return self.slots == tuple(range(len(self.ranks)))


class Piece(NamedTuple):
    """Part `part` of `parts` of slice `slot`."""

    slot: int
    part: int
    parts: int


class Send(NamedTuple):
    """Member `source` sends a piece of the region to member `target` (positions in the group).

    It is posted in step `step`, when all that is due by then is complete, and is complete itself before step `until`.
    `adds`: the target adds it to what it has, else it takes its place.
    """

    step: int
    until: int
    source: int
    target: int
    slot: int
    part: int = 0
    parts: int = 1
    adds: bool = False

    @property
    def piece(self) -> Piece:
        return Piece(self.slot, self.part, self.parts)


Place = tuple[int, int]  # of a member: which node of the group, and which of the node's members


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the members of a group live: `nodes` × `width`; member j·width + m is the m-th of the j-th node."""

    nodes: int
    width: int

    @staticmethod
    def of(nodes: Sequence[int]) -> Grid:
        """From the node of each member."""
        rows = len(set(nodes))
        width = len(nodes) // rows
        runs = [set(nodes[i : i + width]) for i in range(0, len(nodes), width)]
        assert len(runs) == rows and all(len(run) == 1 for run in runs), f"not node by node, or uneven: {nodes}"
        return Grid(rows, width)

    @property
    def plain(self) -> bool:
        """One node, or one member a node: there is one kind of link only, and every route costs what a ring does."""
        return self.nodes == 1 or self.width == 1

    @property
    def places(self) -> list[Place]:
        return [(j, m) for j in range(self.nodes) for m in range(self.width)]

    def at(self, node: int, place: int) -> int:
        return node % self.nodes * self.width + place % self.width


def travelled(route: str, grid: Grid) -> str:
    """The route that is taken: on a plain grid none is better than the backend's own collectives."""
    assert route in ROUTES, route
    return "flat" if grid.plain and route not in ("ring", "one-hop") else route


def parts_of(route: str, grid: Grid, slice_bytes: int) -> int:
    """Into how many parts a route cuts each slice, so that what one link has brought goes on by another meanwhile."""
    most = {"ho-ring": max(HO_RING_PARTS, grid.width), "two-hop": TWO_HOP_PARTS}.get(travelled(route, grid), 1)
    return max(1, min(most, slice_bytes // SMALLEST_PART_BYTES))


def sends(op: Op, route: str, group: Group, nodes: Sequence[int], parts: int) -> Iterator[Send]:
    """Every message of one collective, in the order of its steps. `nodes`: where each member lives."""
    assert op in COLLECTIVES
    grid = Grid.of(nodes)
    gather = _gather(route, group.slots, grid, parts, grid.places)
    if op is Op.ALL_GATHER:
        return iter(gather)
    steps = max((s.until for s in gather), default=0)
    reduction = [_turned_back(s, steps) for s in reversed(gather)]
    reduction.sort(key=lambda s: s.step)
    return iter(reduction if op is Op.REDUCE_SCATTER else [*reduction, *(_later(s, steps) for s in gather)])


def _gather(route: str, slots: Sequence[int], grid: Grid, parts: int, places: Sequence[Place]) -> list[Send]:
    """What the members at `places` send."""
    return sorted(_GATHERS[travelled(route, grid)](slots, grid, parts, places), key=lambda s: s.step)


def _turned_back(s: Send, steps: int) -> Send:
    return Send(steps - s.until, steps - s.step, s.target, s.source, s.slot, s.part, s.parts, adds=True)


def _later(s: Send, steps: int) -> Send:
    return Send(s.step + steps, s.until + steps, s.source, s.target, s.slot, s.part, s.parts)


def _ring(slots: Sequence[int], grid: Grid, parts: int, places: Sequence[Place]) -> Iterator[Send]:
    members = len(slots)
    for step in range(members - 1):
        for i in (grid.at(*place) for place in places):
            yield Send(step, step + 1, i, (i + 1) % members, slots[(i - step) % members])


def _hierarchical(slots: Sequence[int], grid: Grid, parts: int, places: Sequence[Place]) -> Iterator[Send]:
    for step in range(grid.nodes - 1):
        for j, m in places:
            yield Send(step, step + 1, grid.at(j, m), grid.at(j + 1, m), slots[grid.at(j - step, m)])
    # The gathers of all bundles in one: in each step a member hands its own to another member of its node.
    for turn in range(1, grid.width):
        step = grid.nodes - 2 + turn
        for j, m in places:
            for origin in range(grid.nodes):
                yield Send(step, step + 1, grid.at(j, m), grid.at(j, m + turn), slots[grid.at(origin, m)])


def _ho_ring(slots: Sequence[int], grid: Grid, parts: int, places: Sequence[Place]) -> Iterator[Send]:
    """Item k, part k % parts of what is k // parts nodes from home, crosses from step k on; then its node shares it."""
    within = min(HO_RING_STEPS, parts)
    for k in range((grid.nodes - 1) * parts):
        hop, part = divmod(k, parts)
        for j, m in places:
            crossing = slots[grid.at(j - hop, m)]
            yield Send(k, k + within, grid.at(j, m), grid.at(j + 1, m), crossing, part, parts)
            arrived, step = slots[grid.at(j - 1 - hop, m)], k + within
            yield from _share_out(step, step + within, (j, m), grid, arrived, part, parts)
    for part in range(parts):
        step = part * (grid.nodes - 1)  # evenly spread: the links inside have the same to do in every step
        for j, m in places:
            yield from _share_out(step, step + within, (j, m), grid, slots[grid.at(j, m)], part, parts)


def _two_hop(slots: Sequence[int], grid: Grid, parts: int, places: Sequence[Place]) -> Iterator[Send]:
    for part in range(parts):
        for j, m in places:
            for other in range(1, grid.nodes):
                mine = slots[grid.at(j, m)]
                yield Send(part, part + 1, grid.at(j, m), grid.at(j + other, m), mine, part, parts)
            for origin in range(grid.nodes):
                yield from _share_out(part + 1, part + 2, (j, m), grid, slots[grid.at(origin, m)], part, parts)


def _share_out(step: int, until: int, home: Place, grid: Grid, slot: int, part: int, parts: int) -> Iterator[Send]:
    j, m = home
    for other in range(1, grid.width):
        yield Send(step, until, grid.at(j, m), grid.at(j, m + other), slot, part, parts)


def _one_hop(slots: Sequence[int], grid: Grid, parts: int, places: Sequence[Place]) -> Iterator[Send]:
    for i in (grid.at(*place) for place in places):
        for other in range(1, len(slots)):
            yield Send(0, 1, i, (i + other) % len(slots), slots[i])


# A backend's own collectives are rings where links are slow.
_GATHERS: dict[str, Callable[[Sequence[int], Grid, int, Sequence[Place]], Iterator[Send]]] = {
    "flat": _ring,
    "ring": _ring,
    "hierarchical": _hierarchical,
    "ho-ring": _ho_ring,
    "one-hop": _one_hop,
    "two-hop": _two_hop,
}
ROUTES: tuple[Route, ...] = get_args(Route)
ALL_TO_ALL: tuple[Route, ...] = ("one-hop", "two-hop")


def bounds(elements: int, pieces: int, index: int, grain: int = 1) -> tuple[int, int]:
    """Where piece `index` lies when `elements` are cut, at multiples of `grain`, as evenly as can be."""
    short, longer = divmod(ceil(elements / grain), pieces)  # the first ones are longer by one
    start = index * short + min(index, longer)
    end = start + short + (index < longer)
    return min(start * grain, elements), min(end * grain, elements)


def piece_bounds(elements: int, members: int, piece: Piece, grain: int = 1) -> tuple[int, int]:
    """Where a piece lies in a region of `elements`."""
    start, end = bounds(elements, members, piece.slot, grain)
    first, last = bounds(end - start, piece.parts, piece.part, grain)
    return start + first, start + last


def cells_of(receives: Sequence[Send]) -> list[int]:
    """A cell of the wire buffer for each message that is added, in the order of steps; free again when it is due."""
    due: list[int] = []  # by cell
    cells: list[int] = []
    for receive in receives:
        cell = next((c for c, until in enumerate(due) if until <= receive.step), len(due))
        due[cell : cell + 1] = [receive.until]
        cells.append(cell)
    return cells


def cell_elements(elements: int, members: int, parts: int, grain: int = 1) -> int:
    """The largest part of a slice: what a cell of the wire buffer has room for."""
    return min(ceil(ceil(ceil(elements / grain) / members) / parts) * grain, elements)


def hops_of(route: str, grid: Grid) -> tuple[int, ...]:
    """With how many members each hop of an all-to-all exchanges, itself among them; () for the other routes."""
    return {"one-hop": (grid.nodes * grid.width,), "two-hop": (grid.width, grid.nodes)}.get(route, ())


def wire_elements(
    op: Op, route: str, grid: Grid, parts: int, elements: int, codec: Codec | None = None
) -> tuple[int, int]:
    """The wire buffer a member needs: elements of the region's dtype (with a codec: bytes), and of the dtype that sums
    or keeps what was rounded away."""
    route, members = travelled(route, grid), grid.nodes * grid.width
    gathered = encoded_slice(codec, elements, members) * members if codec else 0
    if op is Op.ALL_GATHER or (op is Op.ALL_REDUCE and route == "flat"):
        return gathered, 0
    if hops := hops_of(route, grid):
        layout = AllToAll(hops, parts, elements, codec)
        return max(layout.wire_elements, gathered if op is Op.ALL_REDUCE else 0), layout.sum_elements
    return _cells(route, grid, parts) * cell_elements(elements, members, parts), 0


@lru_cache(maxsize=1024)
def _cells(route: str, grid: Grid, parts: int) -> int:
    """How many messages a member receives at a time, at most, in a reduction: the first member, as all do alike."""
    sent = _gather(route, range(grid.nodes * grid.width), grid, parts, [(0, 0)])
    steps = max((s.until for s in sent), default=0)
    received = sorted((_turned_back(s, steps) for s in reversed(sent)), key=lambda s: s.step)
    return max(cells_of(received), default=-1) + 1


def slice_bytes(elements: int, members: int, item_bytes: int, codec: Codec | None = None) -> int:
    """Of the longest slice, as it travels."""
    return encoded_slice(codec, elements, members) if codec else cell_elements(elements, members, 1) * item_bytes


def encoded_slice(codec: Codec, elements: int, members: int) -> int:
    """Bytes that each member's slice takes up when a region is gathered encoded."""
    return codec.encoded_bytes(cell_elements(elements, members, 1, codec.grain))


@dataclass(frozen=True, slots=True)
class AllToAll:
    """The buffers of a reduction in hops: in each hop a member exchanges with `hops[i]` of them, and sums.

    A stage has one part of every slice. Counted in elements of the region's dtype; with a codec, in bytes.
    """

    hops: tuple[int, ...]
    stages: int
    elements: int
    codec: Codec | None = None

    @property
    def sets(self) -> int:
        """Stages whose buffers are in use at a time."""
        return min(2, self.stages)

    @property
    def cell(self) -> int:
        """The largest piece, in elements."""
        return cell_elements(self.elements, prod(self.hops), self.stages, self.codec.grain if self.codec else 1)

    def sent(self, hop: int) -> int:
        """What a stage brings at most to a hop: for each of its members, this one included."""
        return prod(self.hops[hop:]) * (self.codec.encoded_bytes(self.cell) if self.codec else self.cell)

    def received(self, hop: int) -> int:
        """From each other member as much as it keeps for itself."""
        return self.sent(hop) // self.hops[hop] * (self.hops[hop] - 1)

    @property
    def wire_elements(self) -> int:
        return self.sets * sum(self.sent(h) + self.received(h) for h in range(len(self.hops)))

    @property
    def sum_elements(self) -> int:
        """Sums of a dtype too narrow to sum in; with a codec, one piece as it was, and one as it arrives."""
        return 2 * self.cell if self.codec else self.sent(0) // self.hops[0]

    @property
    def kept_elements(self) -> tuple[int, ...]:
        """Of what is rounded away before each hop, if it is kept: a float32 for every element brought to it."""
        return tuple(self.stages * prod(self.hops[h:]) * self.cell for h in range(len(self.hops)))


# --- route bytes ------------------------------------------------------------------------------------------------------
#
# How many bytes each route sends, in closed form: what the messages of `routes.sends` add up to.
#
# A link carries the whole region, but for what its receiver does not need: in a ring, the slice of the member that
# receives; by the routes of two levels, the slices of its node. A reduction's messages are a gather's turned back:
# what arrives at a node in one leaves it in the other.


@dataclass(frozen=True, slots=True)
class Sent:
    """By the members of one group together: inside their nodes, and out of each of their nodes."""

    inside: int
    leaving: tuple[int, ...]


def sent_bytes(op: Op, route: str, grid: Grid, gathered: Sequence[int], reduced: Sequence[int]) -> Sent:
    """What one collective of a group sends.

    `gathered`, `reduced`: the bytes of each member's slice, in the order of the ring, as a gather and as a reduction
    send it. An all-reduce does both.
    """
    route, inside, leaving = travelled(route, grid), 0, [0] * grid.nodes
    if op is not Op.ALL_GATHER:
        inside += _inside(route, grid, reduced)
        leaving = _arriving_in_a_gather(route, grid, reduced)
    if op is not Op.REDUCE_SCATTER:
        inside += _inside(route, grid, gathered)
        leaving = [a + b for a, b in zip(leaving, _leaving_in_a_gather(route, grid, gathered), strict=True)]
    return Sent(inside, tuple(leaving))


def _inside(route: str, grid: Grid, slices: Sequence[int]) -> int:
    total = sum(slices)
    if route in ("flat", "ring"):
        receivers = [i for i in range(len(slices)) if i % grid.width or grid.nodes == 1]
        return len(receivers) * total - sum(slices[i] for i in receivers)
    return (grid.width - 1) * total * (1 if route == "one-hop" else grid.nodes)


def _arriving_in_a_gather(route: str, grid: Grid, slices: Sequence[int]) -> list[int]:
    """By node, from other nodes."""
    if grid.nodes == 1:
        return [0]
    total, of_node = sum(slices), _by_node(grid, slices)
    if route in ("flat", "ring"):
        return [total - slices[first] for first in range(0, len(slices), grid.width)]
    copies = grid.width if route == "one-hop" else 1
    return [copies * (total - own) for own in of_node]


def _leaving_in_a_gather(route: str, grid: Grid, slices: Sequence[int]) -> list[int]:
    if route in ("one-hop", "two-hop"):  # each slice straight to all other nodes
        receivers = (grid.nodes - 1) * (grid.width if route == "one-hop" else 1)
        return [receivers * own for own in _by_node(grid, slices)]
    arriving = _arriving_in_a_gather(route, grid, slices)
    return [*arriving[1:], arriving[0]]  # all of it at the next node


def _by_node(grid: Grid, slices: Sequence[int]) -> list[int]:
    return [sum(slices[i : i + grid.width]) for i in range(0, len(slices), grid.width)]


# --- route phases -----------------------------------------------------------------------------------------------------
#
# How long each route keeps which links busy, in closed form: what the messages of `routes.sends` add up to.
#
#     Phase     rounds that follow one another; what crosses between nodes and what stays inside travel at the same time
#
# Where a route does one after the other, it has two phases. All members of a group are alike here, and all groups.


@dataclass(frozen=True, slots=True)
class Phase:
    """In slices of the region: `leaving` those that leave each node, `inside` those that a rank sends to its node.

    `messages_out`, `messages_inside`: how many messages a rank sends there, on average: of a ring's ranks in a node
    only the last one sends out of it. All of the whole phase, over its rounds.
    """

    rounds: int
    leaving: float
    inside: float
    messages_out: float
    messages_inside: float


@lru_cache(maxsize=4096)
def phases(op: Op, route: str, grid: Grid, parts: int = 1) -> tuple[Phase, ...]:
    """Of one collective of a group, in their order."""
    if op is Op.SEND:
        out, inside = (1, 0) if grid.nodes > 1 else (0, 1)
        return (Phase(1, out, inside, out, inside),)
    gather = tuple(p for p in _PHASES[travelled(route, grid)](grid, parts) if p.rounds)
    return {
        Op.ALL_GATHER: gather,
        Op.REDUCE_SCATTER: gather[::-1],
        Op.ALL_REDUCE: (*gather[::-1], *gather),
    }[op]


def _ring_phases(grid: Grid, parts: int) -> Iterator[Phase]:
    others = grid.nodes * grid.width - 1
    messages_out = others / grid.width if grid.nodes > 1 else 0
    yield Phase(others, others * (grid.nodes > 1), others * (grid.width > 1), messages_out, others - messages_out)


def _hierarchical_phases(grid: Grid, parts: int) -> Iterator[Phase]:
    out, inside = grid.nodes - 1, (grid.width - 1) * grid.nodes
    yield Phase(out, grid.width * out, 0, out, 0)
    yield Phase(grid.width - 1, 0, inside, 0, inside)


def _ho_ring_phases(grid: Grid, parts: int) -> Iterator[Phase]:
    """The node shares out what has crossed while the next part crosses; the last part alone."""
    within = min(HO_RING_STEPS, parts)
    out, last = (grid.nodes - 1) * parts, grid.width - 1
    shared = last * (grid.nodes * parts - 1)
    yield Phase(out - 1 + within, grid.width * (grid.nodes - 1), shared / parts, out, shared)
    yield Phase(within, 0, last / parts, 0, last)


def _two_hop_phases(grid: Grid, parts: int) -> Iterator[Phase]:
    out, last = (grid.nodes - 1) * parts, (grid.width - 1) * grid.nodes
    shared = last * (parts - 1)
    yield Phase(parts, grid.width * (grid.nodes - 1), shared / parts, out, shared)
    yield Phase(1, 0, last / parts, 0, last)


def _one_hop_phases(grid: Grid, parts: int) -> Iterator[Phase]:
    out, inside = grid.width * (grid.nodes - 1), grid.width - 1
    yield Phase(1, grid.width * out, inside, out, inside)


_PHASES: dict[str, Callable[[Grid, int], Iterator[Phase]]] = {
    "flat": _ring_phases,
    "ring": _ring_phases,
    "hierarchical": _hierarchical_phases,
    "ho-ring": _ho_ring_phases,
    "one-hop": _one_hop_phases,
    "two-hop": _two_hop_phases,
}
