"""A transfer: one collective of a step, or one message, and the bytes that it sends over each class of link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from towpath.core.formats import NARROW, Codec, item_bytes
from towpath.core.placement import GroupCollective
from towpath.core.routes import (
    WITH_OWNERS,
    AllToAll,
    Grid,
    Group,
    Op,
    Sent,
    bounds,
    encoded_slice,
    hops_of,
    parts_of,
    sent_bytes,
    slice_bytes,
    wire_elements,
)
from towpath.core.strategy import Kind
from towpath.core.wire import Wire
from towpath.topology.cluster import Topology

# --- payload ----------------------------------------------------------------------------------------------------------
#
# What a transfer moves.


@dataclass(frozen=True, slots=True)
class Range:
    """Of a bucket's parameters, or of their gradients: as much as one group shares.

    `factored`: the elements of the matrices of which it has factors, instead of what they are. `encoded`: each rank's
    part rests in the wire's codec, and is sent as it rests.
    """

    unit: str
    bucket: str
    elements: int
    dtype: str
    factored: int = 0
    encoded: bool = False

    def __str__(self) -> str:
        return f"{self.unit or 'root'} [{self.bucket}]" if self.bucket else "all units"


@dataclass(frozen=True, slots=True)
class Activation:
    """Of one micro-batch, what a pipeline stage hands to the next: an output; or, on its way back, its gradient."""

    stage: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def unit(self) -> str:
        return f"stage {self.stage}"

    @property
    def bucket(self) -> str:
        return ""

    def __str__(self) -> str:
        return f"{self.unit} [{' × '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter that one rank of each copy of the optimizer states steps whole: the one that holds slice `owner`.

    `pieces`: by slice, in order, how many of its elements lie there.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[int, ...]
    owner: int

    @property
    def numel(self) -> int:
        return sum(self.pieces)

    @property
    def stays(self) -> bool:
        """Whether its owner holds all of it, and none of it travels."""
        return self.pieces[self.owner] == self.numel

    def bounds(self, slot: int) -> tuple[int, int]:
        """Which of its elements lie in that slice."""
        start = sum(self.pieces[:slot])
        return start, start + self.pieces[slot]


@dataclass(frozen=True, slots=True)
class Matrices:
    """Whole parameters, or their gradients, as their slices travel between the ranks that hold these and the owners."""

    matrices: tuple[Matrix, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Those at their owners from the start among them."""
        return sum(matrix.numel for matrix in self.matrices)

    @property
    def unit(self) -> str:
        return ", ".join(matrix.name for matrix in self.matrices)

    @property
    def bucket(self) -> str:
        return ""

    def __str__(self) -> str:
        return self.unit


Payload = Range | Activation | Matrices


# --- owner messages ---------------------------------------------------------------------------------------------------
#
# What is sent between the ranks that hold pieces of matrices and the ranks that own these: message by message, and in
# closed form how many bytes that is. `collectives/owners.py` executes it.


class OwnerMessage(NamedTuple):
    """Member `source` sends member `target` (positions in the group) the piece of a matrix that lies in `slot`."""

    source: int
    target: int
    matrix: int  # which of the matrices
    slot: int


def owner_messages(op: Op, matrices: Sequence[Matrix], group: Group) -> Iterator[OwnerMessage]:
    """Every message of one transfer of a group, matrix by matrix."""
    assert op in WITH_OWNERS
    member = {slot: position for position, slot in enumerate(group.slots)}
    for number, matrix in enumerate(matrices):
        for slot, elements in enumerate(matrix.pieces):
            if elements and slot != matrix.owner:
                holder, owner = member[slot], member[matrix.owner]
                source, target = (holder, owner) if op is Op.TO_OWNERS else (owner, holder)
                yield OwnerMessage(source, target, number, slot)


def piece_bytes(elements: int, item: int, codec: Codec | None) -> int:
    """As it travels: each piece is encoded by itself."""
    if not elements:
        return 0
    return codec.encoded_bytes(elements) if codec is not None else elements * item


def encoded_by_a_rank(matrices: Sequence[Matrix], codec: Codec | None) -> int:
    """Bytes of all encoded pieces that one rank sends and receives in one transfer, at most."""
    if codec is None:
        return 0
    through = [0] * max(len(matrix.pieces) for matrix in matrices)
    for matrix in matrices:
        sent = [piece_bytes(n, 0, codec) if slot != matrix.owner else 0 for slot, n in enumerate(matrix.pieces)]
        through = [a + b for a, b in zip(through, sent, strict=True)]
        through[matrix.owner] += sum(sent)
    return max(through)


def sent_with_owners(
    op: Op, matrices: Sequence[Matrix], node_of_slot: Sequence[int], nodes: int, item: int, codec: Codec | None
) -> Sent:
    """What one group sends: a node sends all it holds of a matrix out to the owner's node, or, if that is this one, all
    but what the owner holds inside. On the way back the owner's node sends what the others have sent it."""
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
    return Sent(inside, tuple(leaving))


Needs = dict[str, int]  # elements by dtype


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective of a step, on every group that runs it at once; or one message of every pair of ranks.

    `move` names ranks of `topology`, which lie on its nodes.
    """

    kind: Kind
    payload: Payload
    move: GroupCollective
    wire: Wire
    topology: Topology
    micro_step: int = 0

    @property
    def unit(self) -> str:
        return self.payload.unit

    @property
    def bucket(self) -> str:
        return self.payload.bucket

    @property
    def elements(self) -> int:
        """Of one group's region, or of one message."""
        return self.payload.elements

    @property
    def dtype(self) -> str:
        return self.payload.dtype

    def over(self, ranks: Sequence[int], topology: Topology) -> Transfer:
        """The same in a larger job: what is rank i here is rank `ranks[i]` of `topology`."""
        return replace(self, move=self.move.over(ranks), topology=topology)

    @property
    def grid(self) -> Grid:
        """Of the first group's members: alike in all groups, as far as routes go."""
        return _grid(self.move, self.topology)

    @property
    def route(self) -> str:
        """The one that is taken: some make no difference where there is one kind of link only."""
        return self.wire.route_on(self.move.op, self.grid)

    @property
    def parts(self) -> int:
        """Into how many each slice is cut on its way."""
        if self.move.op is Op.SEND or isinstance(self.payload, Matrices):
            return 1
        size = slice_bytes(self.elements, self.move.members, item_bytes(self.dtype), self.wire.encoding)
        return parts_of(self.route, self.grid, size)

    @property
    def inter_bytes(self) -> int:
        """Sent between nodes, all ranks together."""
        return sum(self._sent.leaving)

    @property
    def intra_bytes(self) -> int:
        """Sent inside nodes, all ranks together."""
        return self._sent.inside

    def cable_bytes(self, node: int) -> int:
        """Sent by `node` over its cable."""
        return self._sent.leaving[node]

    @property
    def message_bytes(self) -> int:
        """Of a message from one rank to another, as it travels."""
        assert isinstance(self.payload, Activation)
        item, codec, low_rank = item_bytes(self.dtype), self.wire.encoding, self.wire.low_rank
        if low_rank is not None:
            return low_rank.encoded_elements(self.payload.shape) * item
        return codec.encoded_bytes(self.elements) if codec else self.elements * item

    @property
    def _sent(self) -> Sent:
        if self.move.op is Op.SEND:
            return _sent_by_pairs(self.move, self.topology, self.message_bytes)
        item = item_bytes(self.dtype)
        if isinstance(self.payload, Matrices):
            return _sent_with_owners(self.move, self.topology, self.payload.matrices, item, self.wire.encoding)
        return _sent_by_all(self.move, self.route, self.topology, self.parts, self.elements, item, self.wire.encoding)

    @property
    def region_bytes(self) -> int:
        return self.elements * item_bytes(self.dtype)

    @property
    def wire_needs(self) -> Needs:
        """What one rank needs to receive in, beside the region."""
        if self.kind is Kind.USAGE:
            return {}
        if isinstance(self.payload, Matrices):  # what is not encoded goes straight to where it belongs
            return {"uint8": encoded_by_a_rank(self.payload.matrices, self.wire.encoding)}
        if self.move.op is Op.SEND:
            return {"uint8": self.message_bytes}
        codec = self.wire.encoding
        own, sums = wire_elements(self.move.op, self.route, self.grid, self.parts, self.elements, codec)
        if codec is not None:
            return {"uint8": own, "float32": sums if any(self.kept_elements) else 0}
        if self.dtype not in NARROW:
            return {self.dtype: own}
        return {self.dtype: own, "float32": sums}

    @property
    def kept_elements(self) -> tuple[int, ...]:
        """By hop: how many float32 of what the codec rounds away one rank keeps, to be added the next time.

        Of a message in low rank, also what its sender starts from.
        """
        if isinstance(self.payload, Activation):
            feedback = self.wire.feedback == "first"
            if self.wire.low_rank is not None:
                return (self.wire.low_rank.kept_elements(self.payload.shape, feedback),)
            return (self.elements,) if feedback else ()
        if self.wire.encoding is None or self.move.op is Op.ALL_GATHER or isinstance(self.payload, Matrices):
            return ()
        hops = hops_of(self.route, self.grid)
        kept = AllToAll(hops, self.parts, self.elements, self.wire.encoding).kept_elements
        asked = {"none": (), "first": (0,), "second": (len(hops) - 1,), "both": (0, 1)}[self.wire.feedback]
        return tuple(n if hop in asked else 0 for hop, n in enumerate(kept))

    def in_micro_step(self, number: int) -> Transfer:
        return self if self.micro_step == number else replace(self, micro_step=number)

    def __str__(self) -> str:
        if self.move.op is Op.SEND:
            pairs = ", ".join(f"{source} to {target}" for source, target in (g.ranks for g in self.move.groups))
            return f"{self.kind.value} of {self.payload}, {self.move.op.value} from rank {pairs}"
        if isinstance(self.payload, Matrices):
            return f"{self.kind.value} of {self.payload}, {self.move.op.value} among {self.move.members} ranks"
        return f"{self.kind.value} of {self.payload}, {self.move.op.value} over {self.move.members} ranks"


class SentBytes:
    """What has `transfers`, and is asked for the bytes that they send, all ranks together."""

    __slots__ = ()
    transfers: tuple[Transfer, ...]

    @property
    def inter_bytes(self) -> int:
        return sum(t.inter_bytes for t in self.transfers)

    @property
    def intra_bytes(self) -> int:
        return sum(t.intra_bytes for t in self.transfers)

    def cable_bytes(self, node: int) -> int:
        """What `node` sends over its cable in one step."""
        return sum(t.cable_bytes(node) for t in self.transfers)

    def by_kind(self) -> str:
        """One line per kind of transfer."""
        lines = [f"  {'kind':<20} {'calls':>6} {'inside nodes':>16} {'between nodes':>16}"]
        for kind in Kind:
            mine = [t for t in self.transfers if t.kind is kind]
            if mine:
                intra, inter = sum(t.intra_bytes for t in mine), sum(t.inter_bytes for t in mine)
                lines.append(f"  {kind.value:<20} {len(mine):>6} {intra:>16,} {inter:>16,}")
        total = f"{len(self.transfers):>6} {self.intra_bytes:>16,} {self.inter_bytes:>16,}"
        return "\n".join([*lines, f"  {'total':<20} {total}"])


@lru_cache(maxsize=1024)
def _grid(move: GroupCollective, topology: Topology) -> Grid:
    return Grid.of([topology.node_of(rank) for rank in move.groups[0].ranks])


@lru_cache(maxsize=4096)
def _sent_by_all(
    move: GroupCollective, route: str, topology: Topology, parts: int, elements: int, item: int, codec: Codec | None
) -> Sent:
    """By all groups together: inside nodes, and out of each node of the topology."""
    members = move.members
    plain = [_length(elements, members, slot, 1) * item for slot in range(members)]
    gathered = [encoded_slice(codec, elements, members)] * members if codec else plain
    reduced = (
        [_encoded(codec, _length(elements, members, s, codec.grain), parts) for s in range(members)] if codec else plain
    )
    inside, leaving = 0, [0] * topology.nodes
    # Most groups are alike: their members lie on nodes in the same way, and hold their slices in the same order.
    alike: dict[tuple[object, ...], tuple[int, Sent]] = {}
    for group in move.groups:
        nodes = tuple(map(topology.node_of, group.ranks))
        key = (group.slots, tuple(node - nodes[0] for node in nodes))
        if key not in alike:
            grid = Grid.of(nodes)
            sizes = ([nbytes[slot] for slot in group.slots] for nbytes in (gathered, reduced))
            alike[key] = grid.width, sent_bytes(move.op, route, grid, *sizes)
        width, sent = alike[key]
        inside += sent.inside
        for node, nbytes in zip(nodes[::width], sent.leaving, strict=True):
            leaving[node] += nbytes
    return Sent(inside, tuple(leaving))


@lru_cache(maxsize=4096)
def _sent_with_owners(
    move: GroupCollective, topology: Topology, matrices: tuple[Matrix, ...], item: int, codec: Codec | None
) -> Sent:
    inside, leaving = 0, [0] * topology.nodes
    for group in move.groups:
        homes = {slot: topology.node_of(rank) for rank, slot in zip(group.ranks, group.slots, strict=True)}
        by_slot = [homes[slot] for slot in range(len(homes))]
        sent = sent_with_owners(move.op, matrices, by_slot, topology.nodes, item, codec)
        inside += sent.inside
        leaving = [a + b for a, b in zip(leaving, sent.leaving, strict=True)]
    return Sent(inside, tuple(leaving))


def _sent_by_pairs(move: GroupCollective, topology: Topology, message_bytes: int) -> Sent:
    inside, leaving = 0, [0] * topology.nodes
    for group in move.groups:
        source, target = map(topology.node_of, group.ranks)
        if source == target:
            inside += message_bytes
        else:
            leaving[source] += message_bytes
    return Sent(inside, tuple(leaving))


def _length(elements: int, pieces: int, index: int, grain: int) -> int:
    start, end = bounds(elements, pieces, index, grain)
    return end - start


@lru_cache(maxsize=4096)
def _encoded(codec: Codec, length: int, parts: int) -> int:
    """Bytes of a slice whose parts are encoded one by one."""
    return sum(codec.encoded_bytes(_length(length, parts, part, codec.grain)) for part in range(parts))
