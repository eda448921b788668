"""Measured collectives: how many times as long each one takes as the simulator derives from single messages.

A probe measures each collective on each mesh alone, with several sizes (Lins, section IV-A). The simulator multiplies
the phases of a transfer by the interpolated ratio. So transfers that run at the same time still share links.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

from towpath.core.routes import Grid, Op
from towpath.topology.cluster import Topology


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of each group of a collective, while all groups run it at once."""

    grid: Grid  # the members of a group
    # The distance between the nodes of a group. It is 1 if the group has one node.
    stride: int = 1

    def __str__(self) -> str:
        every = f" every {self.stride} nodes" if self.stride > 1 else ""
        return f"{self.grid.nodes} × {self.grid.width}{every}"


# A number of bytes, and the measured seconds over those that single messages predict.
Ratio = tuple[float, float]


@dataclass(frozen=True, slots=True)
class MeasuredCollectives:
    """The measured ratios of collectives."""

    # The nodes and ranks on which they were measured. They hold for no other.
    topology: Topology
    # By operation, mesh and route: the ratio for each measured size of a group's region, in ascending order.
    ratios: Mapping[tuple[Op, Mesh, str], Sequence[Ratio]]

    def ratio(self, op: Op, mesh: Mesh, route: str, size: float) -> float:
        """Return the ratio for a region of `size` bytes, or 1 for a collective that was not measured."""
        found = self.ratios.get((op, mesh, route))
        return interpolated(found, size) if found else 1.0


def interpolated(ratios: Sequence[Ratio], size: float) -> float:
    """Return the ratio at `size`, linear in the logarithm of the size.

    Below the smallest measured size, it is the ratio there. Above the largest size, the message model prices each
    further byte. The difference in seconds then stays, and its share shrinks with the size.
    """
    index = bisect_left(ratios, size, key=lambda each: each[0])
    if index == 0:
        return ratios[0][1]
    before, first = ratios[index - 1]
    if index == len(ratios):
        return 1 + (first - 1) * before / size
    after, last = ratios[index]
    return first + (last - first) * log(size / before) / log(after / before)
