"""A pipeline's step as transfers: those of every stage's schedule, and the messages between stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from towpath.core.compression import Compression
from towpath.core.formats import ENCODED, FLOATING
from towpath.core.payload import Activation
from towpath.core.pipeline import Message, Order, messages
from towpath.core.schedule import Schedule
from towpath.core.strategy import Kind
from towpath.core.transfer import SentBytes, Transfer
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
class JobSchedule(SentBytes):
    """Every transfer of one optimizer step, stage by stage, and then the messages between them, rank by rank."""

    topology: Topology
    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        return f"bytes sent by all ranks together\n{self.by_kind()}"


def job_schedule(
    topology: Topology, pipelines: Iterable[Sequence[Stage]], order: Order, compression: Compression
) -> JobSchedule:
    """`pipelines`: of each its stages in order, and then what is sharded by itself over the ranks of several. There are
    as many of them as tensor-parallel ranks."""
    found: list[Transfer] = []
    for stages in pipelines:
        for stage in stages:
            found += [transfer.over(stage.ranks, topology) for transfer in stage.schedule.transfers]
        found += _sends(topology, stages, messages(order), compression)
    return JobSchedule(topology, tuple(found))


def _sends(
    topology: Topology, stages: Sequence[Stage], sent: Iterable[Message], compression: Compression
) -> Iterator[Transfer]:
    for message in sent:
        source, target = stages[message.source], stages[message.target]
        pairs = list(zip(source.ranks, target.ranks, strict=True))
        yield from message_transfers(message, pairs, stages[message.output_of].outputs, topology, compression)


def message_transfers(
    message: Message,
    pairs: Sequence[tuple[int, int]],
    outputs: Sequence[Shape],
    topology: Topology,
    compression: Compression,
) -> Iterator[Transfer]:
    """Of one message, tensor by tensor, between all `pairs` of copies. `outputs`: of the stage `message.output_of`."""
    move = send(pairs)
    kind = Kind.ACTIVATION_GRADIENT if message.backward else Kind.ACTIVATION
    for shape, dtype in outputs:
        payload, wire = Activation(message.source, shape, dtype), wire_for(dtype, compression.of(message))
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
