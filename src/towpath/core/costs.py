"""The costs of a transfer: the bytes that it sends, how long it keeps which links busy, and what a rank launches.

Bytes and phases are in closed form. The messages of `routes.sends` add up to the same. On a device, the thread that
trains launches all work, one piece after the other. `tests/unit/test_launch_counts.py` compares the counts of launches
with what the engine launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from towpath.core.formats import NARROW, item_bytes
from towpath.core.routes import (
    ALL_TO_ALL,
    COLLECTIVES,
    HO_RING_STEPS,
    WITH_OWNERS,
    Form,
    Grid,
    Group,
    Op,
    Order,
    bounds,
    cell_elements,
    effective_route,
    encoded_slice,
    hops_of,
    order_of,
)
from towpath.core.strategy import TransferKind
from towpath.core.units import Matrices, Range, owner_messages, piece_bytes

if TYPE_CHECKING:
    from towpath.core.transfer import Transfer


# A link carries the region without the slices that its receiver already has. In a ring that is the receiver's own
# slice. In the two-level routes it is the slices of the receiver's node. A reduction reverses the messages of a gather,
# so that what arrives at a node in one leaves it in the other.


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes sent inside nodes, all nodes together, and bytes sent out of each node and out of each rack."""

    inside: int
    leaving: tuple[int, ...]
    leaving_racks: tuple[int, ...]


def traffic(transfer: Transfer) -> Traffic:
    """Return the bytes that all groups of a transfer send."""
    # In the form of collectives, an all-gather of the backend counts as a ring, and an all-to-all as direct messages.
    # Most transfers differ in their unit, kind and micro-step only. They are counted once.
    payload = transfer.payload
    payload = replace(payload, unit="", bucket="") if isinstance(payload, Range) else payload
    return _traffic(replace(transfer, kind=TransferKind.GATHER, payload=payload, micro_step=0))


@lru_cache(maxsize=4096)
def _traffic(transfer: Transfer) -> Traffic:
    topology, inside = transfer.topology, 0
    leaving, leaving_racks = [0] * topology.nodes, [0] * topology.racks
    for within, crossing in _by_group(transfer):
        inside += within
        for node, nbytes, out_of_rack in crossing:
            leaving[node] += nbytes
            leaving_racks[topology.rack_of(node)] += out_of_rack
    return Traffic(inside, tuple(leaving), tuple(leaving_racks))


# A node, the bytes that leave it, and how many of them leave its rack.
_Crossing = tuple[int, int, int]


def _by_group(transfer: Transfer) -> Iterator[tuple[int, Iterable[_Crossing]]]:
    """Yield the bytes that each group sends inside nodes, and those that leave each of its nodes."""
    topology, op = transfer.topology, transfer.move.op
    slices = _slice_sizes(transfer) if op in COLLECTIVES else ([], [])
    # Most groups have members on nodes in the same pattern, with slices in the same order. Each pattern is counted
    # once.
    alike: dict[tuple[object, ...], tuple[int, list[_Crossing]]] = {}
    for group in transfer.move.groups:
        nodes = [topology.node_of(rank) for rank in group.ranks]
        racks = [topology.rack_of(node) for node in nodes]
        if op not in COLLECTIVES:
            yield _of_messages(_messages(transfer, group), nodes, racks)
            continue
        after = [node - nodes[0] for node in nodes]
        key = (group.slots, *after, *(rack - racks[0] for rack in racks))
        if key not in alike:
            gathered, reduced = ([nbytes[slot] for slot in group.slots] for nbytes in slices)
            alike[key] = _of_collective(transfer, after, racks, gathered, reduced)
        inside, crossing = alike[key]
        yield inside, ((nodes[0] + node, nbytes, out_of_rack) for node, nbytes, out_of_rack in crossing)


def _messages(transfer: Transfer, group: Group) -> Iterator[tuple[int, int, int]]:
    """Yield the sender, the receiver and the bytes of each message that takes no route."""
    payload, codec = transfer.payload, transfer.transport.encoding
    if not isinstance(payload, Matrices):
        yield 0, 1, transfer.message_bytes
        return
    for source, target, matrix, slot in owner_messages(transfer.move.op, payload.matrices, group):
        yield source, target, piece_bytes(payload.matrices[matrix].pieces[slot], item_bytes(payload.dtype), codec)


def _of_messages(
    messages: Iterable[tuple[int, int, int]], nodes: Sequence[int], racks: Sequence[int]
) -> tuple[int, list[_Crossing]]:
    inside, crossing = 0, list[_Crossing]()
    for source, target, nbytes in messages:
        if nodes[source] == nodes[target]:
            inside += nbytes
        else:
            crossing.append((nodes[source], nbytes, nbytes * (racks[source] != racks[target])))
    return inside, crossing


def _of_collective(
    transfer: Transfer, nodes: Sequence[int], racks: Sequence[int], gathered: Sequence[int], reduced: Sequence[int]
) -> tuple[int, list[_Crossing]]:
    """Return the bytes of one group inside nodes, and those that leave each node."""
    # `nodes`, `racks`: Those of each member.
    # `gathered`: The bytes of each member's slice in a gather, in ring order.
    # `reduced`: The bytes of each member's slice in a reduction, in ring order.
    op, form, grid = transfer.move.op, transfer.form, Grid.of(nodes)
    halves = list[tuple[str, Sequence[int], bool]]()
    if op is not Op.ALL_GATHER:
        halves.append((effective_route(transfer.route, grid, op, form), reduced, True))
    if op is not Op.REDUCE_SCATTER:
        # Bytes of an encoded sum are gathered by the configured route, which may be a ring where sums go directly.
        route = transfer.route if transfer.transport.encoding is None else transfer.transport.route
        halves.append((effective_route(route, grid, Op.ALL_GATHER, form), gathered, False))
    inside, crossing = 0, list[_Crossing]()
    for route, slices, reverse in halves:
        if route in ("flat", "ring") or len(set(nodes)) < grid.nodes:
            within, out = _of_messages(_without_columns(route, slices, reverse), nodes, racks)
        else:
            within = _inside(route, grid, slices)
            rows = _crossing(route, grid, racks[:: grid.width], slices, reverse)
            out = [(nodes[grid.width * row], nbytes, far) for row, nbytes, far in rows]
        inside, crossing = inside + within, crossing + out
    return inside, crossing


def _without_columns(route: str, slices: Sequence[int], reverse: bool) -> Iterator[tuple[int, int, int]]:
    """Yield the sender, the receiver and the bytes between two members of a ring, or of direct messages."""
    total, members = sum(slices), len(slices)
    for one in range(members):
        for step in range(1, members if route in ALL_TO_ALL else 2):
            other = (one + step) % members
            # In a ring, all slices but the receiver's own pass.
            nbytes = slices[one] if route in ALL_TO_ALL else total - slices[other]
            yield (other, one, nbytes) if reverse else (one, other, nbytes)


def _crossing(
    route: str, grid: Grid, racks: Sequence[int], slices: Sequence[int], reverse: bool = False
) -> Iterator[_Crossing]:
    """Yield each row of the grid with the bytes that leave it in a gather. In a reduction (`reverse`), they go back."""
    total, of_node = sum(slices), [sum(slices[i : i + grid.width]) for i in range(0, len(slices), grid.width)]
    if route in ALL_TO_ALL:  # each node sends its own slices directly to all other nodes
        copies, in_rack, rooms = grid.width if route == "one-hop" else 1, Counter[int](), Counter(racks)
        for rack, own in zip(racks, of_node, strict=True):
            in_rack[rack] += own
        for node, (rack, own) in enumerate(zip(racks, of_node, strict=True)):
            out, far = (grid.nodes - 1) * own, (grid.nodes - rooms[rack]) * own
            if reverse:
                out, far = total - own, total - in_rack[rack]
            yield node, copies * out, copies * far
    elif grid.nodes > 1:
        for node in range(grid.nodes):
            nbytes = total - of_node[node]  # everything but the slices that the receiver's node has
            sender = node if reverse else (node - 1) % grid.nodes
            yield sender, nbytes, nbytes * (racks[node] != racks[node - 1])


def _inside(route: str, grid: Grid, slices: Sequence[int]) -> int:
    return (grid.width - 1) * sum(slices) * (1 if route == "one-hop" else grid.nodes)


def _slice_sizes(transfer: Transfer) -> tuple[list[int], list[int]]:
    """Return the bytes of each slice in a gather, and in a reduction."""
    elements, members, codec = transfer.elements, transfer.move.members, transfer.transport.encoding
    if codec is None:
        cuts = (bounds(elements, members, slot) for slot in range(members))
        plain = [(end - start) * item_bytes(transfer.dtype) for start, end in cuts]
        return plain, plain
    reduced = transfer.parts * codec.cell_bytes(cell_elements(elements, members, transfer.parts, codec.grain))
    return [encoded_slice(codec, elements, members)] * members, [reduced] * members


# A *phase* is a sequence of rounds in which the links between nodes and inside nodes work at the same time. A route
# that uses them one after the other has two phases. All members and all groups are assumed to be equal.


@dataclass(frozen=True, slots=True)
class PhaseLoad:
    """The load of one phase of a route, summed over its rounds.

    Amounts are in slices of the region, and message counts are averages over the ranks. In a ring, only the last rank
    of each node sends out of the node.
    """

    rounds: int  # how many rounds follow one another
    leaving: float  # slices that leave each node
    inside: float  # slices that each rank sends inside its node
    # Messages that each rank sends out of its node. In the form of collectives, these are the calls of groups that
    # cross nodes.
    messages_out: float
    messages_inside: float  # messages that each rank sends inside its node, or calls of groups that stay inside


@lru_cache(maxsize=4096)
def phases(op: Op, route: str, grid: Grid, parts: int = 1, form: Form = Form.MESSAGES) -> tuple[PhaseLoad, ...]:
    """Return the phases of one collective of a group, in their order."""
    # `op`: The operation. A reduction runs the phases of a gather in reverse order.
    # `grid`: The members of the group, or the two ends of a message.
    if op is Op.SEND:
        out, inside = (1, 0) if grid.nodes > 1 else (0, 1)
        return (PhaseLoad(1, out, inside, out, inside),)
    found: list[PhaseLoad] = []
    if op is not Op.ALL_GATHER:
        found += reversed(_gather_phases(effective_route(route, grid, op, form), grid, parts, form))
    if op is not Op.REDUCE_SCATTER:
        gather = _gather_phases(effective_route(route, grid, Op.ALL_GATHER, form), grid, parts, form)
        if form is Form.COLLECTIVES and op is Op.ALL_REDUCE and effective_route(route, grid, op, form) == "flat":
            gather = [replace(p, messages_out=0, messages_inside=0) for p in gather]  # one call does both halves
        found += gather
    return tuple(found)


def _gather_phases(route: str, grid: Grid, parts: int, form: Form) -> list[PhaseLoad]:
    in_parts = form is Form.COLLECTIVES and route == "ho-ring"
    found = list((_in_parts if in_parts else _PHASES[route])(grid, parts))
    if form is Form.COLLECTIVES and not in_parts:
        crossing = (1, 0) if grid.nodes > 1 else (0, 1)
        # The calls of each phase, out of the node and inside. Each part of two hops takes one call in each hop.
        calls = {"hierarchical": [(1, 0), (0, 1)], "two-hop": [(parts, parts - 1), (0, 1)]}.get(route, [crossing])
        found = [replace(p, messages_out=o, messages_inside=i) for p, (o, i) in zip(found, calls, strict=True)]
    return [p for p in found if p.rounds]


def _ring_phases(grid: Grid, parts: int) -> Iterator[PhaseLoad]:
    others = grid.nodes * grid.width - 1
    messages_out = others / grid.width if grid.nodes > 1 else 0
    yield PhaseLoad(others, others * (grid.nodes > 1), others * (grid.width > 1), messages_out, others - messages_out)


def _hierarchical_phases(grid: Grid, parts: int) -> Iterator[PhaseLoad]:
    out, inside = grid.nodes - 1, (grid.width - 1) * grid.nodes
    yield PhaseLoad(out, grid.width * out, 0, out, 0)
    yield PhaseLoad(grid.width - 1, 0, inside, 0, inside)


def _ho_ring_phases(grid: Grid, parts: int) -> Iterator[PhaseLoad]:
    """Yield a phase in which nodes share out each part while the next one crosses, and one for the last part."""
    within = min(HO_RING_STEPS, parts)
    out, last = (grid.nodes - 1) * parts, grid.width - 1
    shared = last * (grid.nodes * parts - 1)
    yield PhaseLoad(out - 1 + within, grid.width * (grid.nodes - 1), shared / parts, out, shared)
    yield PhaseLoad(within, 0, last / parts, 0, last)


def _in_parts(grid: Grid, parts: int) -> Iterator[PhaseLoad]:
    """Yield the phases of an HO-Ring of collectives: the first part crosses, others while one is inside, the last."""
    rounds, inside, share = grid.nodes - 1, (grid.width - 1) * grid.nodes, 1 / parts
    leaving, rest = grid.width * rounds, 1 - share
    yield PhaseLoad(rounds, leaving * share, 0, 1, 0)
    yield PhaseLoad((parts - 1) * rounds, leaving * rest, inside * rest, parts - 1, parts - 1)
    yield PhaseLoad(grid.width - 1, 0, inside * share, 0, 1)


def _two_hop_phases(grid: Grid, parts: int) -> Iterator[PhaseLoad]:
    out, last = (grid.nodes - 1) * parts, (grid.width - 1) * grid.nodes
    shared = last * (parts - 1)
    yield PhaseLoad(parts, grid.width * (grid.nodes - 1), shared / parts, out, shared)
    yield PhaseLoad(1, 0, last / parts, 0, last)


def _one_hop_phases(grid: Grid, parts: int) -> Iterator[PhaseLoad]:
    out, inside = grid.width * (grid.nodes - 1), grid.width - 1
    yield PhaseLoad(1, grid.width * out, inside, out, inside)


_PHASES: dict[str, Callable[[Grid, int], Iterator[PhaseLoad]]] = {
    "flat": _ring_phases,
    "ring": _ring_phases,
    "hierarchical": _hierarchical_phases,
    "ho-ring": _ho_ring_phases,
    "one-hop": _one_hop_phases,
    "two-hop": _two_hop_phases,
}


@dataclass(frozen=True, slots=True)
class Launches:
    """Counts of what is launched."""

    # Launches of the backend's collectives. Several calls that are launched together count once.
    calls: int = 0
    together: int = 0  # calls that are launched together with others
    batches: int = 0  # batches of messages
    messages: int = 0  # messages in all batches, sent and received
    codecs: int = 0  # kernels of codecs
    operations: int = 0  # other kernels, such as copies and sums

    def __add__(self, other: Launches) -> Launches:
        return Launches(*(getattr(self, name) + getattr(other, name) for name in Launches.__slots__))

    def __rmul__(self, times: int) -> Launches:
        return Launches(*(times * getattr(self, name) for name in Launches.__slots__))


# What encodes the message of a parameter sync, before the ranks agree on sizes: three kernels and a prefix sum, the
# header, the digest and the checksum, and two copies. One slice has one message.
MESSAGE_ENCODING = Launches(codecs=5, operations=4)
# What decodes the messages of all other members together: digests, checksums, their comparison, a prefix sum and the
# decoding. The outcomes are copied to the host.
_MESSAGES_DECODING = Launches(codecs=4, operations=4)


@lru_cache(maxsize=4096)
def launches_of(transfer: Transfer) -> Launches:
    """Return what one rank launches to execute `transfer`, apart from what the engine does before and after it."""
    if transfer.between_hosts:
        return Launches()
    op, codec = transfer.move.op, transfer.transport.encoding
    if isinstance(transfer.payload, Matrices):
        return _of_owners(transfer, transfer.payload)
    if op is Op.SEND:
        coded = codec is not None or transfer.transport.low_rank is not None
        return Launches(batches=1, messages=1, codecs=int(coded))
    if op is Op.ALL_REDUCE and transfer.route != "flat":
        return _reduction(transfer) + _gather(transfer)
    return _gather(transfer) if op is Op.ALL_GATHER else _reduction(transfer)


def _gather(transfer: Transfer) -> Launches:
    codec, payload = transfer.transport.encoding, transfer.payload
    if transfer.agrees_on_sizes:
        return _MESSAGES_DECODING + _moved(transfer, Op.ALL_GATHER)
    if codec is None:
        return _moved(transfer, Op.ALL_GATHER)
    rests = isinstance(payload, Range) and payload.encoded and transfer.move.op is Op.ALL_GATHER
    coded = Launches(codecs=1, operations=1) if rests else Launches(codecs=2)
    return coded + _moved(transfer, Op.ALL_GATHER)


def _reduction(transfer: Transfer) -> Launches:
    hops = hops_of(transfer.route, transfer.grid)
    if not hops:
        return _moved(transfer, transfer.move.op)
    stages = transfer.parts
    if transfer.form is Form.COLLECTIVES:
        moved = Launches(calls=stages * len(hops))
    else:
        moved = Launches(batches=stages * len(hops), messages=2 * stages * sum(size - 1 for size in hops))
    if transfer.transport.encoding is not None:  # packed, summed after each hop
        return moved + Launches(codecs=stages * (1 + len(hops)))
    sums = 2 if transfer.dtype in NARROW else 1
    return moved + Launches(operations=stages * (1 + sums * len(hops)))


def _moved(transfer: Transfer, op: Op) -> Launches:
    """Return the launches of an all-gather, a reduce-scatter or a flat all-reduce, without codecs."""
    grid, route, slots = transfer.grid, transfer.route, transfer.move.groups[0].slots
    even = transfer.transport.encoding is not None or transfer.elements % transfer.move.members == 0
    if transfer.form is Form.MESSAGES or not (even or op is Op.ALL_REDUCE):
        found = phases(op, route, grid, transfer.parts)
        messages = 2 * sum(p.messages_out + p.messages_inside for p in found)
        return Launches(batches=sum(p.rounds for p in found), messages=round(messages))
    if route == "ho-ring":  # each part is copied, too
        return Launches(calls=2 * transfer.parts, operations=transfer.parts)
    if route not in ("hierarchical", "two-hop"):
        ordered = op is Op.ALL_REDUCE or transfer.move.groups[0].in_order
        return Launches(calls=1, operations=int(not ordered))
    order = order_of(slots, grid)
    together = grid.nodes if order is Order.ROWS else 0
    return Launches(calls=2, together=together, operations=int(order is Order.OTHER))


def _of_owners(transfer: Transfer, payload: Matrices) -> Launches:
    """Return the launches of the rank that has most messages."""
    assert transfer.move.op in WITH_OWNERS
    ends: Counter[int] = Counter()
    for message in owner_messages(transfer.move.op, payload.matrices, transfer.move.groups[0]):
        ends.update((message.source, message.target))
    most = max(ends.values(), default=0)
    codecs = most if transfer.transport.encoding is not None else 0
    return Launches(batches=1 if most else 0, messages=most, codecs=codecs, operations=len(payload.matrices))
