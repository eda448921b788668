"""What each route sends, message by message: who, to whom, which slice. `collectives/` executes these plans.

A collective works on a *region* of a flat buffer that its group shares. The region has one slice per member;
`slots[i]` is the slice of member i. Members are listed in the order a ring visits them: node by node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"


ROUTES = ("flat", "ring")


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one collective, in ring order, and the slice of the region that each of them holds."""

    ranks: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        return self.slots == tuple(range(len(self.ranks)))


@dataclass(frozen=True, slots=True)
class Send:
    """In step `step`, member `source` sends slice `slot` of the region to member `target` (positions in the group)."""

    step: int
    source: int
    target: int
    slot: int


def sends(op: Op, route: str, group: Group) -> Iterator[Send]:
    """Every message of one collective. Flat and ring send alike: a backend's own are rings where links are slow."""
    assert route in ROUTES, route
    if op is Op.ALL_GATHER:
        yield from _ring_gather(group, first_step=0)
    elif op is Op.REDUCE_SCATTER:
        yield from _ring_reduce(group)
    else:
        yield from _ring_reduce(group)
        yield from _ring_gather(group, first_step=len(group.ranks) - 1)


def _ring_gather(group: Group, first_step: int) -> Iterator[Send]:
    """Each member passes on what it received last; after p−1 steps all hold all."""
    members = len(group.ranks)
    for step in range(members - 1):
        for i in range(members):
            yield Send(first_step + step, i, (i + 1) % members, group.slots[(i - step) % members])


def _ring_reduce(group: Group) -> Iterator[Send]:
    """The sum for member d starts at d+1 and goes once round; each adds its own and passes it on."""
    members = len(group.ranks)
    for step in range(members - 1):
        for i in range(members):
            yield Send(step, i, (i + 1) % members, group.slots[(i - 1 - step) % members])
