"""The transfers of a step: what moves, among whom, and how.

A *transfer* is one collective, run by all its groups at the same time, or one message between pairs of ranks. It says
what moves (the payload), among which ranks, by which transport (route and codec), and for which
purpose (`TransferKind`). The schedule, the simulator and the engine all read the same transfers.

`core/costs.py` counts the bytes that a transfer sends and what a rank launches for it, and `core/buffers.py` the memory
that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from towpath.core.costs import traffic
from towpath.core.formats import Coding, item_bytes
from towpath.core.placement import GroupCollective
from towpath.core.routes import COLLECTIVES, Form, Grid, Op, bounds, byte_grain, parts_of, slice_bytes
from towpath.core.strategy import BETWEEN_HOSTS, TransferKind
from towpath.core.transport import Transport
from towpath.core.units import Activation, Matrices, Payload, Range
from towpath.errors import ConfigError
from towpath.topology.cluster import RankSets, Topology


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective of a step, run by all its groups at the same time, or one message for each pair of ranks.

    The schedule lists transfers, and the engine binds each one to the collective that executes it on this rank.
    """

    kind: TransferKind
    payload: Payload
    # Its operation and its groups. Their ranks are ranks of `topology`.
    move: GroupCollective
    transport: Transport
    topology: Topology
    micro_step: int = 0  # the micro-step in which it is submitted, or the micro-batch of an activation
    # How its route is executed. The engine takes collectives with NCCL, and messages with gloo.
    form: Form = Form.MESSAGES

    @property
    def unit(self) -> str:
        return self.payload.unit

    @property
    def bucket(self) -> str:
        """Name of the payload's bucket, or an empty string."""
        return self.payload.bucket

    @property
    def elements(self) -> int:
        """Number of elements of one group's region, or of one message."""
        return self.payload.elements

    @property
    def dtype(self) -> str:
        return self.payload.dtype

    def over(self, ranks: Sequence[int], topology: Topology) -> Transfer:
        """Return the same transfer in a larger job, where rank i becomes rank `ranks[i]` of `topology`."""
        return replace(self, move=self.move.over(ranks), topology=topology)

    def repeated(self, islands: int, job: Topology) -> Transfer:
        """Return the same transfer as all islands of a job run it at the same time."""
        return replace(self, move=self.move.repeated(islands, self.topology.world), topology=job)

    @property
    def grid(self) -> Grid:
        """Grid of the first group's members. All groups have the same grid."""
        return _grid(self.move, self.topology)

    @property
    def route(self) -> str:
        """The route that is used, which can differ from the configured one."""
        # For example, some routes make no difference where there is only one kind of link. For an all-reduce, it is the
        # route of its reduction.
        # Collectives of the backend need slices of equal length. Encoded slices have one.
        in_calls = self.form is Form.COLLECTIVES and self.move.op in COLLECTIVES
        if in_calls and self.transport.encoding is None and self.elements % self.move.members:
            return "flat"
        size = self._slice_bytes if in_calls else 0
        return self.transport.route_on(self.move.op, self.grid, self.form, self.coding is not None, size)

    @property
    def coding(self) -> Coding | None:
        """How it encodes what crosses nodes without losing a bit, or None. Its messages are then as long as needed."""
        payload = self.payload
        if not isinstance(payload, Range) or payload.factored:
            return None
        return self.transport.coding(self.move.op, self.grid, payload.elements, payload.dtype, self.form)

    @property
    def encoding(self) -> str:
        """The name of the encoding of its messages, or 'none'."""
        coding = self.coding
        return coding.codec if coding is not None else str(self.transport.codec)

    @property
    def between_hosts(self) -> bool:
        """True if a thread sends it over gloo from the host's memory, also where GPUs compute."""
        is_exchange = self.kind in (TransferKind.OUTER, TransferKind.SLOW_WEIGHTS)
        return self.kind in BETWEEN_HOSTS or (is_exchange and self.form is Form.MESSAGES)

    @property
    def agrees_on_sizes(self) -> bool:
        """True if collectives send messages of a coding. Ranks must agree on their sizes first."""
        return self.form is Form.COLLECTIVES and self.coding is not None

    @property
    def by_rows_and_columns(self) -> bool:
        """True if collectives of rows and columns execute it, and none of the whole group."""
        return self.form is Form.COLLECTIVES and self.route in ("hierarchical", "ho-ring", "two-hop")

    @property
    def partitions(self) -> tuple[RankSets, ...]:
        """The sets of ranks whose collectives execute it: all rows and all columns, or all whole groups."""
        return _rows_and_columns(self.move, self.grid.width) if self.by_rows_and_columns else (_whole(self.move),)

    @property
    def parts(self) -> int:
        """Number of parts that each slice is cut into while it is sent."""
        if self.move.op is Op.SEND or isinstance(self.payload, Matrices):
            return 1
        return parts_of(self.route, self.grid, self._slice_bytes, self.move.op, self.form)

    @property
    def _slice_bytes(self) -> int:
        return slice_bytes(self.elements, self.move.members, item_bytes(self.dtype), self.transport.encoding)

    @property
    def grain(self) -> int:
        """The start of each slice, and of each part of one, is a multiple of this."""
        # It is the codec's grain, or an alignment of bytes that are gathered as they are.
        if self.transport.encoding is not None:
            return self.transport.encoding.grain
        gathers_bytes = self.dtype == "uint8" and self.move.op is Op.ALL_GATHER
        return byte_grain(self.elements, self.move.members) if gathers_bytes else 1

    def bounds(self, slot: int) -> tuple[int, int]:
        return bounds(self.elements, self.move.members, slot, self.grain)

    @property
    def inter_bytes(self) -> int:
        """Bytes sent between nodes, summed over all ranks. With a coding, this is an upper bound."""
        return sum(traffic(self).leaving)

    @property
    def intra_bytes(self) -> int:
        """Bytes sent inside nodes, summed over all ranks. Of a coded parameter sync, it is an upper bound, too."""
        return traffic(self).inside

    @property
    def between_racks_bytes(self) -> int:
        """Bytes sent between racks, summed over all ranks. They are part of those between nodes."""
        return sum(traffic(self).leaving_racks)

    def cable_bytes(self, node: int) -> int:
        """Return how many bytes `node` sends to other nodes. Raise ConfigError if there is no such node."""
        return _checked("node", node, traffic(self).leaving)

    def rack_bytes(self, rack: int) -> int:
        """Return how many bytes the nodes of `rack` send to other racks. Raise ConfigError if there is none."""
        return _checked("rack", rack, traffic(self).leaving_racks)

    @property
    def encoded_inside(self) -> bool:
        """True if it has a coding and stays encoded inside nodes. A sum is decoded there, and only encoded to cross."""
        return self.move.op is Op.ALL_GATHER and self.coding is not None

    @property
    def message_bytes(self) -> int:
        """Bytes of one message between two ranks, after encoding. Only for activations."""
        assert isinstance(self.payload, Activation)
        return self.transport.message_bytes(self.payload.shape, self.dtype)

    @property
    def region_bytes(self) -> int:
        return self.elements * item_bytes(self.dtype)

    def in_micro_step(self, number: int) -> Transfer:
        return self if self.micro_step == number else replace(self, micro_step=number)

    def __str__(self) -> str:
        if self.move.op is Op.SEND:
            pairs = ", ".join(f"{source} to {target}" for source, target in (g.ranks for g in self.move.groups))
            return f"{self.kind.value} of {self.payload}, {self.move.op.value} from rank {pairs}"
        if isinstance(self.payload, Matrices):
            return f"{self.kind.value} of {self.payload}, {self.move.op.value} among {self.move.members} ranks"
        return f"{self.kind.value} of {self.payload}, {self.move.op.value} over {self.move.members} ranks"


def _checked(what: str, number: int, found: Sequence[int]) -> int:
    """Return the bytes of a node or rack. Raise ConfigError unless the cluster has one of this number."""
    if not 0 <= number < len(found):
        last = len(found) - 1
        raise ConfigError(f"{what} {number}: the cluster has {last + 1}. Expected a number from 0 to {last}.")
    return found[number]


@lru_cache(maxsize=1024)
def _grid(move: GroupCollective, topology: Topology) -> Grid:
    return Grid.of([topology.node_of(rank) for rank in move.groups[0].ranks])


@lru_cache(maxsize=1024)
def _rows_and_columns(move: GroupCollective, width: int) -> tuple[RankSets, RankSets]:
    """Return the ranks of each group that are on one node, and those that have the same place in their nodes."""
    rows = (g.ranks[i : i + width] for g in move.groups for i in range(0, len(g.ranks), width))
    return tuple(rows), tuple(g.ranks[place::width] for g in move.groups for place in range(width))


@lru_cache(maxsize=1024)
def _whole(move: GroupCollective) -> RankSets:
    return tuple(group.ranks for group in move.groups)
