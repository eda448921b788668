"""Protection from a lost node: which state only one node holds, and what its snapshots cost.

A node holds the masters of trainable parameters, their optimizer states and frozen parameters, in slices of optimizer
extents. If an extent spans all nodes of the job, or of its island, no other node has the slices of a node. They are
then sent to its *buddy* as exact differences. All other slices are in several nodes already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from towpath.core.formats import EXACT, VALUES, Coding, item_bytes
from towpath.core.strategy import Protect, Strategy
from towpath.core.unit_plan import UnitPlan
from towpath.outer.exchanges import OuterPlan
from towpath.topology.cluster import Topology

# The two states of AdamW. The schedule does not know the optimizer.
ADAMW_STATES = 2

# The share that exact differences take of float32 weights, and of a state of AdamW, ten steps after the snapshot
# before: 23.0, and 31.7 and 25.9 of 32 bits, at a learning rate of 1e-3 (`python -m benchmarks.snapshot_bytes`).
_WEIGHTS_SHARE, _STATES_SHARE = 23.0 / 32, (31.7 + 25.9) / 64

# Copies in a node's memory while a snapshot is written: the one before, the new one, and the values that it is written
# from. Of the buddy's, there is the one before and the new one.
_OWN_COPIES, _BUDDY_COPIES = 3, 2

# Estimates of what healing takes besides the bytes that the new node receives. Each rank verifies its files at this
# rate, and processes need this long to notice the loss, meet, import PyTorch and form their groups.
VERIFIED_RATE = 1e9  # bytes a second
RESTART_SECONDS = 20.0


class Survives(StrEnum):
    """Whether training survives a lost node with `protect`."""

    YES = "yes"  # other nodes hold everything, and no snapshot is sent
    WITH_BUDDIES = "with buddies"
    NO = "no"  # there is no other node


@dataclass(frozen=True, slots=True)
class Protection:
    """The cost of protection from a lost node. Bytes are those of one node, as the mean of all nodes."""

    job: Topology
    protect: Protect
    survives: Survives
    state_bytes: int  # what the ranks of a node hold, each slice once
    buddy_bytes: int  # how many of these no other node holds, so that they are sent with each snapshot
    expected_bytes: int  # the bytes that this is expected to take as exact messages, after the first snapshot

    @property
    def step_bytes(self) -> float:
        """The bytes that a node is expected to send to its buddy, as the mean of all steps."""
        return self.expected_bytes / self.protect.interval

    @property
    def host_bytes(self) -> int:
        """The most bytes of a node's memory that its snapshots and the copies of another node's take."""
        return _OWN_COPIES * self.state_bytes + _BUDDY_COPIES * self.buddy_bytes

    def heal_seconds(self, rate: float) -> float:
        """Return the seconds from the loss to the next step, if a link between nodes carries `rate` bytes a second."""
        return RESTART_SECONDS + self.state_bytes / rate + self.state_bytes / self.job.ranks_per_node / VERIFIED_RATE

    def __str__(self) -> str:
        all_nodes, expected = self.job.nodes * self.buddy_bytes, self.job.nodes * self.expected_bytes
        return (
            f"snapshots: bytes sent by all ranks together in {self.protect.interval} steps\n"
            f"  {'kind':<20} {'calls':>6} {'inside nodes':>16} {'between nodes':>16} {'expected':>16}\n"
            f"  {'buddy':<20} {int(all_nodes > 0):>6} {0:>16,} {all_nodes:>16,} {expected:>16,}\n"
            f"  between nodes in a step: {expected / self.protect.interval:,.0f} on average"
        )


def protection_of(
    strategy: Strategy, plans: Iterable[UnitPlan], outer: OuterPlan | None = None, states: int = ADAMW_STATES
) -> Protection:
    """Return what it takes to survive a lost node. A strategy without `protect` counts as with the default.

    `outer`: The plan of outer steps, if there are any. `states`: The states that the optimizer has of each parameter.
    """
    job, several = strategy.job, strategy.job.nodes > 1
    job.check_equal("protect")
    state = alone = expected = feedback = 0.0
    slices_alone = False
    for bucket in (bucket for plan in plans for bucket in plan.buckets):
        trainable, nodes = bucket.spec.trainable, bucket.optimizer.extent.nodes
        item, share = item_bytes(bucket.own_dtype), (_WEIGHTS_SHARE, _STATES_SHARE)
        weights = sum(bucket.spec.numels) / nodes * item
        mine = weights * (1 + states * trainable)
        state += mine
        feedback += bucket.memory_bytes()["feedback"]
        # Frozen parameters are the same on all islands.
        if several and nodes == strategy.topology.nodes and (trainable or strategy.islands == 1):
            slices_alone, alone = True, alone + mine
            if trainable:  # frozen parameters never change, so their differences are empty
                weights_share, states_share = share if bucket.own_dtype in EXACT else (1.0, 1.0)
                expected += weights * (weights_share + states * states_share)
    if outer is not None:
        kept = {part: nbytes for each in outer.memory_bytes() for part, nbytes in each.items()}
        state += job.ranks_per_node * (kept["slow weights"] + kept["outer momentum"])
        feedback += kept["outer feedback"]
    # Each rank keeps rounding errors of its own.
    feedback *= job.ranks_per_node
    if several:
        alone, expected = alone + feedback, expected + feedback * Coding(VALUES, "float32").share
    survives = Survives.NO
    if several:  # with outer steps, the other islands go on from the slow weights, which they all hold
        survives = Survives.WITH_BUDDIES if slices_alone and strategy.islands == 1 else Survives.YES
    protect = strategy.protect or Protect()
    return Protection(job, protect, survives, round(state + feedback), round(alone), round(expected))
