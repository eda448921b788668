"""The moves of a placement without their ranks: how many groups there are, of what shape, and where they lie.

`transitions` names every rank of every group; of thousands of ranks that takes a while, and what a transfer costs does
not depend on it. A test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from towpath.core.placement import Placement
from towpath.core.routes import Grid, Op
from towpath.core.strategy import Kind
from towpath.topology.cluster import Extent, Topology

_ONE = Extent(1)


@dataclass(frozen=True, slots=True)
class MoveShape:
    """One collective, run by every group at once. Each group's region is 1/`regions` of the flat buffer.

    `stride`: a group's nodes are so far apart, if it has several.
    """

    op: Op
    regions: int
    grid: Grid
    stride: int

    @property
    def members(self) -> int:
        return self.grid.nodes * self.grid.width


@lru_cache(maxsize=4096)
def move_shapes(placement: Placement, topology: Topology) -> dict[Kind, tuple[MoveShape, ...]]:
    params, grads, optimizer = placement.params, placement.grads, placement.optimizer
    backward = placement.backward_params or params
    return {
        Kind.GATHER: tuple(_between(Op.ALL_GATHER, _ONE, params)),
        Kind.BACKWARD_GATHER: tuple(_between(Op.ALL_GATHER, _ONE, backward)),
        Kind.REDUCE: tuple(_between(Op.REDUCE_SCATTER, _ONE, grads)),
        Kind.SYNC: (*_between(Op.REDUCE_SCATTER, grads, optimizer), *_over_replicas(optimizer, topology)),
        Kind.PUBLISH: tuple(_between(Op.ALL_GATHER, params, optimizer)),
        Kind.USAGE: tuple(_over_replicas(_ONE, topology)),
    }


def _between(op: Op, coarse: Extent, fine: Extent) -> Iterator[MoveShape]:
    grid = Grid(fine.nodes // coarse.nodes, fine.local // coarse.local)
    if coarse != fine:
        yield _shape(op, coarse, grid)


def _over_replicas(extent: Extent, topology: Topology) -> Iterator[MoveShape]:
    grid = Grid(topology.nodes // extent.nodes, topology.ranks_per_node // extent.local)
    if grid != Grid(1, 1):
        yield _shape(Op.ALL_REDUCE, extent, grid)


def _shape(op: Op, outer: Extent, grid: Grid) -> MoveShape:
    return MoveShape(op, outer.size, grid, outer.nodes if grid.nodes > 1 else 1)
