"""From a placement to the collectives that carry a unit through a step.

A flat buffer of a unit is cut three times: for P, inside it for G, inside that for OS. `Cuts` says which slice
each rank holds; a `Move` is one collective from one cut to another, over every group that runs it at once:

    gather            P → full weights                        before a unit's forward
    backward_gather   P, or hpZ's copy → full weights         before a unit's backward
    reduce            full gradients → G                      every micro-step
    sync              G → OS, then over the replicas of OS    at the boundary
    publish           OS → P                                  before the forward that follows an optimizer step
    assemble          OS → full                               when the user asks for a full tensor
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from towpath.core.placement import Placement
from towpath.core.routes import Group, Op
from towpath.topology.cluster import Extent, Topology


@dataclass(frozen=True, slots=True)
class Cut:
    """A flat buffer in `count` equal slices; `slots[rank]` is the slice that a rank holds."""

    extent: Extent
    slots: tuple[int, ...]

    @property
    def count(self) -> int:
        return self.extent.size


@dataclass(frozen=True, slots=True)
class Move:
    """One collective, run by every group at once. Each group's region is 1/`regions` of the flat buffer."""

    op: Op
    regions: int
    groups: tuple[Group, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once: in a world of thousands of ranks it takes longer than what is looked up by it.
        object.__setattr__(self, "_hash", hash((self.op, self.regions, self.groups)))

    def __hash__(self) -> int:
        return self._hash

    def group_of(self, rank: int) -> Group:
        return next(g for g in self.groups if rank in g.ranks)

    @property
    def members(self) -> int:
        return len(self.groups[0].ranks)

    def over(self, ranks: Sequence[int]) -> Move:
        """The same, where rank i is rank `ranks[i]` of a larger world."""
        groups = (Group(tuple(ranks[r] for r in group.ranks), group.slots) for group in self.groups)
        return Move(self.op, self.regions, tuple(groups))


def send(pairs: Iterable[tuple[int, int]]) -> Move:
    """One message from the first to the second rank of each pair, all at once."""
    return Move(Op.SEND, 1, tuple(Group(pair, (0, 0)) for pair in pairs))


@dataclass(frozen=True, slots=True)
class Transitions:
    params: Cut
    grads: Cut
    optimizer: Cut
    backward_params: Cut
    gather: tuple[Move, ...]
    backward_gather: tuple[Move, ...]
    reduce: tuple[Move, ...]
    sync: tuple[Move, ...]
    publish: tuple[Move, ...]
    assemble: tuple[Move, ...]


@lru_cache(maxsize=256)
def transitions(placement: Placement, topology: Topology) -> Transitions:
    levels = (placement.params, placement.grads, placement.optimizer)
    # Slices lie local-major when a node-local extent nests inside a spanning one: every transition then stays
    # contiguous and inside a column. Else in rank order, so that the backends' collectives need no reordering.
    nested = any(e.nodes == 1 and e.size > 1 for e in levels[:2]) and placement.optimizer.nodes > 1
    params, grads, optimizer = (_cut(levels[: i + 1], topology, nested) for i in range(3))
    whole = Cut(Extent(1), (0,) * topology.world)
    backward = _cut((placement.backward_params,), topology, False) if placement.backward_params else params
    return Transitions(
        params,
        grads,
        optimizer,
        backward,
        gather=_between(Op.ALL_GATHER, whole, params, topology),
        backward_gather=_between(Op.ALL_GATHER, whole, backward, topology),
        reduce=_between(Op.REDUCE_SCATTER, whole, grads, topology),
        sync=_between(Op.REDUCE_SCATTER, grads, optimizer, topology) + _over_replicas(optimizer, topology),
        publish=_between(Op.ALL_GATHER, params, optimizer, topology),
        assemble=_between(Op.ALL_GATHER, whole, optimizer, topology),
    )


def everyone(topology: Topology) -> tuple[Move, ...]:
    """One all-reduce over all ranks."""
    return _over_replicas(Cut(Extent(1), (0,) * topology.world), topology)


@lru_cache(maxsize=256)
def _cut(levels: tuple[Extent, ...], topology: Topology, local_major: bool) -> Cut:
    """Number the slices by mixed radix: one digit per level, so that each level's cut lies inside the one before."""
    digits: list[tuple[int, int, int, int]] = []
    outer = Extent(1)
    for extent in levels:
        digits.append((extent.local // outer.local, extent.nodes // outer.nodes, outer.local, outer.nodes))
        outer = extent

    def slot(node: int, local: int) -> int:
        number = 0
        for locals_, nodes, outer_local, outer_nodes in digits:
            column, row = local // outer_local % locals_, node // outer_nodes % nodes
            number = number * locals_ * nodes + (column * nodes + row if local_major else row * locals_ + column)
        return number

    # A slot is the sum of what the node and what the rank inside it add.
    of_nodes = [slot(node, 0) for node in range(topology.nodes)]
    of_locals = [slot(0, local) for local in range(topology.ranks_per_node)]
    slots = [of_node + of_local for of_node in of_nodes for of_local in of_locals]
    return Cut(levels[-1], tuple(slots))


@lru_cache(maxsize=256)
def replicas(extent: Extent, topology: Topology) -> tuple[int, ...]:
    """By rank: the number of the full copy that it belongs to."""
    numbers: dict[tuple[int, int], int] = {}
    ranks = product(range(topology.nodes), range(topology.ranks_per_node))
    copies = ((local // extent.local, node // extent.nodes) for node, local in ranks)
    return tuple(numbers.setdefault(copy, len(numbers)) for copy in copies)


@lru_cache(maxsize=256)
def _between(op: Op, coarse: Cut, fine: Cut, topology: Topology) -> tuple[Move, ...]:
    """The collective among the ranks of one fine copy that share a coarse slice; nothing where the cuts are equal."""
    ratio = fine.count // coarse.count
    if ratio == 1:
        return ()
    members: dict[tuple[int, int], list[int]] = {}
    for rank, (copy, slot) in enumerate(zip(replicas(fine.extent, topology), coarse.slots, strict=True)):
        members.setdefault((copy, slot), []).append(rank)
    groups = tuple(Group(tuple(ranks), tuple(fine.slots[r] % ratio for r in ranks)) for ranks in members.values())
    return (_the_same(Move(op, coarse.count, groups)),)


@lru_cache(maxsize=256)
def _over_replicas(cut: Cut, topology: Topology) -> tuple[Move, ...]:
    if cut.count == topology.world:
        return ()
    members: dict[int, list[int]] = {}
    for rank in range(topology.world):
        members.setdefault(cut.slots[rank], []).append(rank)
    groups = tuple(Group(tuple(ranks), tuple(range(len(ranks)))) for ranks in members.values())
    return (_the_same(Move(Op.ALL_REDUCE, cut.count, groups)),)


@lru_cache(maxsize=1024)
def _the_same(move: Move) -> Move:
    """Equal moves are one object: of thousands of ranks, to find out that two are equal takes a while."""
    return move
