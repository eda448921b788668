"""The bytes that each route sends, and how long it keeps which links busy, in closed form.

The messages of `routes.sends` add up to the same. In the form of collectives, those of the route that stands for them
do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from towpath.core.formats import Codec
from towpath.core.placement import GroupCollective
from towpath.core.routes import (
    ALL_TO_ALL,
    HO_RING_STEPS,
    Form,
    Grid,
    Op,
    bounds,
    cell_elements,
    effective_route,
    encoded_slice,
)
from towpath.topology.cluster import Topology

# A link carries the region without the slices that its receiver already has. In a ring that is the receiver's own
# slice. In the two-level routes it is the slices of the receiver's node. A reduction reverses the messages of a gather,
# so that what arrives at a node in one leaves it in the other.


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes sent inside nodes, all nodes together, and bytes sent out of each node."""

    inside: int
    leaving: tuple[int, ...]


def traffic_of_group(
    op: Op,
    route: str,
    grid: Grid,
    gathered: Sequence[int],
    reduced: Sequence[int],
    form: Form = Form.MESSAGES,
) -> Traffic:
    """Return how many bytes one collective of a group sends.

    In the form of collectives, an all-gather of the backend counts as a ring, and an all-to-all as direct messages.

    Args:
        op: The collective. An all-reduce counts as a reduction and a gather.
        gathered: The bytes of each member's slice in a gather, in ring order.
        reduced: The bytes of each member's slice in a reduction, in ring order.
    """
    inside, leaving = 0, [0] * grid.nodes
    if op is not Op.ALL_GATHER:
        used = effective_route(route, grid, op, form)
        inside += _inside(used, grid, reduced)
        leaving = _arriving_in_a_gather(used, grid, reduced)
    if op is not Op.REDUCE_SCATTER:
        used = effective_route(route, grid, Op.ALL_GATHER, form)
        inside += _inside(used, grid, gathered)
        leaving = [a + b for a, b in zip(leaving, _leaving_in_a_gather(used, grid, gathered), strict=True)]
    return Traffic(inside, tuple(leaving))


def traffic_between_nodes(
    op: Op,
    route: str,
    gather_route: str,
    grid: Grid,
    gathered: Sequence[int],
    reduced: Sequence[int],
    form: Form = Form.MESSAGES,
) -> Iterator[tuple[int, int, int]]:
    """Yield the bytes that one node of a group sends to another: source, target and bytes.

    The nodes are positions in the grid. The bytes of each source add up to those that `traffic_of_group` returns. The
    arguments are the same, but for `gather_route`: the route of a gather, or of the second half of an all-reduce.
    """
    if op is not Op.ALL_GATHER:
        links = _links_of_a_gather(effective_route(route, grid, op, form), grid, reduced)
        yield from ((target, source, nbytes) for source, target, nbytes in links)
    if op is not Op.REDUCE_SCATTER:
        yield from _links_of_a_gather(effective_route(gather_route, grid, Op.ALL_GATHER, form), grid, gathered)


def _links_of_a_gather(route: str, grid: Grid, slices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    if route in ALL_TO_ALL:  # each node sends its own slices directly to all other nodes
        copies = grid.width if route == "one-hop" else 1
        for source, own in enumerate(_by_node(grid, slices)):
            yield from ((source, target, copies * own) for target in range(grid.nodes) if target != source)
    elif grid.nodes > 1:
        for target, nbytes in enumerate(_arriving_in_a_gather(route, grid, slices)):
            yield (target - 1) % grid.nodes, target, nbytes


def _inside(route: str, grid: Grid, slices: Sequence[int]) -> int:
    total = sum(slices)
    if route in ("flat", "ring"):
        receivers = [i for i in range(len(slices)) if i % grid.width or grid.nodes == 1]
        return len(receivers) * total - sum(slices[i] for i in receivers)
    return (grid.width - 1) * total * (1 if route == "one-hop" else grid.nodes)


def _arriving_in_a_gather(route: str, grid: Grid, slices: Sequence[int]) -> list[int]:
    """Return how many bytes each node receives from other nodes in a gather."""
    if grid.nodes == 1:
        return [0]
    total, of_node = sum(slices), _by_node(grid, slices)
    if route in ("flat", "ring"):
        return [total - slices[first] for first in range(0, len(slices), grid.width)]
    copies = grid.width if route == "one-hop" else 1
    return [copies * (total - own) for own in of_node]


def _leaving_in_a_gather(route: str, grid: Grid, slices: Sequence[int]) -> list[int]:
    if route in ("one-hop", "two-hop"):  # each node sends its own slices directly to all other nodes
        receivers = (grid.nodes - 1) * (grid.width if route == "one-hop" else 1)
        return [receivers * own for own in _by_node(grid, slices)]
    arriving = _arriving_in_a_gather(route, grid, slices)
    return [*arriving[1:], arriving[0]]  # what leaves a node arrives at the next one


def _by_node(grid: Grid, slices: Sequence[int]) -> list[int]:
    return [sum(slices[i : i + grid.width]) for i in range(0, len(slices), grid.width)]


@lru_cache(maxsize=4096)
def sent_by_all(
    move: GroupCollective,
    route: str,
    topology: Topology,
    parts: int,
    elements: int,
    item: int,
    codec: Codec | None,
    form: Form,
) -> Traffic:
    """Return the bytes that all groups send inside nodes, and out of each node of the topology."""
    sizes_of_slots = _slice_sizes(move.members, parts, elements, item, codec)
    inside, leaving = 0, [0] * topology.nodes
    # Most groups have members on nodes in the same pattern, with slices in the same order. Each pattern is counted
    # once.
    alike: dict[tuple[object, ...], tuple[int, Traffic]] = {}
    for group in move.groups:
        nodes = tuple(map(topology.node_of, group.ranks))
        key = (group.slots, tuple(node - nodes[0] for node in nodes))
        if key not in alike:
            grid = Grid.of(nodes)
            sizes = ([nbytes[slot] for slot in group.slots] for nbytes in sizes_of_slots)
            alike[key] = grid.width, traffic_of_group(move.op, route, grid, *sizes, form=form)
        width, sent = alike[key]
        inside += sent.inside
        for node, nbytes in zip(nodes[::width], sent.leaving, strict=True):
            leaving[node] += nbytes
    return Traffic(inside, tuple(leaving))


@lru_cache(maxsize=4096)
def sent_out_of_racks(
    move: GroupCollective,
    route: str,
    gather_route: str,
    topology: Topology,
    parts: int,
    elements: int,
    item: int,
    codec: Codec | None,
    form: Form,
) -> tuple[int, ...]:
    """Return the bytes that all groups send out of each rack of the topology."""
    sizes_of_slots = _slice_sizes(move.members, parts, elements, item, codec)
    leaving = [0] * topology.racks
    for group in move.groups:
        nodes = tuple(map(topology.node_of, group.ranks))
        grid = Grid.of(nodes)
        racks = [topology.rack_of(node) for node in nodes[:: grid.width]]
        if len(set(racks)) > 1:
            gathered, reduced = ([nbytes[slot] for slot in group.slots] for nbytes in sizes_of_slots)
            links = traffic_between_nodes(move.op, route, gather_route, grid, gathered, reduced, form)
            for source, target, nbytes in links:
                leaving[racks[source]] += nbytes * (racks[source] != racks[target])
    return tuple(leaving)


def _slice_sizes(
    members: int, parts: int, elements: int, item: int, codec: Codec | None
) -> tuple[list[int], list[int]]:
    """Return the bytes of each slice in a gather, and in a reduction."""
    plain = [(end - start) * item for start, end in (bounds(elements, members, slot) for slot in range(members))]
    if codec is None:
        return plain, plain
    reduced = parts * codec.cell_bytes(cell_elements(elements, members, parts, codec.grain))
    return [encoded_slice(codec, elements, members)] * members, [reduced] * members


def pair_traffic(move: GroupCollective, topology: Topology, message_bytes: int) -> Traffic:
    """Return the bytes of one message for each pair of ranks."""
    inside, leaving = 0, [0] * topology.nodes
    for group in move.groups:
        source, target = map(topology.node_of, group.ranks)
        if source == target:
            inside += message_bytes
        else:
            leaving[source] += message_bytes
    return Traffic(inside, tuple(leaving))


@lru_cache(maxsize=4096)
def share_leaving_racks(route: str, nodes: int, stride: int, topology: Topology) -> float:
    """Return how many times what one node sends leaves the rack that sends most.

    All groups of `nodes` nodes run the same collective at the same time, and all nodes send equally much.

    Args:
        nodes: The number of nodes of each group.
        stride: The distance between the nodes of a group.
    """
    leaving = [0.0] * topology.racks
    for node in range(topology.nodes):
        place, first = node // stride % nodes, node - node // stride % nodes * stride
        others = (place + 1,) if route not in ALL_TO_ALL else (other for other in range(nodes) if other != place)
        targets = [topology.rack_of(first + other % nodes * stride) for other in others] if nodes > 1 else []
        rack = topology.rack_of(node)
        leaving[rack] += sum(target != rack for target in targets) / max(1, len(targets))
    return max(leaving)


# A *phase* is a sequence of rounds in which the links between nodes and inside nodes work at the same time. A route
# that uses them one after the other has two phases. All members and all groups are assumed to be equal.


@dataclass(frozen=True, slots=True)
class Phase:
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
def phases(op: Op, route: str, grid: Grid, parts: int = 1, form: Form = Form.MESSAGES) -> tuple[Phase, ...]:
    """Return the phases of one collective of a group, in their order.

    Args:
        op: The operation. A reduction runs the phases of a gather in reverse order.
        grid: The members of the group, or the two ends of a message.
    """
    if op is Op.SEND:
        out, inside = (1, 0) if grid.nodes > 1 else (0, 1)
        return (Phase(1, out, inside, out, inside),)
    found: list[Phase] = []
    if op is not Op.ALL_GATHER:
        found += reversed(_gather_phases(effective_route(route, grid, op, form), grid, parts, form))
    if op is not Op.REDUCE_SCATTER:
        # The slices of an all-reduce are not cut into parts by the gather of the other form.
        cut = parts if form is Form.MESSAGES else 1
        gather = _gather_phases(effective_route(route, grid, Op.ALL_GATHER, form), grid, cut, form)
        if form is Form.COLLECTIVES and op is Op.ALL_REDUCE and effective_route(route, grid, op, form) == "flat":
            gather = [replace(p, messages_out=0, messages_inside=0) for p in gather]  # one call does both halves
        found += gather
    return tuple(found)


def _gather_phases(route: str, grid: Grid, parts: int, form: Form) -> list[Phase]:
    found = list(_PHASES[route](grid, parts))
    if form is Form.COLLECTIVES:
        crossing = (1, 0) if grid.nodes > 1 else (0, 1)
        # The calls of each phase, out of the node and inside. Each part of two hops takes one call in each hop.
        calls = {"hierarchical": [(1, 0), (0, 1)], "two-hop": [(parts, parts - 1), (0, 1)]}.get(route, [crossing])
        found = [replace(p, messages_out=o, messages_inside=i) for p, (o, i) in zip(found, calls, strict=True)]
    return [p for p in found if p.rounds]


def _ring_phases(grid: Grid, parts: int) -> Iterator[Phase]:
    others = grid.nodes * grid.width - 1
    messages_out = others / grid.width if grid.nodes > 1 else 0
    yield Phase(others, others * (grid.nodes > 1), others * (grid.width > 1), messages_out, others - messages_out)


def _hierarchical_phases(grid: Grid, parts: int) -> Iterator[Phase]:
    out, inside = grid.nodes - 1, (grid.width - 1) * grid.nodes
    yield Phase(out, grid.width * out, 0, out, 0)
    yield Phase(grid.width - 1, 0, inside, 0, inside)


def _ho_ring_phases(grid: Grid, parts: int) -> Iterator[Phase]:
    """Yield a phase in which nodes share out each part while the next one crosses, and one for the last part."""
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
