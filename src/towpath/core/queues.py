"""The queues of transfers, the communicators of NCCL that they share, and which ranks compare what they submit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from towpath.core.placement import replicas
from towpath.core.routes import ALL_TO_ALL, COLLECTIVES, Form, Op
from towpath.core.strategy import BETWEEN_HOSTS, OUTER_KINDS, WITH_TRANSPORT, Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.unit_plan import UnitPlan
from towpath.topology.cluster import RankSets, Topology

# Transfers of one queue run one after the other. Different queues overlap, and have different wire buffers.
QUEUES = {
    TransferKind.GATHER: "gather",
    TransferKind.BACKWARD_GATHER: "gather",
    TransferKind.REDUCE: "reduce",
    TransferKind.GRAD_SYNC: "grad_sync",
    TransferKind.UNUSED_PARAMS: "control",
    TransferKind.MESSAGE_SIZES: "control",
    TransferKind.PARAM_SYNC: "param_sync",
    TransferKind.OUTER: "outer",
    TransferKind.SLOW_WEIGHTS: "outer",
    TransferKind.OUTER_GATHER: "outer gather",
    TransferKind.MATRIX_GRADIENTS: "to owners",
    TransferKind.MATRIX_WEIGHTS: "to owners",
    TransferKind.MATRIX_UPDATES: "from owners",
    TransferKind.ACTIVATION: "activation",
    TransferKind.ACTIVATION_GRADIENT: "activation gradient",
}

# The queue of exchanges between islands that a thread sends over gloo, from the memory of hosts whose GPUs train.
HOST_EXCHANGES = "outer over gloo"
# The queues that threads run, also on GPUs.
HOST_QUEUES = frozenset({HOST_EXCHANGES, *(QUEUES[kind] for kind in BETWEEN_HOSTS)})

# The queues of outer steps.
OUTER_QUEUES = frozenset(QUEUES[kind] for kind in OUTER_KINDS)

# How many transfers of a queue may run at a time, each in its own wire buffers. A gather may start between nodes while
# the previous one still distributes its data inside the nodes.
MAX_IN_FLIGHT = {queue: 2 if queue == "gather" else 1 for queue in (*QUEUES.values(), HOST_EXCHANGES)}


# A *lane* is a kind of communicator. NCCL runs the calls of a communicator one after the other, so gathers and
# reductions have different ones. More of them would cost memory and processors of the device, and overlap hardly more.
# A queue shares the communicators of its lane with all other queues of the lane, if they have the same ranks.
LANES = {
    "gather": "gather",
    "param_sync": "gather",
    "from owners": "gather",
    "control": "gather",
    "reduce": "reduce",
    "grad_sync": "reduce",
    "to owners": "reduce",
    # Exchanges between islands are under way for several steps, and must not be in anything's way.
    "outer": "outer",
    "outer gather": "outer gather",
}
Communicator = tuple[tuple[int, ...], str]  # its ranks and its lane

# The memory that NCCL takes on a device for one communicator. This is an assumption: reports range from 0.5 to 0.7 GB
# with NVLink.
COMMUNICATOR_BYTES = 600_000_000

# What it takes in addition for each other rank of the node, if the communicator carries all-to-alls. This is an
# assumption, too: with 8 H100, the first all-to-all of a node was reported to take 3.3 GB, and 3.5 GB are counted for
# its communicator. Nobody has measured it with fewer thread blocks (`max_ctas`), which should take less.
PEER_BYTES = (3_500_000_000 - COMMUNICATOR_BYTES) // 7


@dataclass(frozen=True, slots=True)
class CommunicatorSharing:
    """The communicators that the queues of one model share.

    Gathers and reductions have lanes of their own, with two exceptions, so that few presets need more than three
    communicators. They share columns, which are used little where rows are used much. If every micro-step uses columns
    for both gathers and reductions, they share rows instead, because links inside a node are the faster ones.
    """

    share_rows: bool = False  # True if gathers and reductions share rows, and not columns
    with_all_to_alls: frozenset[Communicator] = frozenset()  # the communicators that carry all-to-alls

    @staticmethod
    def of(plans: Iterable[UnitPlan]) -> CommunicatorSharing:
        transfers = tuple(_transfers(plans))
        kinds = {t.kind for t in transfers if t.by_rows_and_columns}
        lanes = CommunicatorSharing({TransferKind.GATHER, TransferKind.REDUCE} <= kinds)
        exchanges = (t for t in transfers if t.move.op is not Op.ALL_GATHER and t.route in ALL_TO_ALL)
        return replace(lanes, with_all_to_alls=frozenset(each for t in exchanges for each in lanes.communicators(t)))

    def lane(self, queue: str, ranks: Sequence[int], topology: Topology) -> str:
        nodes = len(set(map(topology.node_of, ranks)))
        if queue in OUTER_QUEUES:
            return LANES[queue]
        if self.share_rows and nodes == 1:
            return "rows"
        if not self.share_rows and nodes == len(ranks) and topology.ranks_per_node > 1:
            return "columns"
        return LANES[queue]

    def communicators(self, transfer: Transfer) -> tuple[Communicator, ...]:
        """Return the communicators that execute `transfer` on the first rank: of a row and a column, or of its group.

        Return an empty tuple if messages execute it.
        """
        if transfer.form is Form.MESSAGES or transfer.move.op not in COLLECTIVES:
            return ()
        queue, topology = QUEUES[transfer.kind], transfer.topology
        return tuple((each[0], self.lane(queue, each[0], topology)) for each in transfer.partitions)


@dataclass(frozen=True, slots=True)
class SharedLane:
    """A communicator of several queues, on every rank. NCCL runs its calls in the order in which ranks submit them.

    Queues with communicators of their own may interleave differently on each rank. Here that would let an all-gather
    meet a reduction, so the ranks of each communicator compare the order at the boundary.
    """

    lane: str
    ranks: RankSets  # the ranks of the communicator that each rank is in
    # The kinds of the transfers. `UNUSED_PARAMS` stands for shared calls, such as norms and full tensors.
    kinds: frozenset[TransferKind]


def shared_lanes(strategy: Strategy, plans: Iterable[UnitPlan]) -> tuple[SharedLane, ...]:
    """Return the communicators that transfers of more than one queue use. There are none in the form of messages."""
    plans = tuple(plans)
    lanes, kinds, everyone = (
        CommunicatorSharing.of(plans),
        dict[Communicator, set[TransferKind]](),
        dict[Communicator, RankSets](),
    )
    for transfer in _transfers(plans):
        for communicator, ranks in zip(lanes.communicators(transfer), transfer.partitions, strict=False):
            kinds.setdefault(communicator, set()).add(transfer.kind)
            everyone[communicator] = ranks
    for move in strategy.moves.assemble:
        ranks = move.groups[0].ranks
        called = (ranks, lanes.lane(QUEUES[TransferKind.UNUSED_PARAMS], ranks, strategy.topology))
        # The parent serves the calls of all ranks, and no transfers.
        if len(move.groups) > 1 and called in kinds:
            kinds[called].add(TransferKind.UNUSED_PARAMS)
    return tuple(
        SharedLane(communicator[1], everyone[communicator], frozenset(found))
        for communicator, found in kinds.items()
        if len({QUEUES[kind] for kind in found}) > 1
    )


def communicator_bytes(plans: Collection[UnitPlan]) -> dict[str, int]:
    """Return the bytes that NCCL takes on one rank's device, or an empty dict if messages execute the transfers."""
    lanes, taken = CommunicatorSharing.of(plans), dict[Communicator, int]()
    for transfer in _transfers(plans):
        for each in lanes.communicators(transfer):
            nodes = Counter(map(transfer.topology.node_of, each[0]))
            peers = max(nodes.values()) - 1 if each in lanes.with_all_to_alls else 0
            taken[each] = COMMUNICATOR_BYTES + peers * PEER_BYTES
    return {"communicators": sum(taken.values()) + COMMUNICATOR_BYTES} if taken else {}  # the parent is one, too


def pipeline_communicator_bytes(ranks: int, form: Form) -> int:
    """Return the bytes of NCCL for the messages of a pipeline of so many ranks, and for the parent of the job."""
    # NCCL runs the messages of a communicator one after the other. Activations and gradients have one each, so that
    # messages of one direction do not wait for those of the other.
    return 3 * COMMUNICATOR_BYTES if ranks > 1 and form is Form.COLLECTIVES else 0


def outer_communicator_bytes(transfers: Iterable[Transfer], from_host: bool) -> int:
    """Return the bytes of NCCL that outer steps add on one rank: for their transfers, and for the parent of the job.

    `from_host`: Whether islands exchange over gloo, which needs none. The job then still has its parent.
    """
    found = {each for transfer in transfers for each in CommunicatorSharing().communicators(transfer)}
    return (len(found) + 1) * COMMUNICATOR_BYTES if found or from_host else 0


def _transfers(plans: Iterable[UnitPlan]) -> Iterator[Transfer]:
    distinct = {id(plan): plan for plan in plans}.values()  # the planner shares one object among equal units
    return (t for plan in distinct for kind in WITH_TRANSPORT for t in plan.transfers(kind))


# What ranks must do identically, and which ranks compare it:
#
# * All ranks compare the program: optimizer steps with their hyperparameters, micro-steps, and zeroed gradients.
# * Ranks with the same optimizer slice compare checksums of their parameters, at chosen boundaries.
# * Ranks of one replica of the parameters compare gathers, trainable and frozen ones together. Replicas may run
#   different units.
# * Ranks of one replica of the gradients compare reductions.
# * Ranks of one replica of the optimizer states compare gradient syncs, parameter syncs, transfers of optimizers
#   that need full matrices. They also compare shared calls: norms and full tensors, collectives of these ranks.
# * Ranks of a communicator that several queues share compare the order of all transfers of these queues.
#
# `engine/agree/digest.py` keeps the log. The number of groups decides the bytes of the comparison, which the schedule
# counts.

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
    """Return what the ranks of `strategy` compare, and in which groups. Groups of one rank compare nothing."""
    # The program comes first, because other differences follow from ranks that ran different programs. The order of
    # transfers on shared communicators (`lanes`) comes last, because it follows from which units the ranks ran.
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


def digest_bytes(strategy: Strategy, lanes: tuple[SharedLane, ...] = ()) -> int:
    """Return the bytes that the comparison adds to the transfer of unused parameters."""
    return SLOT_BYTES * sum(scope.groups for scope in scopes(strategy, lanes))
