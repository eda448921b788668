"""How many bytes each route sends, in closed form: what the messages of `routes.sends` add up to.

A link carries the whole region, but for what its receiver does not need: in a ring, the slice of the member that
receives; by the routes of two levels, the slices of its node. A reduction's messages are a gather's turned back: what
arrives at a node in one leaves it in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from towpath.core.routes import Grid, Op, travelled


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
