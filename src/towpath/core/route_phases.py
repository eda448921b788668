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

    Both of the whole phase, over all its rounds.
    """

    rounds: int
    leaving: float
    inside: float


@lru_cache(maxsize=4096)
def phases(op: Op, route: str, grid: Grid, parts: int = 1) -> tuple[Phase, ...]:
    """Of one collective of a group, in their order."""
    if op is Op.SEND:
        crosses = grid.nodes > 1
        return (Phase(1, float(crosses), float(not crosses)),)
    gather = tuple(p for p in _GATHERS[travelled(route, grid)](grid, parts) if p.rounds)
    return {
        Op.ALL_GATHER: gather,
        Op.REDUCE_SCATTER: gather[::-1],
        Op.ALL_REDUCE: (*gather[::-1], *gather),
    }[op]


def _ring(grid: Grid, parts: int) -> Iterator[Phase]:
    others = grid.nodes * grid.width - 1
    yield Phase(others, others * (grid.nodes > 1), others * (grid.width > 1))


def _hierarchical(grid: Grid, parts: int) -> Iterator[Phase]:
    yield Phase(grid.nodes - 1, grid.width * (grid.nodes - 1), 0)
    yield Phase(grid.width - 1, 0, (grid.width - 1) * grid.nodes)


def _ho_ring(grid: Grid, parts: int) -> Iterator[Phase]:
    """The node shares out what has crossed while the next part crosses; the last part alone."""
    within = min(HO_RING_STEPS, parts)
    last = (grid.width - 1) / parts
    shared = (grid.width - 1) * grid.nodes - last
    yield Phase((grid.nodes - 1) * parts - 1 + within, grid.width * (grid.nodes - 1), shared)
    yield Phase(within, 0, last)


def _two_hop(grid: Grid, parts: int) -> Iterator[Phase]:
    last = (grid.width - 1) * grid.nodes / parts
    yield Phase(parts, grid.width * (grid.nodes - 1), last * (parts - 1))
    yield Phase(1, 0, last)


def _one_hop(grid: Grid, parts: int) -> Iterator[Phase]:
    yield Phase(1, grid.width * grid.width * (grid.nodes - 1), grid.width - 1)


_GATHERS: dict[str, Callable[[Grid, int], Iterator[Phase]]] = {
    "flat": _ring,
    "ring": _ring,
    "hierarchical": _hierarchical,
    "ho-ring": _ho_ring,
    "one-hop": _one_hop,
    "two-hop": _two_hop,
}
