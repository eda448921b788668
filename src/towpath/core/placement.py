"""Placements, and the collectives that move a unit's data between them.

A *placement* says over how many ranks one copy of the parameters, of the gradients and of the optimizer states is
spread (Lins, section IV-B). The second half derives which slice each rank holds, and the groups of every collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import pairwise, product

from towpath.core.routes import Group, Op
from towpath.errors import ConfigError
from towpath.topology.cluster import Extent, Topology

LABELS = {"params": "P", "grads": "G", "optimizer": "OS", "backward_params": "backward copy"}


@dataclass(frozen=True, slots=True)
class Placement:
    """The extents over which parameters, gradients and optimizer states are spread.

    Each extent must divide the next, in the order `backward_params`, `params`, `grads`, `optimizer`.

    Attributes:
        params: The extent of the parameters (P).
        grads: The extent of the gradients (G).
        optimizer: The extent of the optimizer states (OS).
        backward_params: The extent of a second copy of the weights that the backward pass gathers from, as in hpZ. None
            keeps no such copy.
    """

    params: Extent
    grads: Extent
    optimizer: Extent
    backward_params: Extent | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, Extent) and not (value is None and each.name == "backward_params"):
                raise ConfigError(f"Placement: {each.name} must be a towpath.Extent, got {value!r}.")
        chain = [(name, getattr(self, name)) for name in ("backward_params", "params", "grads", "optimizer")]
        for (coarse, a), (fine, b) in pairwise(each for each in chain if each[1] is not None):
            if not a.divides(b):
                raise ConfigError(
                    f"{LABELS[coarse]} {a} does not divide {LABELS[fine]} {b}: each extent must divide the next in "
                    "both coordinates (backward copy, P, G, OS). Widen the later one, or narrow the earlier one."
                )

    def check(self, topology: Topology) -> None:
        """Check that each extent fits `topology`.

        Raises:
            ConfigError: If an extent does not fit. The message names the legal ones.
        """
        for name, extent in self.extents():
            check_extent(extent, topology, LABELS[name])

    def extents(self) -> Iterator[tuple[str, Extent]]:
        """Yield the name and the value of each extent that is set."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                yield each.name, value

    def __str__(self) -> str:
        words = f"P {self.params}, G {self.grads}, OS {self.optimizer}"
        return words if self.backward_params is None else f"{words}, backward copy {self.backward_params}"


def legal_extents(topology: Topology) -> list[Extent]:
    """Return all extents on `topology`: divisors of a node's ranks, or whole nodes (Lins, equations 5 to 7).

    On unequal nodes, these are one rank and all ranks.
    """
    if not topology.is_equal:
        return [Extent(1), topology.whole]
    ranks, nodes = topology.ranks_per_node, topology.nodes
    local = [Extent(r) for r in range(1, ranks + 1) if ranks % r == 0]
    return local + [Extent(ranks, n) for n in range(2, nodes + 1) if nodes % n == 0]


def legal_placements(topology: Topology, *, copies: bool = False) -> list[Placement]:
    """Return every legal placement: P divides G, and G divides OS (Lins, section IV-B)."""
    # `copies`: Also return variants with a backward copy that is spread over fewer ranks than P.
    legal = legal_extents(topology)
    found: list[Placement] = []
    for o in legal:
        for g in legal:
            for p in legal if g.divides(o) else ():
                if not p.divides(g):
                    continue
                smaller = [b for b in legal if b.divides(p) and b != p] if copies else []
                found += [Placement(p, g, o, copy) for copy in (None, *smaller)]
    return found


def check_extent(extent: Extent, topology: Topology, what: str) -> None:
    """Raise `ConfigError` if `extent`, that of `what`, does not fit `topology`."""
    legal = legal_extents(topology)
    if extent not in legal:
        topology.check_equal(f"{what} {extent}")
        raise ConfigError(
            f"{what} {extent} on {topology.words} is no legal extent: it divides a node's ranks, or fills equally many "
            f"nodes (Lins, equations 5 to 7). Legal are {', '.join(map(str, legal))}."
        )


# A unit's flat buffer is cut into slices for P. Each of these is cut for G, and each of those is cut for OS. A
# `Partition` says which slice each rank holds. A `GroupCollective` is one collective from one partition to another, run
# by all its groups at the same time:
#
#     gather            P → full weights                        before a unit's forward
#     backward_gather   P, or hpZ's copy → full weights         before a unit's backward
#     reduce            full gradients → G                      every micro-step
#     grad_sync         G → OS, then over the replicas of OS    in the last micro-step, unless reduce summed over all
#     param_sync        OS → P                                  before the forward that follows an optimizer step
#     assemble          OS → full                               when the user needs a full tensor


@dataclass(frozen=True, slots=True)
class Partition:
    """A flat buffer in as many equal slices as `extent` has ranks. Each rank holds slice `slots[rank]`."""

    extent: Extent
    slots: tuple[int, ...]

    @property
    def count(self) -> int:
        return self.extent.size


@dataclass(frozen=True, slots=True)
class GroupCollective:
    """One collective that several groups run at the same time.

    The flat buffer is divided into `regions` regions of equal length, and each group works on one of them.
    """

    op: Op
    regions: int
    groups: tuple[Group, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The hash is computed once. With thousands of ranks it takes longer than the cached functions that are looked
        # up by it.
        object.__setattr__(self, "_hash", hash((self.op, self.regions, self.groups)))

    def __hash__(self) -> int:
        return self._hash

    def group_of(self, rank: int) -> Group:
        return next(g for g in self.groups if rank in g.ranks)

    @property
    def members(self) -> int:
        return len(self.groups[0].ranks)

    def over(self, ranks: Sequence[int]) -> GroupCollective:
        """Return the same collective in a larger world, where rank i becomes rank `ranks[i]`."""
        groups = (Group(tuple(ranks[r] for r in group.ranks), group.slots) for group in self.groups)
        return GroupCollective(self.op, self.regions, tuple(groups))

    def repeated(self, islands: int, world: int) -> GroupCollective:
        """Return the same collective in each of several islands of `world` ranks, run by all of them at the same time.

        Rank i of island j becomes rank `j * world + i`.
        """
        moved = (self.over(range(island * world, (island + 1) * world)) for island in range(islands))
        return GroupCollective(self.op, self.regions, tuple(group for each in moved for group in each.groups))


def send(pairs: Iterable[tuple[int, int]]) -> GroupCollective:
    """Return the operation in which the first rank of each pair sends one message to the second rank."""
    return GroupCollective(Op.SEND, 1, tuple(Group(pair, (0, 0)) for pair in pairs))


@dataclass(frozen=True, slots=True)
class PlacementCollectives:
    """The partitions of a placement, and the collectives of each kind, in the order in which they run.

    An empty tuple means that this kind sends nothing. `Strategy.moves` returns one of these.
    """

    params: Partition
    grads: Partition
    optimizer: Partition
    backward_params: Partition
    gather: tuple[GroupCollective, ...]
    backward_gather: tuple[GroupCollective, ...]
    reduce: tuple[GroupCollective, ...]
    grad_sync: tuple[GroupCollective, ...]
    param_sync: tuple[GroupCollective, ...]
    assemble: tuple[GroupCollective, ...]


@lru_cache(maxsize=256)
def transitions(placement: Placement, topology: Topology) -> PlacementCollectives:
    levels = (placement.params, placement.grads, placement.optimizer)
    params, grads, optimizer = (_cut(levels[: i + 1], topology, _is_nested(placement)) for i in range(3))
    whole = Partition(Extent(1), (0,) * topology.world)
    backward = _cut((placement.backward_params,), topology, False) if placement.backward_params else params
    return PlacementCollectives(
        params,
        grads,
        optimizer,
        backward,
        gather=_collectives_between(Op.ALL_GATHER, whole, params, topology),
        backward_gather=_collectives_between(Op.ALL_GATHER, whole, backward, topology),
        reduce=_collectives_between(Op.REDUCE_SCATTER, whole, grads, topology),
        grad_sync=_collectives_between(Op.REDUCE_SCATTER, grads, optimizer, topology)
        + _over_replicas(optimizer, topology),
        param_sync=_collectives_between(Op.ALL_GATHER, params, optimizer, topology),
        assemble=_collectives_between(Op.ALL_GATHER, whole, optimizer, topology),
    )


def _is_nested(placement: Placement) -> bool:
    """Return whether slices are ordered local-major: a node-local extent nests inside one that spans nodes."""
    # Every collective then works on contiguous memory, among ranks of one column of the grid. Otherwise slices are in
    # rank order, so that the backends' collectives need no reordering.
    return (
        any(e.nodes == 1 and e.size > 1 for e in (placement.params, placement.grads)) and placement.optimizer.nodes > 1
    )


@lru_cache(maxsize=256)
def subdivided(placement: Placement, topology: Topology) -> tuple[Partition, tuple[GroupCollective, ...]]:
    """Return a partition that gives each rank a slice of its own, and the all-gather from it to the optimizer slices.

    Ranks with equal optimizer slices get different parts of them. If there are no such ranks, nothing is gathered.
    """
    nested, optimizer = _is_nested(placement), transitions(placement, topology).optimizer
    finest = _cut((placement.params, placement.grads, placement.optimizer, topology.whole), topology, nested)
    return finest, _collectives_between(Op.ALL_GATHER, optimizer, finest, topology)


def over_islands(island: Topology, islands: int) -> tuple[GroupCollective, ...]:
    """Return the all-reduce among the ranks of equal number in all islands. With one island, return an empty tuple."""
    world = island.world
    groups = (Group(tuple(range(rank, islands * world, world)), tuple(range(islands))) for rank in range(world))
    return (GroupCollective(Op.ALL_REDUCE, world, tuple(groups)),) if islands > 1 else ()


def everyone(topology: Topology) -> tuple[GroupCollective, ...]:
    """Return an all-reduce over all ranks, or an empty tuple if there is only one rank."""
    return _over_replicas(Partition(Extent(1), (0,) * topology.world), topology)


@lru_cache(maxsize=256)
def _cut(levels: tuple[Extent, ...], topology: Topology, local_major: bool) -> Partition:
    """Number the slices by mixed radix, with one digit per level. Each level cuts the slices of the one before."""
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

    # A slot is the sum of the node's share and the local rank's share, so each share is computed only once.
    nodes, ranks = topology.rectangle
    of_nodes = [slot(node, 0) for node in range(nodes)]
    of_locals = [slot(0, local) for local in range(ranks)]
    slots = [of_node + of_local for of_node in of_nodes for of_local in of_locals]
    return Partition(levels[-1], tuple(slots))


@lru_cache(maxsize=256)
def replicas(extent: Extent, topology: Topology) -> tuple[int, ...]:
    """Return for each rank the number of the full copy that it belongs to."""
    numbers: dict[tuple[int, int], int] = {}
    ranks = product(*map(range, topology.rectangle))
    copies = ((local // extent.local, node // extent.nodes) for node, local in ranks)
    return tuple(numbers.setdefault(copy, len(numbers)) for copy in copies)


@lru_cache(maxsize=256)
def _collectives_between(op: Op, coarse: Partition, fine: Partition, topology: Topology) -> tuple[GroupCollective, ...]:
    """Return the collective among the ranks of one fine copy that share a coarse slice."""
    # It is empty if both partitions are equal.
    ratio = fine.count // coarse.count
    if ratio == 1:
        return ()
    members: dict[tuple[int, int], list[int]] = {}
    for rank, (copy, slot) in enumerate(zip(replicas(fine.extent, topology), coarse.slots, strict=True)):
        members.setdefault((copy, slot), []).append(rank)
    groups = tuple(Group(tuple(ranks), tuple(fine.slots[r] % ratio for r in ranks)) for ranks in members.values())
    return (_the_same(GroupCollective(op, coarse.count, groups)),)


@lru_cache(maxsize=256)
def _over_replicas(cut: Partition, topology: Topology) -> tuple[GroupCollective, ...]:
    if cut.count == topology.world:
        return ()
    members: dict[int, list[int]] = {}
    for rank in range(topology.world):
        members.setdefault(cut.slots[rank], []).append(rank)
    groups = tuple(Group(tuple(ranks), tuple(range(len(ranks)))) for ranks in members.values())
    return (_the_same(GroupCollective(Op.ALL_REDUCE, cut.count, groups)),)


@lru_cache(maxsize=1024)
def _the_same(move: GroupCollective) -> GroupCollective:
    """Return one object for all equal collectives, because comparing thousands of ranks is slow."""
    return move
