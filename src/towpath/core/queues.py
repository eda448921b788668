"""The queues of transfers, and the communicators of NCCL that they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from towpath.core.routes import COLLECTIVES, Form
from towpath.core.strategy import WITH_TRANSPORT, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.unit_plan import UnitPlan
from towpath.topology.cluster import Topology

# Transfers of one queue run one after the other. Different queues overlap, and have different wire buffers.
QUEUES = {
    TransferKind.GATHER: "gather",
    TransferKind.BACKWARD_GATHER: "gather",
    TransferKind.REDUCE: "reduce",
    TransferKind.GRAD_SYNC: "grad_sync",
    TransferKind.UNUSED_PARAMS: "control",
    TransferKind.PARAM_SYNC: "param_sync",
    TransferKind.MATRIX_GRADIENTS: "to owners",
    TransferKind.MATRIX_WEIGHTS: "to owners",
    TransferKind.MATRIX_UPDATES: "from owners",
    TransferKind.ACTIVATION: "activation",
    TransferKind.ACTIVATION_GRADIENT: "activation gradient",
}

# How many transfers of a queue may run at a time, each in its own wire buffers. A gather may start between nodes while
# the previous one still distributes its data inside the nodes.
MAX_IN_FLIGHT = {queue: 2 if queue == "gather" else 1 for queue in QUEUES.values()}


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
}
# Columns have one lane for both, because gathers and reductions share the cables that columns use.
COLUMNS = "columns"

# The memory that NCCL takes on a device for one communicator. This is an assumption: reports range from 0.5 to 0.7 GB
# with NVLink, and more if ranks of a node exchange messages all-to-all.
COMMUNICATOR_BYTES = 600_000_000


def lane_of(queue: str, ranks: Sequence[int], topology: Topology) -> str:
    """Return the lane of a queue for a group of these ranks."""
    is_column = topology.ranks_per_node > 1 and len(set(map(topology.node_of, ranks))) == len(ranks)
    return COLUMNS if is_column else LANES[queue]


def communicators(transfers: Iterable[Transfer]) -> set[tuple[tuple[int, ...], str]]:
    """Return the ranks and the lane of each communicator that one rank needs for `transfers`, besides the parent."""
    return {
        (ranks, lane_of(QUEUES[t.kind], ranks, t.topology))
        for t in transfers
        if t.form is Form.COLLECTIVES and t.move.op in COLLECTIVES
        for ranks in t.first_groups
    }


def communicator_bytes(plans: Iterable[UnitPlan]) -> dict[str, int]:
    """Return the bytes that NCCL takes on one rank's device, or an empty dict if messages execute the transfers."""
    found = communicators(t for plan in plans for kind in WITH_TRANSPORT for t in plan.transfers(kind))
    return {"communicators": (len(found) + 1) * COMMUNICATOR_BYTES} if found else {}  # the parent is one, too
