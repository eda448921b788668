"""A pipeline's step as transfers: those of every stage's schedule, and the messages between stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from towpath.core.formats import ENCODED, FLOATING
from towpath.core.payload import Activation
from towpath.core.pipeline import Message, Order, messages
from towpath.core.schedule import Schedule
from towpath.core.strategy import Kind
from towpath.core.transfer import Transfer
from towpath.core.transitions import send
from towpath.core.wire import Wire
from towpath.errors import StrategyError
from towpath.topology.cluster import Topology

Shape = tuple[tuple[int, ...], str]  # and the dtype


@dataclass(frozen=True, slots=True)
class Stage:
    """`ranks`: those that hold it, as the job counts them, in the order of its data-parallel group. `outputs`: what it
    hands on, tensor by tensor; of the last stage nothing."""

    ranks: tuple[int, ...]
    schedule: Schedule
    outputs: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Wires:
    """How messages travel: outputs, and gradients, of which only those that are exposed, or all (`every`)."""

    activations: Wire = Wire()
    gradients: Wire = Wire()
    every: bool = False

    def of(self, message: Message) -> Wire:
        if not message.backward:
            return self.activations
        return self.gradients if message.exposed or self.every else Wire()


@dataclass(frozen=True, slots=True)
class JobSchedule:
    """Every transfer of one optimizer step, stage by stage, and then the messages between them, rank by rank."""

    topology: Topology
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

    def __str__(self) -> str:
        """One line per kind of transfer."""
        lines = ["bytes sent by all ranks together"]
        lines.append(f"  {'kind':<20} {'calls':>6} {'inside nodes':>16} {'between nodes':>16}")
        for kind in Kind:
            mine = [t for t in self.transfers if t.kind is kind]
            if mine:
                intra, inter = sum(t.intra_bytes for t in mine), sum(t.inter_bytes for t in mine)
                lines.append(f"  {kind.value:<20} {len(mine):>6} {intra:>16,} {inter:>16,}")
        total = f"{len(self.transfers):>6} {self.intra_bytes:>16,} {self.inter_bytes:>16,}"
        return "\n".join([*lines, f"  {'total':<20} {total}"])


def job_schedule(topology: Topology, stages: Sequence[Stage], order: Order, wires: Wires) -> JobSchedule:
    found: list[Transfer] = []
    for stage in stages:
        found += [transfer.over(stage.ranks, topology) for transfer in stage.schedule.transfers]
    found += _sends(topology, stages, messages(order), wires)
    return JobSchedule(topology, tuple(found))


def _sends(topology: Topology, stages: Sequence[Stage], sent: Iterable[Message], wires: Wires) -> Iterator[Transfer]:
    for message in sent:
        move = send(zip(stages[message.source].ranks, stages[message.target].ranks, strict=True))
        kind = Kind.ACTIVATION_GRADIENT if message.backward else Kind.ACTIVATION
        # What a stage hands on has a gradient of its shape.
        for shape, dtype in stages[min(message.source, message.target)].outputs:
            payload, wire = Activation(message.source, shape, dtype), wire_for(dtype, wires.of(message))
            yield Transfer(kind, payload, move, wire, topology, message.micro_batch)


def wire_for(dtype: str, wire: Wire) -> Wire:
    """Of tensors that stages exchange: numbers that are no floats, such as tokens or masks, travel as they are."""
    if dtype not in FLOATING:
        return Wire()
    if wire.encoding is not None and dtype not in ENCODED:
        raise StrategyError(
            f"stages exchange {dtype}, and the codec {wire.encoding} takes {', '.join(ENCODED)}. Take a precision, or "
            "leave the codec out."
        )
    return wire
