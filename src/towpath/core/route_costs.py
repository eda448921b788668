"""The bytes that each route sends, and how long it keeps which links busy, in closed form.

The messages of `routes.sends` add up to the same. In the form of collectives, those of the route that stands for them
do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from towpath.core.routes import HO_RING_STEPS, Form, Grid, Op, effective_route

# --- route bytes ------------------------------------------------------------------------------------------------------
#
# These functions return how many bytes each route sends, in closed form. The messages of `sends` add up to the same.
#
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
        route: The configured route.
        grid: The members of the group.
        gathered: The bytes of each member's slice in a gather, in ring order.
        reduced: The bytes of each member's slice in a reduction, in ring order.
        form: How the route is executed.
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


# --- route phases -----------------------------------------------------------------------------------------------------
#
# These functions return how long each route keeps which links busy, in closed form, for the simulator. The messages of
# `sends` add up to the same.
#
# A *phase* is a sequence of rounds in which the links between nodes and inside nodes work at the same time. A route
# that uses them one after the other has two phases. All members and all groups are assumed to be equal.


@dataclass(frozen=True, slots=True)
class Phase:
    """The load of one phase of a route, summed over its rounds.

    Amounts are in slices of the region, and message counts are averages over the ranks. In a ring, only the last rank
    of each node sends out of the node.

    Attributes:
        rounds: How many rounds follow one another.
        leaving: Slices that leave each node.
        inside: Slices that each rank sends inside its node.
        messages_out: Messages that each rank sends out of its node. In the form of collectives, these are the calls of
            groups that cross nodes.
        messages_inside: Messages that each rank sends inside its node, or calls of groups that stay inside.
    """

    rounds: int
    leaving: float
    inside: float
    messages_out: float
    messages_inside: float


@lru_cache(maxsize=4096)
def phases(op: Op, route: str, grid: Grid, parts: int = 1, form: Form = Form.MESSAGES) -> tuple[Phase, ...]:
    """Return the phases of one collective of a group, in their order.

    Args:
        op: The operation. A reduction runs the phases of a gather in reverse order.
        route: The configured route.
        grid: The members of the group, or the two ends of a message.
        parts: How many parts each slice is cut into, as `parts_of` returns.
        form: How the route is executed.
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
