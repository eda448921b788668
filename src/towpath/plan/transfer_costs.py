"""The cost of a transfer on a cluster, as a sequence of phases.

A phase describes the work of one rank and its node. All other ranks do the same work at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2

from towpath.core.costs import PhaseLoad, phases
from towpath.core.formats import Codec, Coding, item_bytes
from towpath.core.placement import Placement
from towpath.core.queues import Communicator
from towpath.core.routes import ALL_TO_ALL, Form, Grid, Op, effective_route, hops_of, parts_of, slice_bytes
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Range
from towpath.plan.hardware import CABLE, INSIDE, PROCESSOR, SPINE, GroupMesh, Hardware, StageLocation
from towpath.topology.cluster import Extent, Topology

# The low-rank codec builds and multiplies its thin factors as fast as memory is read and written. Each of its two
# messages reads the matrices about five times. That costs as much as this many copies of them.
_FACTOR_COPIES, _FACTOR_BYTES = 2.5, 4
# The same for a low-rank message between pipeline stages. The sender adds the earlier error, multiplies twice, and
# subtracts the received value from the sent one. The receiver multiplies once.
_ENCODED_COPIES, _DECODED_COPIES = 4.0, 1.0
# The share of a ring's rate that NCCL's tuner expects of a tree (`busBw * .92` in its tuning.cc).
_TREE_RATE = 0.92


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """The cost of one phase of a transfer."""

    seconds: float  # time in addition to the needs, such as the latency of messages
    needs: Mapping[str, float]  # the amount of each resource
    communicators: tuple[Communicator, ...] = ()  # those whose calls it makes

    @property
    def crosses(self) -> bool:
        """Whether the phase uses the link between nodes."""
        return bool(self.needs.get(CABLE))

    @property
    def beside_device(self) -> PhaseCost:
        """The phase as the host runs it, while the device computes: its work only takes time."""
        needs = {name: need for name, need in self.needs.items() if name != PROCESSOR}
        return replace(self, seconds=self.seconds + self.needs.get(PROCESSOR, 0.0), needs=needs)

    def scaled(self, factor: float) -> PhaseCost:
        """Return the phase with `factor` times its seconds and needs."""
        needs = {name: factor * need for name, need in self.needs.items()}
        return replace(self, seconds=factor * self.seconds, needs=needs)


@dataclass(frozen=True, slots=True)
class TransferShape:
    """The parts of a transfer that determine its cost."""

    op: Op  # the collective operation
    grid: Grid  # nodes and ranks per node of one group
    stride: int  # distance between two nodes of a group
    route: str  # the route of the messages
    parts: int  # number of parts into which slices are cut
    elements: int  # number of elements of a group's buffer
    slice_bytes: float  # bytes of one member's slice, or of the message, as they are sent
    codec: Codec | None  # the codec, if the transport encodes
    factored: int = 0  # elements of the matrices that are sent as low-rank factors
    encoded: bool = False  # whether the gathered shards are stored encoded
    form: Form = Form.MESSAGES  # how the route is executed
    coding: Coding | None = None  # how what crosses nodes is encoded without losing a bit

    @property
    def in_parts(self) -> bool:
        """Whether collectives execute it as an HO-Ring."""
        return self.form is Form.COLLECTIVES and self.route == "ho-ring"

    @staticmethod
    def of(transfer: Transfer) -> TransferShape:
        """Return the shape of a transfer."""
        move, grid, codec = transfer.move, transfer.grid, transfer.transport.encoding
        nodes = [transfer.topology.node_of(rank) for rank in move.groups[0].ranks[:: grid.width]]
        stride = nodes[1] - nodes[0] if len(nodes) > 1 else 1
        if move.op is Op.SEND:
            size = transfer.message_bytes
        else:
            size = slice_bytes(transfer.elements, move.members, item_bytes(transfer.dtype), codec)
        shape = TransferShape(
            move.op, grid, stride, transfer.route, transfer.parts, transfer.elements, size, codec, form=transfer.form
        )
        if not isinstance(transfer.payload, Range):
            return shape
        payload = transfer.payload
        return replace(shape, factored=payload.factored, encoded=payload.encoded, coding=transfer.coding)

    @staticmethod
    def of_move(
        move: MoveShape, transport: Transport, numel: int, dtype: str, form: Form = Form.MESSAGES
    ) -> TransferShape:
        """Return the shape of a collective over a buffer of `numel` elements, without naming its ranks."""
        elements, codec = numel // move.regions, transport.encoding
        coding = transport.coding(move.op, move.grid, elements, dtype, form)
        size = slice_bytes(elements, move.members, item_bytes(dtype), codec)
        route = transport.route_on(move.op, move.grid, form, coding is not None, size)
        parts = parts_of(route, move.grid, size, move.op, form)
        shape = TransferShape(move.op, move.grid, move.stride, route, parts, elements, size, codec, form=form)
        return replace(shape, coding=coding)


def phase_costs(shape: TransferShape, hardware: Hardware) -> tuple[PhaseCost, ...]:
    """Return the phases of a collective, in order."""
    moved = [
        _messages_cost(shape, p, hardware) for p in phases(shape.op, shape.route, shape.grid, shape.parts, shape.form)
    ]
    if shape.codec is None and (tree := _tree_cost(shape, moved, hardware)) is not None:
        moved = min(moved, [tree], key=lambda costs: seconds_alone(costs, hardware))
    # The messages of an encoded gather are those of a gather of as many bytes. Encoded reductions were not measured.
    comparable = shape.codec is None or shape.op is Op.ALL_GATHER
    if (measured := hardware.measured) is not None and measured.topology == hardware.topology and comparable:
        size = shape.slice_bytes * shape.grid.nodes * shape.grid.width
        # The probe measures the calls of an HO-Ring one after the other.
        route = "hierarchical" if shape.in_parts else shape.route
        ratio = measured.ratio(shape.op, GroupMesh(shape.grid, shape.stride), route, size)
        moved = [cost.scaled(ratio) for cost in moved]
    costs = list(moved)
    if shape.coding is not None:
        before, after = _message_coding_costs(shape, shape.coding, hardware)
        costs = [before, *moved, after]
    elif shape.codec is not None:
        # Coding comes before the first messages, between hops, and after the last messages.
        before, *between, after = _coding_costs(shape, shape.codec, hardware)
        costs, between = [before], between[: len(moved) - 1]
        for index, cost in enumerate(moved):
            costs += [cost, *between[index : index + 1]]
        costs.append(after)
    if shape.factored:
        copied = _FACTOR_COPIES * shape.factored * _FACTOR_BYTES
        costs.insert(0, _working(copied / hardware.memory_rate, hardware))
    return tuple(cost for cost in costs if cost.seconds or any(cost.needs.values()))


def _working(seconds: float, hardware: Hardware) -> PhaseCost:
    """Return a phase in which the processor works."""
    return PhaseCost(0.0, {PROCESSOR: hardware.processor(seconds)})


def seconds_alone(costs: Iterable[PhaseCost], hardware: Hardware) -> float:
    """Return the seconds of phases that run one after the other, while nothing else runs."""
    return sum(
        cost.seconds + max((n / hardware.capacities[r] for r, n in cost.needs.items()), default=0.0) for cost in costs
    )


def message_cost(transfer: Transfer, hardware: Hardware, source: StageLocation, target: StageLocation) -> PhaseCost:
    """Return the cost of a message between two stages, with those of all other copies of the stages.

    The message arrives as it is sent: still encoded, if it is.
    """
    size = transfer.message_bytes
    crosses = source.node != target.node
    link = hardware.inter if crosses else hardware.intra
    needs: dict[str, float] = {source.names[INSIDE][0]: size}
    if crosses:
        leaving, entering = source.names[CABLE][0], target.names[CABLE][1]
        needs = {leaving: size * source.ranks_on_node, entering: size * target.ranks_on_node}
    if hardware.racks is not None and source.rack != target.rack:
        needs |= {source.names[SPINE][0]: size * source.ranks_on_node}
        needs |= {target.names[SPINE][1]: size * target.ranks_on_node}
    work = (size * link.work + link.message_work) / 2  # at each end
    for end in (source, target) if work else ():
        (processor,) = end.names[PROCESSOR]
        needs[processor] = needs.get(processor, 0.0) + end.ranks_on_host * work
    return PhaseCost(link.latency + link.message, needs)


def encoding_seconds(transfer: Transfer, hardware: Hardware) -> float:
    """Return the seconds in which one member encodes its slice before a parameter sync whose sizes ranks agree on."""
    return transfer.elements / transfer.move.members / hardware.codec_speed(transfer.encoding).encode


def coding_seconds(transfer: Transfer, hardware: Hardware, *, encodes: bool) -> float:
    """Return the seconds that one end of a message between stages needs to encode it, or to decode it."""
    codec = transfer.transport.encoding
    if codec is not None:
        speed = hardware.codec_speed(codec.name)
        return transfer.elements / (speed.encode if encodes else speed.decode)
    if transfer.transport.low_rank is None or transfer.message_bytes >= transfer.elements * item_bytes(transfer.dtype):
        return 0.0
    copied = (_ENCODED_COPIES if encodes else _DECODED_COPIES) * transfer.elements * item_bytes(transfer.dtype)
    return copied / hardware.memory_rate


def _messages_cost(shape: TransferShape, phase: PhaseLoad, hardware: Hardware) -> PhaseCost:
    """Return the cost of the messages of one phase. In a reduction, the receiver also adds."""
    op, grid = shape.op, shape.grid
    groups = hardware.topology.ranks_per_node // grid.width if op is not Op.SEND else 1
    cable, inside = phase.leaving * shape.slice_bytes * groups, phase.inside * shape.slice_bytes
    if shape.coding is not None:
        share = shape.coding.share
        cable *= share
        inside *= share if op is Op.ALL_GATHER else 1.0  # a parameter sync stays encoded inside nodes
    used = [link for link, sent in ((hardware.inter, phase.leaving), (hardware.intra, phase.inside)) if sent]
    latency = max((link.latency for link in used), default=0.0)
    messages = phase.messages_out * hardware.inter.message + phase.messages_inside * hardware.intra.message
    nodes = hardware.ranks_sharing / hardware.topology.ranks_per_node
    work = cable * nodes * hardware.inter.work + inside * hardware.ranks_sharing * hardware.intra.work
    work += hardware.ranks_sharing * phase.messages_out * hardware.inter.message_work
    work += hardware.ranks_sharing * phase.messages_inside * hardware.intra.message_work
    if op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE) and shape.codec is None:
        received = (phase.leaving / grid.width + phase.inside) * shape.slice_bytes
        work += hardware.processor(received / hardware.sum_rate)
    needs = {CABLE: cable, INSIDE: inside, PROCESSOR: work}
    if hardware.racks is not None:
        needs[SPINE] = cable * share_leaving_racks(shape.route, grid.nodes, shape.stride, hardware.topology)
    needed = {name: amount for name, amount in needs.items() if amount}
    seconds = phase.rounds * latency + messages
    if shape.in_parts and not phase.leaving:  # other parts are copied while one crosses
        seconds += shape.slice_bytes * grid.nodes * grid.width / shape.parts / hardware.memory_rate
    return PhaseCost(seconds, needed)


def _message_coding_costs(shape: TransferShape, coding: Coding, hardware: Hardware) -> tuple[PhaseCost, PhaseCost]:
    """Return the cost of encoding what crosses nodes, and of decoding what arrives."""
    members, speed = shape.grid.nodes * shape.grid.width, hardware.codec_speed(coding.codec)
    if shape.op is Op.ALL_GATHER:  # each member encodes its slice once, and decodes those of all others
        sent, received = shape.elements / members, shape.elements * (members - 1) / members
        if shape.form is Form.COLLECTIVES:  # encoded before the ranks agree on sizes
            sent = 0.0
    else:
        each = phases(shape.op, shape.route, shape.grid, shape.parts, shape.form)
        sent = received = sum(p.leaving for p in each) / shape.grid.width * shape.elements / members
    return _working(sent / speed.encode, hardware), _working(received / speed.decode, hardware)


def _tree_cost(shape: TransferShape, ring: Sequence[PhaseCost], hardware: Hardware) -> PhaseCost | None:
    """Return the cost of NCCL's all-reduce along a tree, given that of its ring, or None if it has no tree.

    NCCL connects the ranks of a node by a chain and the nodes by a tree, and goes through both twice. This has fewer
    latencies than a ring, so it is faster for small sums. Gathers and reduce-scatters are always rings.
    """
    grid = shape.grid
    if (shape.op, shape.form) != (Op.ALL_REDUCE, Form.COLLECTIVES) or grid.nodes == 1:
        return None
    if effective_route(shape.route, grid, shape.op, shape.form) != "flat":
        return None
    needs: dict[str, float] = {}
    for cost in ring:
        for name, need in cost.needs.items():
            needs[name] = needs.get(name, 0.0) + need / (1.0 if name == PROCESSOR else _TREE_RATE)
    latency = (grid.width - 1) * hardware.intra.latency + ceil(log2(grid.nodes)) * hardware.inter.latency
    return PhaseCost(2 * latency + hardware.inter.message, needs)


def _coding_costs(shape: TransferShape, codec: Codec, hardware: Hardware) -> Iterator[PhaseCost]:
    """Yield the coding around and between hops. A receiver decodes and sums."""
    speed = hardware.codec_speed(codec.name)

    def cost(encoded: float, decoded: float) -> PhaseCost:
        return _working(encoded / speed.encode + decoded / speed.decode, hardware)

    elements, members = shape.elements, shape.grid.nodes * shape.grid.width
    if shape.op in (Op.ALL_GATHER, Op.SEND):
        own = elements / members if shape.op is Op.ALL_GATHER else elements
        yield cost(0 if shape.encoded else own, 0)
        yield cost(0, elements)
        return
    hops = hops_of(shape.route, shape.grid) or (members,)
    carried = float(elements)
    yield cost(carried, 0)
    for hop, size in enumerate(hops):
        last = hop == len(hops) - 1
        encodes = not (last and shape.op is Op.REDUCE_SCATTER)
        yield cost(carried / size if encodes else 0.0, carried)
        carried /= size
    if shape.op is Op.ALL_REDUCE:
        yield cost(0, elements)  # the result of the gather that follows


# These functions describe the collectives of a placement without naming ranks. They give the operation, the shape of
# the groups, and how far apart a group's nodes are.
#
# `transitions` lists every rank of every group. That is slow for thousands of ranks, and the planner does not need it
# to estimate the cost of a transfer. A test checks that both agree.


_ONE = Extent(1)


@dataclass(frozen=True, slots=True)
class MoveShape:
    """The shape of one collective that several groups run at the same time."""

    op: Op
    # How many regions the flat buffer is divided into. Each group works on one of them.
    regions: int
    grid: Grid  # the members of each group
    # The distance between the nodes of a group. It is 1 if the group has one node.
    stride: int

    @property
    def members(self) -> int:
        return self.grid.nodes * self.grid.width


@lru_cache(maxsize=4096)
def move_shapes(placement: Placement, topology: Topology) -> dict[TransferKind, tuple[MoveShape, ...]]:
    """Return the shapes of the collectives of each kind, in the order in which they run."""
    params, grads, optimizer = placement.params, placement.grads, placement.optimizer
    backward = placement.backward_params or params
    return {
        TransferKind.GATHER: _collectives_between(Op.ALL_GATHER, _ONE, params),
        TransferKind.BACKWARD_GATHER: _collectives_between(Op.ALL_GATHER, _ONE, backward),
        TransferKind.REDUCE: _collectives_between(Op.REDUCE_SCATTER, _ONE, grads),
        TransferKind.GRAD_SYNC: _collectives_between(Op.REDUCE_SCATTER, grads, optimizer)
        + _collectives_between(Op.ALL_REDUCE, optimizer, topology.whole),
        TransferKind.PARAM_SYNC: _collectives_between(Op.ALL_GATHER, params, optimizer),
        TransferKind.UNUSED_PARAMS: _collectives_between(Op.ALL_REDUCE, _ONE, topology.whole),
    }


def _collectives_between(op: Op, coarse: Extent, fine: Extent) -> tuple[MoveShape, ...]:
    """Return the collective among the ranks of one fine copy that share a coarse slice, if these are several."""
    grid = Grid(fine.nodes // coarse.nodes, fine.local // coarse.local)
    return () if coarse == fine else (MoveShape(op, coarse.size, grid, coarse.nodes if grid.nodes > 1 else 1),)


@lru_cache(maxsize=4096)
def share_leaving_racks(route: str, nodes: int, stride: int, topology: Topology) -> float:
    """Return how many times what one node sends leaves the rack that sends most.

    All groups of `nodes` nodes run the same collective at the same time, and all nodes send equally much.

    Args:
        nodes: The number of nodes of each group.
        stride: The distance between the nodes of a group.
    """
    leaving = [0.0] * topology.racks
    for node in range(topology.nodes):
        place, first = node // stride % nodes, node - node // stride % nodes * stride
        others = (place + 1,) if route not in ALL_TO_ALL else (other for other in range(nodes) if other != place)
        targets = [topology.rack_of(first + other % nodes * stride) for other in others] if nodes > 1 else []
        rack = topology.rack_of(node)
        leaving[rack] += sum(target != rack for target in targets) / max(1, len(targets))
    return max(leaving)
