"""The transfers of a step, and the bytes that each one sends over each class of link.

A *transfer* is one collective, run by all its groups at the same time, or one message between pairs of ranks. It says
what moves (the payload), among which ranks, by which transport (route and codec), and for which
purpose (`TransferKind`). The
schedule, the simulator and the engine all read the same transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import ClassVar, NamedTuple

from towpath.core.formats import NARROW, Codec, item_bytes
from towpath.core.lossless import expected_share
from towpath.core.lossless import wire_bytes as exact_bytes
from towpath.core.placement import GroupCollective
from towpath.core.route_costs import Traffic, pair_traffic, sent_by_all, sent_out_of_racks
from towpath.core.routes import (
    COLLECTIVES,
    WITH_OWNERS,
    AllToAll,
    Form,
    Grid,
    Group,
    Op,
    Order,
    bounds,
    byte_grain,
    cell_elements,
    grouped_wire_elements,
    hops_of,
    order_of,
    parts_of,
    slice_bytes,
    wire_elements,
)
from towpath.core.strategy import BETWEEN_HOSTS, TransferKind
from towpath.core.transport import Transport
from towpath.errors import ConfigError
from towpath.topology.cluster import Topology


@dataclass(frozen=True, slots=True)
class Range:
    """The part of a bucket's parameters, or of their gradients, that one group shares."""

    unit: str  # the unit's name, empty for the root
    # The bucket's name. It is empty for a transfer that concerns all units, such as `unused_params`.
    bucket: str
    elements: int
    dtype: str  # the dtype in which the elements are sent
    # How many matrix elements are replaced by low-rank factors. 0 if there are none.
    factored: int = 0
    # True if each rank stores its part in the transport's codec. It is then sent in that form.
    encoded: bool = False

    def __str__(self) -> str:
        return f"{self.unit or 'root'} [{self.bucket}]" if self.bucket else "all units"


@dataclass(frozen=True, slots=True)
class Activation:
    """The output of a pipeline stage for one micro-batch, sent to the next stage; or its gradient, sent back."""

    bucket: ClassVar[str] = ""  # it belongs to no bucket
    stage: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def unit(self) -> str:
        """Name of the stage, used in place of a unit's name."""
        return f"stage {self.stage}"

    def __str__(self) -> str:
        return f"{self.unit} [{' × '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class OwnedMatrix:
    """A parameter that one rank of each copy of the optimizer states, its owner, steps as a full matrix."""

    name: str
    shape: tuple[int, ...]  # its global shape
    pieces: tuple[int, ...]  # how many of its elements each slice holds, in the order of slices
    owner: int  # the slice whose holder steps the matrix

    @property
    def numel(self) -> int:
        return sum(self.pieces)

    @property
    def stays(self) -> bool:
        """True if the owner already holds all of the matrix, so that none of it is sent."""
        return self.pieces[self.owner] == self.numel

    def bounds(self, slot: int) -> tuple[int, int]:
        """Return the start and end of the elements that slice `slot` holds."""
        start = sum(self.pieces[:slot])
        return start, start + self.pieces[slot]


@dataclass(frozen=True, slots=True)
class Matrices:
    """The full parameters, gradients or updates that one transfer moves between holders of pieces and owners."""

    bucket: ClassVar[str] = ""  # they may come from several buckets
    matrices: tuple[OwnedMatrix, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Total number of elements, including matrices that are already on their owner."""
        return sum(matrix.numel for matrix in self.matrices)

    @property
    def unit(self) -> str:
        """Names of the matrices, used in place of a unit's name."""
        return ", ".join(matrix.name for matrix in self.matrices)

    def __str__(self) -> str:
        return self.unit


Payload = Range | Activation | Matrices


class OwnerMessage(NamedTuple):
    """A message that carries the piece of matrix number `matrix` in slice `slot`, to its owner or back.

    Member `source` sends it to member `target`. Both are positions in the group.
    """

    source: int
    target: int
    matrix: int  # index into the matrices of the transfer
    slot: int


def owner_messages(op: Op, matrices: Sequence[OwnedMatrix], group: Group) -> Iterator[OwnerMessage]:
    """Yield every message of one group's transfer, matrix by matrix.

    Args:
        matrices: The matrices, in the order that all ranks agree on.
    """
    assert op in WITH_OWNERS
    member = {slot: position for position, slot in enumerate(group.slots)}
    for number, matrix in enumerate(matrices):
        for slot, elements in enumerate(matrix.pieces):
            if elements and slot != matrix.owner:
                holder, owner = member[slot], member[matrix.owner]
                source, target = (holder, owner) if op is Op.TO_OWNERS else (owner, holder)
                yield OwnerMessage(source, target, number, slot)


def piece_bytes(elements: int, item: int, codec: Codec | None) -> int:
    """Return how many bytes a piece of a matrix takes when it is sent. Each piece is encoded separately."""
    if not elements:
        return 0
    return codec.encoded_bytes(elements) if codec is not None else elements * item


def encoded_by_a_rank(matrices: Sequence[OwnedMatrix], codec: Codec | None) -> int:
    """Return the bytes of all encoded pieces that any rank sends and receives in one transfer, at most."""
    if codec is None:
        return 0
    through = [0] * max(len(matrix.pieces) for matrix in matrices)
    for matrix in matrices:
        sent = [piece_bytes(n, 0, codec) if slot != matrix.owner else 0 for slot, n in enumerate(matrix.pieces)]
        through = [a + b for a, b in zip(through, sent, strict=True)]
        through[matrix.owner] += sum(sent)
    return max(through)


def traffic_of_owners(
    op: Op, matrices: Sequence[OwnedMatrix], node_of_slot: Sequence[int], nodes: int, item: int, codec: Codec | None
) -> Traffic:
    """Return how many bytes one group sends when matrices move to their owners, or back.

    On the way to the owners, each node sends all that it holds of a matrix to the owner's node. Inside the owner's
    node, only the pieces of other ranks are sent. On the way back, the owner's node sends the same amounts out.

    Args:
        node_of_slot: The node of the rank that holds each slice.
        item: Bytes per element without a codec.
    """
    inside, leaving = 0, [0] * nodes
    for matrix in matrices:
        held = [0] * nodes
        for node, elements in zip(node_of_slot, matrix.pieces, strict=True):
            held[node] += piece_bytes(elements, item, codec)
        home = node_of_slot[matrix.owner]
        inside += held[home] - piece_bytes(matrix.pieces[matrix.owner], item, codec)
        held[home] = 0
        if op is Op.TO_OWNERS:
            leaving = [a + b for a, b in zip(leaving, held, strict=True)]
        else:
            leaving[home] += sum(held)
    return Traffic(inside, tuple(leaving))


# How many elements of memory something needs, by dtype.
Needs = dict[str, int]
# Sets of ranks that have every rank of the job once.
Ranks = tuple[tuple[int, ...], ...]


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
        """The route that is used, which can differ from the configured one.

        For example, some routes make no difference where there is only one kind of link. For an all-reduce, it is the
        route of its reduction.
        """
        # Collectives of the backend need slices of equal length. Encoded slices have one.
        in_calls = self.form is Form.COLLECTIVES and self.move.op in COLLECTIVES
        if in_calls and self.transport.encoding is None and self.elements % self.move.members:
            return "flat"
        return self.transport.route_on(self.move.op, self.grid, self.form, self.exact)

    @property
    def exact(self) -> bool:
        """True if what crosses nodes is encoded without losing a bit."""
        payload = self.payload
        if not isinstance(payload, Range) or payload.factored:
            return False
        return self.transport.encodes_exactly(self.move.op, self.grid, payload.elements, payload.dtype, self.form)

    @property
    def agrees_on_sizes(self) -> bool:
        """True if it sends exactly encoded messages by collectives, whose sizes ranks must agree on first."""
        return self.exact and self.form is Form.COLLECTIVES

    @property
    def by_rows_and_columns(self) -> bool:
        """True if collectives of rows and columns execute it, and none of the whole group."""
        return self.form is Form.COLLECTIVES and self.route in ("hierarchical", "two-hop")

    @property
    def first_groups(self) -> tuple[tuple[int, ...], ...]:
        """The first of each of the groups whose collectives execute it: a row and a column, or a whole group."""
        ranks = self.move.groups[0].ranks
        width = self.grid.width
        return (ranks[:width], ranks[::width]) if self.by_rows_and_columns else (ranks,)

    def partition(self, first: tuple[int, ...]) -> Ranks:
        """Return all rows, all columns, or all groups, of which `first` is the first one (`first_groups`)."""
        if not self.by_rows_and_columns:
            return tuple(group.ranks for group in self.move.groups)
        return self.rows if first == self.first_groups[0] else self.columns

    @property
    def rows(self) -> Ranks:
        """The ranks of each group that are on one node."""
        width = self.grid.width
        return tuple(g.ranks[i : i + width] for g in self.move.groups for i in range(0, len(g.ranks), width))

    @property
    def columns(self) -> Ranks:
        """The ranks of each group that have the same place in their nodes."""
        width = self.grid.width
        return tuple(g.ranks[place::width] for g in self.move.groups for place in range(width))

    @property
    def parts(self) -> int:
        """Number of parts that each slice is cut into while it is sent."""
        if self.move.op is Op.SEND or isinstance(self.payload, Matrices):
            return 1
        size = slice_bytes(self.elements, self.move.members, item_bytes(self.dtype), self.transport.encoding)
        return parts_of(self.route, self.grid, size, self.move.op, self.form)

    @property
    def grain(self) -> int:
        """The start of each slice, and of each part of one, is a multiple of this.

        It is the codec's grain, or an alignment of bytes that are gathered as they are.
        """
        if self.transport.encoding is not None:
            return self.transport.encoding.grain
        gathers_bytes = self.dtype == "uint8" and self.move.op is Op.ALL_GATHER
        return byte_grain(self.elements, self.move.members) if gathers_bytes else 1

    def bounds(self, slot: int) -> tuple[int, int]:
        return bounds(self.elements, self.move.members, slot, self.grain)

    @property
    def inter_bytes(self) -> int:
        """Bytes sent between nodes, summed over all ranks. Exact transfers send fewer: this is their upper bound."""
        return sum(self._traffic.leaving)

    @property
    def intra_bytes(self) -> int:
        """Bytes sent inside nodes, summed over all ranks. For an exact parameter sync, this is an upper bound, too."""
        return self._traffic.inside

    @property
    def encoded_inside(self) -> bool:
        """True if it is exact and stays encoded inside nodes. A sum is decoded there, and only encoded to cross."""
        return self.exact and self.move.op is Op.ALL_GATHER

    @property
    def expected_share(self) -> float:
        """The expected bytes of its encoded messages, as a share of their values: 1 unless it is exact."""
        return expected_share(self.move.op, self.dtype) if self.exact else 1.0

    @property
    def expected_inter_bytes(self) -> int:
        """The expected part of `inter_bytes` that is sent. It differs for exact transfers only."""
        return round(self.expected_share * self.inter_bytes)

    @property
    def expected_intra_bytes(self) -> int:
        """The expected part of `intra_bytes` that is sent."""
        return round(self.expected_share * self.intra_bytes) if self.encoded_inside else self.intra_bytes

    @property
    def expected_between_racks_bytes(self) -> int:
        """The expected part of `between_racks_bytes` that is sent."""
        return round(self.expected_share * self.between_racks_bytes)

    def cable_bytes(self, node: int) -> int:
        """Return how many bytes `node` sends to other nodes. Raise ConfigError if there is no such node."""
        _check_number("node", node, self.topology.nodes)
        return self._traffic.leaving[node]

    def rack_bytes(self, rack: int) -> int:
        """Return how many bytes the nodes of `rack` send to other racks. Raise ConfigError if there is none."""
        _check_number("rack", rack, self.topology.racks)
        return self._leaving_racks[rack]

    @property
    def between_racks_bytes(self) -> int:
        """Bytes sent between racks, summed over all ranks. They are part of those between nodes."""
        return sum(self._leaving_racks)

    @property
    def message_bytes(self) -> int:
        """Bytes of one message between two ranks, after encoding. Only for activations."""
        assert isinstance(self.payload, Activation)
        item, codec, low_rank = item_bytes(self.dtype), self.transport.encoding, self.transport.low_rank
        if low_rank is not None:
            return low_rank.encoded_elements(self.payload.shape) * item
        return codec.encoded_bytes(self.elements) if codec else self.elements * item

    @property
    def _traffic(self) -> Traffic:
        if self.move.op is Op.SEND:
            return pair_traffic(self.move, self.topology, self.message_bytes)
        item = item_bytes(self.dtype)
        if isinstance(self.payload, Matrices):
            return _owner_traffic(self.move, self.topology, self.payload.matrices, item, self.transport.encoding)
        return sent_by_all(
            self.move, self.route, self.topology, self.parts, self.elements, item, self.transport.encoding, self.form
        )

    @property
    def _leaving_racks(self) -> tuple[int, ...]:
        topology = self.topology
        if topology.nodes_per_rack is None:
            return (0,)
        # A message that goes straight to its target leaves a rack as it would leave a node of that size.
        racks_as_nodes = Topology(topology.racks, topology.nodes_per_rack * topology.ranks_per_node)
        if self.move.op is Op.SEND:
            return pair_traffic(self.move, racks_as_nodes, self.message_bytes).leaving
        item, codec = item_bytes(self.dtype), self.transport.encoding
        if isinstance(self.payload, Matrices):
            return _owner_traffic(self.move, racks_as_nodes, self.payload.matrices, item, codec).leaving
        # Bytes of an encoded sum are gathered by the configured route, which may be a ring where sums go directly.
        gather = self.route if codec is None else self.transport.route
        return sent_out_of_racks(
            self.move, self.route, gather, topology, self.parts, self.elements, item, codec, self.form
        )

    @property
    def region_bytes(self) -> int:
        return self.elements * item_bytes(self.dtype)

    @property
    def wire_needs(self) -> Needs:
        """Wire buffers that one rank needs for this transfer, in addition to the region."""
        if self.kind in BETWEEN_HOSTS:
            return {}
        if isinstance(self.payload, Matrices):  # pieces without a codec are received in their final memory
            return {"uint8": encoded_by_a_rank(self.payload.matrices, self.transport.encoding)}
        if self.move.op is Op.SEND:
            return {"uint8": self.message_bytes}
        codec, slots = self.transport.encoding, self.move.groups[0].slots
        own, sums = wire_elements(
            self.move.op, self.route, self.grid, self.parts, self.elements, codec, self.form, slots
        )
        if codec is not None:
            scratch = max(sums if any(self.kept_elements) else 0, 2 * self.kept_by_gather)
            return {"uint8": own, "float32": scratch}
        needs = {self.dtype: own} if self.dtype not in NARROW else {self.dtype: own, "float32": sums}
        if self.exact:
            parts = 1 if self.form is Form.COLLECTIVES else self.parts
            encoded = exact_bytes(self.move.op, self.route, self.grid, parts, self.elements, self.dtype)
            if self.form is Form.COLLECTIVES:  # in place of the values
                encoded += grouped_wire_elements(self.route, self.grid, encoded, slots)
                return {"uint8": encoded}
            needs["uint8"] = encoded
        return needs

    @property
    def coalesced_bytes(self) -> int:
        """Bytes of the wire buffer that this gather needs if others of its group run with it as one.

        As messages, the shards of all gathers are packed into it. Collectives that launch together need no copy, unless
        slices are in an order that they cannot work on.
        """
        if self.form is Form.MESSAGES:
            return self.region_bytes
        slots = self.move.groups[0].slots
        direct = order_of(slots, self.grid) is not Order.OTHER
        if self.route == "flat":
            direct = self.move.groups[0].in_order
        grouped = grouped_wire_elements(self.route, self.grid, self.region_bytes, slots)
        return grouped if direct else grouped + self.region_bytes

    @property
    def launches_with_others(self) -> bool:
        """True if it is a reduce-scatter of the backend on the region itself. Several run together without a copy."""
        group = self.move.groups[0]
        direct = self.route == "flat" and group.in_order and self.elements % self.move.members == 0
        return direct and self.form is Form.COLLECTIVES and self.move.op is Op.REDUCE_SCATTER

    @property
    def kept_elements(self) -> tuple[int, ...]:
        """Number of float32 elements of codec state that one rank keeps between steps, for each hop.

        This is the error feedback: what the codec rounded away, to be added in the next step. For a low-rank message it
        also includes the factor that the next step starts from.
        """
        if isinstance(self.payload, Activation):
            return (sum(self.transport.kept_for_message(self.payload.shape)),)
        if self.transport.encoding is None or self.move.op is Op.ALL_GATHER or isinstance(self.payload, Matrices):
            return ()
        hops = hops_of(self.route, self.grid)
        kept = AllToAll(hops, self.parts, self.elements, self.transport.encoding).kept_elements
        last = len(hops) - 1
        asked = {"none": (), "first": (0,), "second": (last,), "both": (0, 1), "all": (0, 1)}[self.transport.feedback]
        return tuple(n if hop in asked else 0 for hop, n in enumerate(kept))

    @property
    def kept_by_gather(self) -> int:
        """Number of float32 elements that one rank keeps of its sum, where an all-reduce rounds it, too."""
        if self.transport.encoding is None or self.move.op is Op.SEND or self.transport.feedback != "all":
            return 0
        return cell_elements(self.elements, self.move.members, 1, self.grain) if self.move.op is Op.ALL_REDUCE else 0

    def in_micro_step(self, number: int) -> Transfer:
        return self if self.micro_step == number else replace(self, micro_step=number)

    def __str__(self) -> str:
        if self.move.op is Op.SEND:
            pairs = ", ".join(f"{source} to {target}" for source, target in (g.ranks for g in self.move.groups))
            return f"{self.kind.value} of {self.payload}, {self.move.op.value} from rank {pairs}"
        if isinstance(self.payload, Matrices):
            return f"{self.kind.value} of {self.payload}, {self.move.op.value} among {self.move.members} ranks"
        return f"{self.kind.value} of {self.payload}, {self.move.op.value} over {self.move.members} ranks"


def _check_number(what: str, number: int, count: int) -> None:
    """Raise unless the cluster has a node or rack of this number."""
    if not 0 <= number < count:
        raise ConfigError(f"{what} {number}: the cluster has {count}. Expected a number from 0 to {count - 1}.")


@lru_cache(maxsize=1024)
def _grid(move: GroupCollective, topology: Topology) -> Grid:
    return Grid.of([topology.node_of(rank) for rank in move.groups[0].ranks])


@lru_cache(maxsize=4096)
def _owner_traffic(
    move: GroupCollective, topology: Topology, matrices: tuple[OwnedMatrix, ...], item: int, codec: Codec | None
) -> Traffic:
    inside, leaving = 0, [0] * topology.nodes
    for group in move.groups:
        homes = {slot: topology.node_of(rank) for rank, slot in zip(group.ranks, group.slots, strict=True)}
        by_slot = [homes[slot] for slot in range(len(homes))]
        sent = traffic_of_owners(move.op, matrices, by_slot, topology.nodes, item, codec)
        inside += sent.inside
        leaving = [a + b for a, b in zip(leaving, sent.leaving, strict=True)]
    return Traffic(inside, tuple(leaving))
