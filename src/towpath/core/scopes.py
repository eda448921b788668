"""What ranks must do identically, and which ranks compare it: the kinds of log entries, and the groups of each.

* All ranks compare the program: optimizer steps with their hyperparameters, micro-steps, and zeroed gradients.
* Ranks with the same optimizer slice compare checksums of their parameters, at chosen boundaries.
* Ranks of one replica of the parameters compare gathers, trainable and frozen ones together. Replicas may run different
  units.
* Ranks of one replica of the gradients compare reductions.
* Ranks of one replica of the optimizer states compare gradient syncs, parameter syncs, and the transfers of optimizers
  that need full matrices. They also compare shared calls: norms and full tensors, which are collectives of these ranks.
* Ranks of a communicator that several queues share compare the order of all transfers of these queues.

`engine/agree/digest.py` keeps the log. The number of groups decides the bytes of the comparison, which the schedule
counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from towpath.core.placement import replicas
from towpath.core.queues import SharedLane
from towpath.core.strategy import Strategy, TransferKind

# The bytes of a digest. A group has a slot with its digest and the complement of the digest.
DIGEST_BYTES = 8
SLOT_BYTES = 2 * DIGEST_BYTES


class LoggedCall(StrEnum):
    """The calls of the user's program that ranks must make identically, in addition to transfers."""

    STEP = "step"  # a step of an optimizer
    PROGRAM = "program"  # the boundary, with the micro-steps and zeroed gradients before it; calls that need every rank
    UNDECODED = "undecoded"  # a message of a parameter sync that this rank could not decode
    SLOW_WEIGHTS = "slow weights"  # slow weights that differ between islands
    VALUES = "values"  # a checksum of one bucket's parameters
    SHARED = "shared call"  # a norm or a full tensor, which is a collective of one replica of the optimizer states


_WITH_OPTIMIZER_STATES = (
    *(TransferKind.GRAD_SYNC, TransferKind.PARAM_SYNC, TransferKind.MATRIX_GRADIENTS, TransferKind.MATRIX_UPDATES),
    LoggedCall.SHARED,
)


@dataclass(frozen=True, slots=True)
class Scope:
    """Kinds of log entries that the ranks of one group must make identically, and the groups that compare them."""

    kinds: frozenset[TransferKind | LoggedCall]
    group_of: tuple[int, ...]  # the number of each rank's group
    first_slot: int  # the position of the first group's digest among all slots
    number: int  # the position of this scope among those of the strategy
    lane: str = ""  # of the communicator that these kinds share, if the scope compares their common order

    @property
    def groups(self) -> int:
        return max(self.group_of) + 1

    def members(self, group: int) -> list[int]:
        return [rank for rank, theirs in enumerate(self.group_of) if theirs == group]


@lru_cache(maxsize=256)
def scopes(strategy: Strategy, lanes: tuple[SharedLane, ...] = ()) -> tuple[Scope, ...]:
    """Return what the ranks of `strategy` compare, and in which groups. Groups of one rank compare nothing.

    The program comes first, because other differences follow from ranks that ran different programs. The order of
    transfers on shared communicators (`lanes`) comes last, because it follows from which units the ranks ran.
    """
    placement, world, optimizer = strategy.placement, strategy.topology.world, strategy.moves.optimizer
    found: list[Scope] = []

    def add(group_of: tuple[int, ...], kinds: Iterable[TransferKind | LoggedCall], lane: str = "") -> None:
        slot = found[-1].first_slot + found[-1].groups if found else 0
        found.append(Scope(frozenset(kinds), group_of, slot, len(found), lane))

    if world > 1:
        add((0,) * world, (LoggedCall.STEP, LoggedCall.PROGRAM, LoggedCall.UNDECODED, LoggedCall.SLOW_WEIGHTS))
    if optimizer.count < world:
        add(optimizer.slots, (LoggedCall.VALUES,))
    for extent, kinds in (
        (strategy.gathered_over, (TransferKind.GATHER, TransferKind.BACKWARD_GATHER)),
        (placement.grads, (TransferKind.REDUCE,)),
        (placement.optimizer, _WITH_OPTIMIZER_STATES),
    ):
        if extent.size > 1:
            add(replicas(extent, strategy.topology), kinds)
    for shared in lanes:
        group_of = {rank: group for group, ranks in enumerate(shared.ranks) for rank in ranks}
        kinds = (LoggedCall.SHARED if kind is TransferKind.UNUSED_PARAMS else kind for kind in shared.kinds)
        add(tuple(group_of[rank] for rank in range(world)), kinds, shared.lane)
    return tuple(found)


def log_bytes(strategy: Strategy, lanes: tuple[SharedLane, ...] = ()) -> int:
    """Return the bytes that the comparison adds to the transfer of unused parameters."""
    return SLOT_BYTES * sum(scope.groups for scope in scopes(strategy, lanes))
