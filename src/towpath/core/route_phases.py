"""How long each route keeps which links busy, in closed form: what the messages of `routes.sends` add up to.

    Phase     rounds that follow one another; what crosses between nodes and what stays inside travel at the same time

Where a route does one after the other, it has two phases. All members of a group are alike here, and all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from towpath.core.routes import HO_RING_STEPS, Grid, Op, travelled


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
