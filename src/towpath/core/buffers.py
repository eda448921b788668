"""The memory that one rank needs for a transfer: wire buffers, and what codecs keep between steps.

The planned sizes are those that collectives take. `AllToAll` and `crossing` are also how they lay out their buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from towpath.core.formats import NARROW, Codec, message_cell
from towpath.core.routes import (
    Form,
    Grid,
    Group,
    Op,
    Order,
    Send,
    call_parts,
    cell_elements,
    cells_of,
    concurrent_receives,
    effective_route,
    encoded_slice,
    hops_of,
    order_of,
    sends,
)
from towpath.core.strategy import BETWEEN_HOSTS
from towpath.core.transfer import Transfer
from towpath.core.units import Activation, Matrices, piece_bytes

# How many elements of memory something needs, by dtype.
Needs = dict[str, int]


def largest(needs: Iterable[Needs]) -> Needs:
    """Return the elements by dtype that suffice for each of `needs`, one at a time."""
    enough: Needs = {}
    for need in needs:
        for dtype, numel in need.items():
            enough[dtype] = max(numel, enough.get(dtype, 0))
    return enough


def wire_needs(transfer: Transfer) -> Needs:
    """Return the wire buffers that one rank needs for a transfer, in addition to the region."""
    if transfer.kind in BETWEEN_HOSTS:
        return {}
    if isinstance(transfer.payload, Matrices):  # pieces without a codec are received in their final memory
        return {"uint8": _encoded_by_a_rank(transfer.payload, transfer.transport.encoding)}
    if transfer.move.op is Op.SEND:
        return {"uint8": transfer.message_bytes}
    op, route, grid, parts, dtype = transfer.move.op, transfer.route, transfer.grid, transfer.parts, transfer.dtype
    codec, slots = transfer.transport.encoding, transfer.move.groups[0].slots
    own, sums = wire_elements(op, route, grid, parts, transfer.elements, codec, transfer.form, slots)
    if codec is not None:
        scratch = max(sums if any(kept_elements(transfer)) else 0, 2 * _kept_by_gather(transfer))
        return {"uint8": own, "float32": scratch}
    needs = {dtype: own} if dtype not in NARROW else {dtype: own, "float32": sums}
    if transfer.coding is not None:
        in_calls = transfer.form is Form.COLLECTIVES
        encoded = _message_cells(op, route, grid, 1 if in_calls else parts, transfer.elements, dtype)
        if in_calls:  # in place of the values
            return {"uint8": encoded + grouped_wire_elements(route, grid, encoded, slots)}
        needs["uint8"] = encoded
    return needs


def coalesced_bytes(transfer: Transfer) -> int:
    """Return the bytes of the wire buffer that a gather needs if others of its group run with it as one."""
    # As messages, the shards of all gathers are packed into it. Collectives that launch together need no copy, unless
    # slices are in an order that they cannot work on.
    if transfer.form is Form.MESSAGES:
        return transfer.region_bytes
    group, grid = transfer.move.groups[0], transfer.grid
    route = "hierarchical" if transfer.by_rows_and_columns else transfer.route
    direct = group.in_order if route == "flat" else order_of(group.slots, grid) is not Order.OTHER
    grouped = grouped_wire_elements(route, grid, transfer.region_bytes, group.slots)
    return grouped if direct else grouped + transfer.region_bytes


def kept_elements(transfer: Transfer) -> tuple[int, ...]:
    """Return how many float32 elements of codec state one rank keeps between steps, for each hop."""
    # This is the error feedback: what the codec rounded away, to be added in the next step. For a low-rank message it
    # also includes the factor that the next step starts from.
    payload, codec, feedback = transfer.payload, transfer.transport.encoding, transfer.transport.feedback
    if isinstance(payload, Activation):
        return (sum(transfer.transport.kept_for_message(payload.shape)),)
    if codec is None or transfer.move.op is Op.ALL_GATHER or isinstance(payload, Matrices):
        return ()
    hops = hops_of(transfer.route, transfer.grid)
    kept = AllToAll(hops, transfer.parts, transfer.elements, codec).kept_elements
    asked = {"none": (), "first": (0,), "second": (len(hops) - 1,), "both": (0, 1), "all": (0, 1)}[feedback]
    return tuple(n if hop in asked else 0 for hop, n in enumerate(kept))


def feedback_bytes(transfer: Transfer) -> int:
    """Return the bytes of codec state that one rank keeps between steps."""
    return 4 * (sum(kept_elements(transfer)) + _kept_by_gather(transfer))


def _kept_by_gather(transfer: Transfer) -> int:
    """Return how many float32 elements one rank keeps of its sum, where an all-reduce rounds it, too."""
    rounds = transfer.transport.encoding is not None and transfer.transport.feedback == "all"
    if not rounds or transfer.move.op is not Op.ALL_REDUCE:
        return 0
    return cell_elements(transfer.elements, transfer.move.members, 1, transfer.grain)


def _encoded_by_a_rank(payload: Matrices, codec: Codec | None) -> int:
    """Return the bytes of all encoded pieces that any rank sends and receives in one transfer, at most."""
    if codec is None:
        return 0
    through = Counter[int]()
    for matrix in payload.matrices:
        for slot, elements in enumerate(matrix.pieces):
            if slot != matrix.owner:
                through.update(dict.fromkeys((slot, matrix.owner), piece_bytes(elements, 0, codec)))
    return max(through.values(), default=0)


def wire_elements(
    op: Op,
    route: str,
    grid: Grid,
    parts: int,
    elements: int,
    codec: Codec | None = None,
    form: Form = Form.MESSAGES,
    slots: tuple[int, ...] = (),
) -> tuple[int, int]:
    """Return how large a wire buffer one member needs for a collective."""
    # `slots`: The slice that each member holds. By default, member i holds slice i.
    # Returned: Two sizes. The first is in elements of the region's dtype, or in bytes with a codec. The second is in
    # float32 elements: scratch memory to sum narrow dtypes in, or to compute what a codec rounds away.
    members = grid.nodes * grid.width
    gathered = encoded_slice(codec, elements, members) * members if codec else 0
    gather_route = effective_route(route, grid, Op.ALL_GATHER, form)
    route = effective_route(route, grid, op, form)
    if op is Op.ALL_REDUCE and route == "flat":
        return gathered, 0
    gathering = gathered
    if form is Form.COLLECTIVES:
        gathering += grouped_wire_elements(gather_route, grid, gathered if codec else elements, slots, parts)
    if op is Op.ALL_GATHER:
        return gathering, 0
    if hops := hops_of(route, grid):
        layout = AllToAll(hops, parts, elements, codec)
        return max(layout.wire_elements, gathering if op is Op.ALL_REDUCE else 0), layout.sum_elements
    if form is Form.COLLECTIVES and elements % members == 0:
        return grouped_wire_elements(route, grid, elements, slots, parts), 0
    return concurrent_receives(route, grid, parts) * cell_elements(elements, members, parts), 0


def grouped_wire_elements(route: str, grid: Grid, elements: int, slots: tuple[int, ...] = (), parts: int = 1) -> int:
    """Return how large a wire buffer a gather or a reduce-scatter needs in the form of collectives."""
    # It holds the bundle of this member's column, one slice of each node, unless columns are contiguous in the region.
    # If rows are not contiguous either, or if there are many nodes, it holds a copy of the region with such columns. In
    # parts, it holds the bundle and such a copy of one part.
    in_order = tuple(range(grid.nodes * grid.width))
    if route == "flat":
        return 0 if slots in ((), in_order) else elements
    if route == "ho-ring":
        return elements // grid.width + len(in_order) * call_parts(elements // len(in_order), parts)[0][1]
    order = order_of(slots or in_order, grid)
    return {Order.ROWS: elements // grid.width, Order.COLUMNS: 0, Order.OTHER: elements}[order]


@dataclass(frozen=True, slots=True)
class AllToAll:
    """The buffer sizes of a reduction by all-to-all, in one hop or two.

    In hop i a member exchanges segments with `hops[i]` members, including itself, and sums what arrives. A *stage*
    handles one part of every slice. Sizes are in elements of the region's dtype, or in bytes with a codec. `Transfer`
    uses them to count memory, and `AllToAllReduceScatter` uses them to allocate it.
    """

    hops: tuple[int, ...]
    stages: int
    elements: int
    codec: Codec | None = None

    @property
    def sets(self) -> int:
        """Number of stages whose buffers are in use at the same time."""
        return min(2, self.stages)

    @property
    def cell(self) -> int:
        """Length of the largest piece, in elements."""
        return cell_elements(self.elements, prod(self.hops), self.stages, self.codec.grain if self.codec else 1)

    @property
    def wire_cell(self) -> int:
        """Size of one cell of the wire buffer."""
        return self.codec.cell_bytes(self.cell) if self.codec else self.cell

    def cells(self, hop: int) -> int:
        """Return how many cells a stage's buffer for `hop` has, in all segments together."""
        return prod(self.hops[hop:])

    def starts(self, stage: int, hop: int) -> tuple[int, int]:
        """Return where the wire buffer has what `stage` sends in `hop`, and the rows that it receives."""
        # The rows are equally spaced. The row of this member is among them, in its place.
        each = [self.cells(h) * self.wire_cell for h in range(len(self.hops))]
        start = 2 * (stage % self.sets * sum(each) + sum(each[:hop]))
        return start, start + each[hop]

    @property
    def wire_elements(self) -> int:
        """Size of the wire buffer: the sent and received rows of all hops, for each set of buffers."""
        return 2 * self.sets * sum(map(self.cells, range(len(self.hops)))) * self.wire_cell

    @property
    def sum_elements(self) -> int:
        """Size of the float32 scratch memory of a reduction."""
        # With a codec it holds one piece before encoding, and the same piece decoded again. Without a codec it holds
        # the sums of a dtype that is too narrow to sum in.
        return 2 * self.cell if self.codec else self.cells(1) * self.cell

    @property
    def kept_elements(self) -> tuple[int, ...]:
        """Size of the error feedback before each hop, if it is kept."""
        # It is one float32 element for each element of the hop's buffer.
        return tuple(self.stages * self.cells(h) * self.cell for h in range(len(self.hops)))


@lru_cache(maxsize=256)
def crossing_cells(op: Op, route: str, grid: Grid, parts: int) -> int:
    """Return how many messages between nodes a member has in flight at a time, at most, in a collective of messages."""
    members = grid.nodes * grid.width
    group = Group(tuple(range(members)), tuple(range(members)))
    nodes = [j for j, _ in grid.places]
    every = list(sends(op, route, group, nodes, parts))
    return max(max(cells_of(crossing(every, nodes, member)), default=-1) for member in range(members)) + 1


def exchanged_cells(layout: AllToAll, grid: Grid) -> tuple[int, int]:
    """Return the messages between nodes that a stage of a reduction by all-to-all has in flight, and their elements."""
    hop = len(layout.hops) - 1  # the last one is the one between nodes
    peers = grid.nodes - 1 if hop else grid.nodes * grid.width - grid.width
    return 2 * peers, layout.cells(hop + 1) * layout.cell


def _message_cells(op: Op, route: str, grid: Grid, parts: int, elements: int, dtype: str) -> int:
    """Return the bytes of all encoded messages that a member has in flight at a time, in the form of messages."""
    members = grid.nodes * grid.width
    each = message_cell(cell_elements(elements, members, parts), dtype)
    if op is Op.ALL_GATHER:  # of a parameter sync: the slices of all members stay encoded on their way
        return members * parts * each
    if hops := hops_of(route, grid):
        layout = AllToAll(hops, parts, elements)
        count, longest = exchanged_cells(layout, grid)
        needed = layout.sets * count * message_cell(longest, dtype)
    else:
        needed = crossing_cells(Op.REDUCE_SCATTER, route, grid, parts) * each
    if op is Op.ALL_REDUCE:
        needed = max(needed, crossing_cells(Op.ALL_GATHER, route, grid, parts) * each)
    return needed


def crossing(messages: Sequence[Send], nodes: Sequence[int], member: int) -> list[Send]:
    """Return the messages of a member from or to other nodes, in the order of their steps."""
    return [s for s in messages if member in (s.source, s.target) and nodes[s.source] != nodes[s.target]]
