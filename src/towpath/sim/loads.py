"""What a transfer needs, phase by phase: of the cable, of the links inside its node, of the processor.

A phase is what one rank and its node have to do; all others do the same at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from towpath.core.formats import Codec, item_bytes
from towpath.core.routes import Grid, Op, Phase, hops_of, parts_of, phases, slice_bytes
from towpath.core.strategy import MoveShape
from towpath.core.transfer import Activation, Range, Transfer
from towpath.core.transport import Transport
from towpath.errors import StrategyError
from towpath.sim.hardware import CABLE, INSIDE, PROCESSOR, SPINE, CodecSpeed, Hardware
from towpath.sim.place import Place

# Thin factors are made and multiplied as fast as memory is read and written: of each of its two messages the matrices
# are gone through about five times, which is as much as so many copies of them.
_FACTOR_COPIES, _FACTOR_BYTES = 2.5, 4
# The same of a message between stages: who sends adds what was missed before, multiplies twice, and subtracts what
# arrives from what was sent; who receives multiplies once.
_ENCODED_COPIES, _DECODED_COPIES = 4.0, 1.0


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """`seconds`: what it takes beside what its needs take, such as the latencies of its messages; `busy_seconds`: what
    more it takes while the processors compute."""

    seconds: float
    needs: Mapping[str, float]
    busy_seconds: float = 0.0

    @property
    def crosses(self) -> bool:
        return bool(self.needs.get(CABLE))


@dataclass(frozen=True, slots=True)
class TransferShape:
    """A transfer, as far as its cost goes: what its groups look like, and how much goes by which route.

    `slice_bytes`: of one member's slice, or of the message, as it travels; `stride`: a group's nodes are so far apart;
    `factored`: elements of the matrices that it brings factors of; `encoded`: what is gathered rests so.
    """

    op: Op
    grid: Grid
    stride: int
    route: str
    parts: int
    elements: int
    slice_bytes: float
    codec: Codec | None
    factored: int = 0
    encoded: bool = False

    @property
    def members(self) -> int:
        return self.grid.nodes * self.grid.width

    @staticmethod
    def of(transfer: Transfer) -> TransferShape:
        move, grid, codec = transfer.move, transfer.grid, transfer.transport.encoding
        nodes = [transfer.topology.node_of(rank) for rank in move.groups[0].ranks[:: grid.width]]
        stride = nodes[1] - nodes[0] if len(nodes) > 1 else 1
        if isinstance(transfer.payload, Activation):
            size = transfer.message_bytes
        else:
            size = slice_bytes(transfer.elements, move.members, item_bytes(transfer.dtype), codec)
        shape = TransferShape(move.op, grid, stride, transfer.route, transfer.parts, transfer.elements, size, codec)
        if not isinstance(transfer.payload, Range):
            return shape
        return replace(shape, factored=transfer.payload.factored, encoded=transfer.payload.encoded)

    @staticmethod
    def of_move(move: MoveShape, transport: Transport, numel: int, dtype: str) -> TransferShape:
        """Of a buffer of `numel`, without its ranks."""
        elements, codec = numel // move.regions, transport.encoding
        route = transport.route_on(move.op, move.grid)
        size = slice_bytes(elements, move.members, item_bytes(dtype), codec)
        parts = parts_of(route, move.grid, size)
        return TransferShape(move.op, move.grid, move.stride, route, parts, elements, size, codec)


def loads_of(shape: TransferShape, hardware: Hardware) -> tuple[PhaseCost, ...]:
    """In their order."""
    return tuple(load for load in _loads(shape, hardware) if load.seconds or any(load.needs.values()))


def seconds_alone(loads: Iterable[PhaseCost], hardware: Hardware) -> float:
    """One after the other, while nothing else goes on."""
    return sum(
        load.seconds + max((n / hardware.capacities[r] for r, n in load.needs.items()), default=0.0) for load in loads
    )


def message_load(transfer: Transfer, hardware: Hardware, source: Place, target: Place) -> PhaseCost:
    """Of a message from one stage to the next, with those of all other copies; by the names of the two places. It
    arrives as it is sent: encoded, if it is."""
    size = transfer.message_bytes
    crosses = source.node != target.node
    link = hardware.inter if crosses else hardware.intra
    needs: dict[str, float] = {source.inside: size}
    if crosses:
        needs = {source.leaving: size * source.ranks_on_node, target.entering: size * target.ranks_on_node}
    work = (size * link.work + link.message_work) / 2  # at each end
    for place in (source, target) if work else ():
        needs[place.processor] = needs.get(place.processor, 0.0) + place.ranks_on_host * work
    return PhaseCost(link.latency + link.message, needs, link.busy_latency)


def matrices_load(transfer: Transfer, hardware: Hardware) -> PhaseCost:
    """Of pieces of matrices on their way to owners, or back: as if every node, and every rank, sent as much."""
    topology, grid = transfer.topology, transfer.grid
    cable, inside = transfer.inter_bytes / topology.nodes, transfer.intra_bytes / topology.world
    used = [link for link, sent in ((hardware.inter, cable), (hardware.intra, inside)) if sent]
    nodes = hardware.ranks_sharing / topology.ranks_per_node
    work = cable * nodes * hardware.inter.work + inside * hardware.ranks_sharing * hardware.intra.work
    if transfer.transport.encoding is not None:
        speed = _speed_of(transfer.transport.encoding, hardware)
        coded = transfer.elements / (grid.nodes * grid.width)
        work += hardware.processor(coded / speed.encode + coded / speed.decode)
    latency = max((link.latency + link.message for link in used), default=0.0)
    needs = {name: amount for name, amount in ((CABLE, cable), (INSIDE, inside), (PROCESSOR, work)) if amount}
    return PhaseCost(latency, needs, max((link.busy_latency for link in used), default=0.0))


def coding_seconds(transfer: Transfer, hardware: Hardware, *, encodes: bool) -> float:
    """Of a message between stages, at one of its ends."""
    codec = transfer.transport.encoding
    if codec is not None:
        speed = _speed_of(codec, hardware)
        return transfer.elements / (speed.encode if encodes else speed.decode)
    if transfer.transport.low_rank is None or transfer.message_bytes >= transfer.elements * item_bytes(transfer.dtype):
        return 0.0
    copied = (_ENCODED_COPIES if encodes else _DECODED_COPIES) * transfer.elements * item_bytes(transfer.dtype)
    return copied / hardware.memory_rate


def decoding_seconds(codec: Codec, elements: int, hardware: Hardware) -> float:
    """Of what rests encoded, where nothing has to be gathered."""
    return elements / _speed_of(codec, hardware).decode


def _loads(shape: TransferShape, hardware: Hardware) -> Iterator[PhaseCost]:
    moves = [_moved(shape, p, hardware) for p in phases(shape.op, shape.route, shape.grid, shape.parts)]
    if shape.factored:
        copied = _FACTOR_COPIES * shape.factored * _FACTOR_BYTES
        yield PhaseCost(0.0, {PROCESSOR: hardware.processor(copied / hardware.memory_rate)})
    if shape.codec is None:
        yield from moves
        return
    # What is encoded or decoded comes before, between and after what moves.
    before, *between, after = _coded(shape, shape.codec, hardware)
    yield before
    for index, load in enumerate(moves):
        yield load
        if index < len(between) and index < len(moves) - 1:
            yield between[index]
    yield after


def _moved(shape: TransferShape, phase: Phase, hardware: Hardware) -> PhaseCost:
    """The messages of one phase. A reduction adds what arrives."""
    op, grid = shape.op, shape.grid
    groups = hardware.topology.ranks_per_node // grid.width if op is not Op.SEND else 1
    cable, inside = phase.leaving * shape.slice_bytes * groups, phase.inside * shape.slice_bytes
    used = [link for link, sent in ((hardware.inter, phase.leaving), (hardware.intra, phase.inside)) if sent]
    latency = max((link.latency for link in used), default=0.0)
    busy = max((link.busy_latency for link in used), default=0.0)
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
        needs[SPINE] = cable * _share_leaving_racks(shape, hardware)
    needed = {name: amount for name, amount in needs.items() if amount}
    return PhaseCost(phase.rounds * latency + messages, needed, phase.rounds * busy)


def _share_leaving_racks(shape: TransferShape, hardware: Hardware) -> float:
    """How many cables' worth leaves a rack."""
    assert hardware.racks is not None
    size, nodes = hardware.racks.nodes, shape.grid.nodes
    together = max(1, min(nodes, size // shape.stride))  # of a group's nodes, in one rack
    if together == nodes:
        return 0.0
    if hops_of(shape.route, shape.grid):  # straight to each of them
        return size * (nodes - together) / (nodes - 1)
    return size / together  # of a ring's nodes in a rack, the last one sends out of it


def _coded(shape: TransferShape, codec: Codec, hardware: Hardware) -> Iterator[PhaseCost]:
    """Encoding and decoding, around and between hops; what arrives is decoded and summed."""
    speed = _speed_of(codec, hardware)

    def load(encoded: float, decoded: float) -> PhaseCost:
        seconds = encoded / speed.encode + decoded / speed.decode
        return PhaseCost(0.0, {PROCESSOR: hardware.processor(seconds)})

    elements = shape.elements
    if shape.op in (Op.ALL_GATHER, Op.SEND):
        own = elements / shape.members if shape.op is Op.ALL_GATHER else elements
        yield load(0 if shape.encoded else own, 0)
        yield load(0, elements)
        return
    hops = hops_of(shape.route, shape.grid) or (shape.members,)
    carried = float(elements)
    yield load(carried, 0)
    for hop, size in enumerate(hops):
        last = hop == len(hops) - 1
        again = not (last and shape.op is Op.REDUCE_SCATTER)
        yield load(carried / size if again else 0.0, carried)
        carried /= size
    if shape.op is Op.ALL_REDUCE:
        yield load(0, elements)  # what the gather after it brought


def _speed_of(codec: Codec, hardware: Hardware) -> CodecSpeed:
    speed = hardware.codec_speed(codec.name)
    if speed is None:
        known = ", ".join(name for name, _ in hardware.codecs) or "none"
        raise StrategyError(
            f"the cluster's description has no speed of the codec {codec.name}; it has {known}. Probe the cluster with "
            "it, or describe it under [codecs]."
        )
    return speed
