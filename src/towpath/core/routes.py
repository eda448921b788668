"""The messages of each collective for every route, and their bytes and timing in closed form.

A *route* decides which messages a collective is made of. `sends` lists them, and `collectives/` executes the list. A
collective works on a *region*: a contiguous buffer that its group shares, with one slice per member. `slots[i]` is the
slice that member i holds. Members are listed in ring order, node by node.

The routes of an all-gather:

    flat, ring      each member forwards to its neighbor what it received last
    hierarchical    a ring among members of equal place in their nodes; then their bundles inside each node (MiCS 3.3)
    ho-ring         both at the same time: while one item crosses, the node shares out the previous one (PaRO 3.3)
    one-hop         each member sends its slice directly to every other member
    two-hop         each member sends its slice to its peers of equal place; each of them shares it out in its node

Only all-gathers are written out. In an all-gather every member receives each part that it lacks exactly once, and
before it forwards that part. Reductions therefore use the same messages in reverse order, and each message adds its
content at the target.

A *form* says how a route is executed. NCCL takes few large collectives in place of the messages:

    flat, ring               the backend's own collective over the whole group
    hierarchical             an all-gather over a *column* (one member of each node), then one over each *row* (a node)
    ho-ring                  as hierarchical, in parts: while one part is in its column, another is in its row
    two-hop                  as hierarchical, but reductions exchange slices all-to-all, first in rows, then in columns
    one-hop                  as flat, but reductions exchange slices all-to-all
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import groupby
from math import ceil
from typing import Literal, NamedTuple, get_args

from towpath.core.formats import CELL_ALIGNMENT, Codec, cell_alignment

Route = Literal["flat", "ring", "hierarchical", "ho-ring", "one-hop", "two-hop"]


class Op(StrEnum):
    """The operation of a transfer: a collective of a group, a message, or an exchange with owners of matrices."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    # The first rank of a group sends one message to the second. There are no slices and there is no route.
    SEND = "send"
    # Each holder of a piece of a matrix sends it directly to the matrix's owner, without a route.
    TO_OWNERS = "gather to owners"
    # Each owner sends the pieces back to their holders.
    FROM_OWNERS = "scatter from owners"


COLLECTIVES = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE)
WITH_OWNERS = (Op.TO_OWNERS, Op.FROM_OWNERS)


class Form(StrEnum):
    """How a route is executed."""

    # As the messages that `sends` lists: for gloo, whose messages overlap.
    MESSAGES = "messages"
    # As few collectives of the backend, over columns and rows: for NCCL, where each call costs the host time.
    COLLECTIVES = "collectives"


# A node shares out the last part when nothing crosses any more, so more parts make this tail shorter. Nodes with
# more members get more parts: each part then has more receivers but is smaller, so that they need no more memory.
HO_RING_PARTS = 4
# The hop inside nodes of one part overlaps with the hop between nodes of another part (ZeRO++ 4.1.2, pipelining).
TWO_HOP_PARTS = 4
# In the form of collectives, each part takes two calls. An all-reduce ends with the two calls of a gather. With three
# parts it makes as many calls as a reduction of four parts.
TWO_HOP_PARTS_OF_AN_ALL_REDUCE = 3
# The HO-Ring also takes two calls for each part, and an all-reduce four.
HO_RING_PARTS_IN_CALLS = {Op.ALL_GATHER: 4, Op.REDUCE_SCATTER: 4, Op.ALL_REDUCE: 2}
# Each part costs a fixed time. Smaller parts lose more by it than they gain (benchmarks/suites/collectives.py).
SMALLEST_PART_BYTES = 1 << 18
# A call of NCCL has a higher fixed cost than a message. With parts of this size, each call gathers at least 4 MiB.
SMALLEST_PART_BYTES_IN_CALLS = 1 << 21
# How many steps an item of the HO-Ring may take. Two items are in flight at a time, so that no link waits for the next
# one. A slice that is not cut into parts takes one step, because it must arrive before it is forwarded.
HO_RING_STEPS = 2

# How many calls a row makes in one launch, at most. Where rows are contiguous in memory, it makes one for each node.
# The host takes about 18 µs for each call of a launch, so that 64 nodes would take it 1 ms for each bucket. On more
# nodes, one call and a copy of the region on the device are faster.
MOST_ROW_CALLS = 8


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one collective in ring order, and the slice of the region that each rank holds."""

    ranks: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        """True if member i holds slice i, as the single-tensor collectives of `torch.distributed` require."""
        return self.slots == tuple(range(len(self.ranks)))


class SlicePart(NamedTuple):
    """Part `part` of `parts` of slice `slot`."""

    slot: int
    part: int
    parts: int


class Send(NamedTuple):
    """A message of a collective: member `source` sends a piece of the region to member `target`.

    Members are positions in the group. The message is posted in step `step`, once all messages that are due by then
    have completed. It completes before step `until`. If `adds` is set, the target adds the piece to its own, else it
    overwrites.
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
    def piece(self) -> SlicePart:
        return SlicePart(self.slot, self.part, self.parts)


# The place of a member: the index of its node in the group, and its own index in that node.
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Grid:
    """The members of a group as `nodes` × `width`: member j·width + m is the m-th member of the j-th node.

    If nodes have unequal numbers of members, each member counts as a node, because there are no columns.
    """

    nodes: int
    width: int

    @staticmethod
    def of(nodes: Sequence[int]) -> Grid:
        """Return the grid of a group from the node of each member, in ring order."""
        runs = [len(list(run)) for _, run in groupby(nodes)]
        assert len(runs) == len(set(nodes)), f"not node by node: {nodes}"
        return Grid(len(runs), runs[0]) if len(set(runs)) == 1 else Grid(len(nodes), 1)

    @property
    def plain(self) -> bool:
        """True if the group has only one kind of link: it has one node, or one member per node."""
        # Every route then costs as much as a ring.
        return self.nodes == 1 or self.width == 1

    @property
    def crossing_share(self) -> float:
        """The bytes on a node's link by columns and rows, as a share of those of a ring over the whole group."""
        members = self.nodes * self.width
        return (members - self.width) / (members - 1) if members > 1 else 1.0

    @property
    def places(self) -> list[Place]:
        """The place of each member, in ring order."""
        return [(j, m) for j in range(self.nodes) for m in range(self.width)]

    def at(self, node: int, place: int) -> int:
        """Return the position of the member at `place` of node `node`. Both indices wrap around."""
        return node % self.nodes * self.width + place % self.width


def effective_route(route: str, grid: Grid, op: Op = Op.ALL_GATHER, form: Form = Form.MESSAGES) -> str:
    """Return the route that is used on `grid` when `route` is configured."""
    # On a plain grid no route is better than the backend's own collectives. All routes but 'ring' and 'one-hop' then
    # become 'flat'. In the form of collectives, routes that make the same calls become one. For an all-reduce, it is
    # the route of the reduction.
    assert route in ROUTES, route
    if form is Form.COLLECTIVES:
        direct = op is not Op.ALL_GATHER and route in ALL_TO_ALL
        if not direct and route != "ho-ring":
            route = "flat" if route in ("flat", "ring", "one-hop") else "hierarchical"
    return "flat" if grid.plain and route not in ("ring", "one-hop") else route


def parts_of(route: str, grid: Grid, slice_bytes: int, op: Op = Op.ALL_GATHER, form: Form = Form.MESSAGES) -> int:
    """Return how many parts `route` cuts each slice into."""
    # With several parts, one link forwards a part while another link still receives the next one.
    used, in_calls = effective_route(route, grid, op, form), form is Form.COLLECTIVES
    most, smallest = 1, SMALLEST_PART_BYTES
    if used == "two-hop":
        most = TWO_HOP_PARTS_OF_AN_ALL_REDUCE if in_calls and op is Op.ALL_REDUCE else TWO_HOP_PARTS
    elif used == "ho-ring" and in_calls:
        most, smallest = HO_RING_PARTS_IN_CALLS[op], SMALLEST_PART_BYTES_IN_CALLS
    elif used == "ho-ring":
        most = max(HO_RING_PARTS, grid.width)
    return max(1, min(most, slice_bytes // smallest))


def call_parts(length: int, parts: int) -> list[tuple[int, int]]:
    """Return the start and end of each part of a slice of `length` elements, for collectives. The first is longest."""
    return [bounds(length, parts, part, CELL_ALIGNMENT) for part in range(parts)]


class Order(StrEnum):
    """The order of a group's slices in memory. Collectives over columns and rows need some of them to be contiguous."""

    ROWS = "rows"  # The slices of each node are contiguous, in the members' order, and there are few nodes.
    COLUMNS = "columns"  # The slices of each column are contiguous, and so are the columns, in the members' order.
    OTHER = "other"


def order_of(slots: tuple[int, ...], grid: Grid) -> Order:
    """Return the order of the slices of a group whose member i holds slice `slots[i]`."""
    found = _order_of(slots, grid)
    return Order.OTHER if found is Order.ROWS and grid.nodes > MOST_ROW_CALLS else found


@lru_cache(maxsize=1024)
def _order_of(slots: tuple[int, ...], grid: Grid) -> Order:
    if all(slots[grid.at(j, m)] == slots[grid.at(j, 0)] + m for j, m in grid.places):
        return Order.ROWS
    return Order.COLUMNS if slots == columns_first(grid) else Order.OTHER


def columns_first(grid: Grid) -> tuple[int, ...]:
    """Return the slices that the members hold if the slices of each column are contiguous, and so are the columns."""
    return tuple(m * grid.nodes + j for j, m in grid.places)


def sends(op: Op, route: str, group: Group, nodes: Sequence[int], parts: int) -> Iterator[Send]:
    """Return every message of one collective, in the order of its steps."""
    # `op`: An all-gather, reduce-scatter or all-reduce. An all-reduce is a reduce-scatter followed by an all-gather.
    # `route`: The configured route. On a plain grid it may become 'flat' (see `effective_route`).
    # `nodes`: The node of each member, in ring order.
    assert op in COLLECTIVES
    grid = Grid.of(nodes)
    gather = _gather(route, group.slots, grid, parts, grid.places)
    if op is Op.ALL_GATHER:
        return iter(gather)
    steps = max((s.until for s in gather), default=0)
    reduction = [_turned_back(s, steps) for s in reversed(gather)]
    reduction.sort(key=lambda s: s.step)
    if op is Op.REDUCE_SCATTER:
        return iter(reduction)
    return iter([*reduction, *(s._replace(step=s.step + steps, until=s.until + steps) for s in gather)])


def _gather(route: str, slots: Sequence[int], grid: Grid, parts: int, places: Sequence[Place]) -> list[Send]:
    """Return the messages that the members at `places` send in an all-gather, in the order of steps."""
    return sorted(_GATHERS[effective_route(route, grid)](slots, grid, parts, places), key=lambda s: s.step)


def _turned_back(s: Send, steps: int) -> Send:
    return Send(steps - s.until, steps - s.step, s.target, s.source, s.slot, s.part, s.parts, adds=True)


def _ring(slots: Sequence[int], grid: Grid, parts: int, places: Sequence[Place]) -> Iterator[Send]:
    members = len(slots)
    for step in range(members - 1):
        for i in (grid.at(*place) for place in places):
            yield Send(step, step + 1, i, (i + 1) % members, slots[(i - step) % members])


def _hierarchical(slots: Sequence[int], grid: Grid, parts: int, places: Sequence[Place]) -> Iterator[Send]:
    for step in range(grid.nodes - 1):
        for j, m in places:
            yield Send(step, step + 1, grid.at(j, m), grid.at(j + 1, m), slots[grid.at(j - step, m)])
    # Inside each node, a member sends its bundle, one slice from each node, to a different member in each step.
    for turn in range(1, grid.width):
        step = grid.nodes - 2 + turn
        for j, m in places:
            for origin in range(grid.nodes):
                yield Send(step, step + 1, grid.at(j, m), grid.at(j, m + turn), slots[grid.at(origin, m)])


def _ho_ring(slots: Sequence[int], grid: Grid, parts: int, places: Sequence[Place]) -> Iterator[Send]:
    """Yield the messages of an HO-Ring all-gather."""
    # Item k is part `k % parts` of a slice that comes from `k // parts` nodes before the sender's. It crosses to the
    # next node from step k on. Then the next node shares it out.
    within = min(HO_RING_STEPS, parts)
    for k in range((grid.nodes - 1) * parts):
        hop, part = divmod(k, parts)
        for j, m in places:
            crossing = slots[grid.at(j - hop, m)]
            yield Send(k, k + within, grid.at(j, m), grid.at(j + 1, m), crossing, part, parts)
            arrived, step = slots[grid.at(j - 1 - hop, m)], k + within
            yield from _share_out(step, step + within, (j, m), grid, arrived, part, parts)
    for part in range(parts):
        # The node's own slices are shared out at evenly spaced steps, so that its inner links stay equally busy.
        step = part * (grid.nodes - 1)
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


# 'flat' is counted as a ring, because backends use rings where links are slow.
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
# The routes with groups of rows and columns, for which nodes must have equally many members.
WITH_COLUMNS: tuple[Route, ...] = ("hierarchical", "ho-ring", "two-hop")


def bounds(elements: int, pieces: int, index: int, grain: int = 1) -> tuple[int, int]:
    """Return the start and end of piece `index` of a buffer that is cut as evenly as possible."""
    # `grain`: Cuts are made at multiples of this many elements. Codecs pass their block size.
    # The first `longer` pieces get one grain more than the others.
    short, longer = divmod(ceil(elements / grain), pieces)
    start = index * short + min(index, longer)
    end = start + short + (index < longer)
    return min(start * grain, elements), min(end * grain, elements)


def piece_bounds(elements: int, members: int, piece: SlicePart, grain: int = 1) -> tuple[int, int]:
    """Return the start and end of `piece` in a region of `elements`."""
    start, end = bounds(elements, members, piece.slot, grain)
    first, last = bounds(end - start, piece.parts, piece.part, grain)
    return start + first, start + last


def cells_of(receives: Sequence[Send]) -> list[int]:
    """Assign a cell of the wire buffer to each received message whose content is added."""
    # The messages are in the order of their steps. A cell is reused from the step at which its message is due.
    due: list[int] = []  # indexed by cell
    cells: list[int] = []
    for receive in receives:
        cell = next((c for c, until in enumerate(due) if until <= receive.step), len(due))
        due[cell : cell + 1] = [receive.until]
        cells.append(cell)
    return cells


def cell_elements(elements: int, members: int, parts: int, grain: int = 1) -> int:
    """Return the length of the largest part of a slice, which is the size of one cell of the wire buffer."""
    return min(ceil(ceil(ceil(elements / grain) / members) / parts) * grain, elements)


def hops_of(route: str, grid: Grid) -> tuple[int, ...]:
    """Return how many members take part in each hop of an all-to-all route, including this one."""
    # It is empty for the other routes.
    return {"one-hop": (grid.nodes * grid.width,), "two-hop": (grid.width, grid.nodes)}.get(route, ())


@lru_cache(maxsize=1024)
def concurrent_receives(route: str, grid: Grid, parts: int) -> int:
    """Return how many messages the first member, like every other, receives at the same time in a reduction."""
    sent = _gather(route, range(grid.nodes * grid.width), grid, parts, [(0, 0)])
    steps = max((s.until for s in sent), default=0)
    received = sorted((_turned_back(s, steps) for s in reversed(sent)), key=lambda s: s.step)
    return max(cells_of(received), default=-1) + 1


def slice_bytes(elements: int, members: int, item_bytes: int, codec: Codec | None = None) -> int:
    """Return how many bytes the longest slice takes when it is sent."""
    return encoded_slice(codec, elements, members) if codec else cell_elements(elements, members, 1) * item_bytes


def encoded_slice(codec: Codec, elements: int, members: int) -> int:
    """Return how many bytes each member's slice takes when a region is gathered with `codec`: a cell of the wire."""
    return codec.cell_bytes(cell_elements(elements, members, 1, codec.grain))


def byte_grain(nbytes: int, members: int) -> int:
    """Return what cuts of a region of `nbytes` bytes are a multiple of, so that its messages start aligned."""
    # It is 1 if the members' slices themselves do not start aligned.
    size, rest = divmod(nbytes, members)
    fits = (n for n in (cell_alignment(size), CELL_ALIGNMENT) if not rest and size % n == 0)
    return next(fits, 1)
