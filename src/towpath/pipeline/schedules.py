"""The schedules of `torch.distributed.pipelining` as data: the order of passes, and the transfers of a whole job."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from towpath.core.passes import (
    SCHEDULES,
    Await,
    Compression,
    Messages,
    Operation,
    Order,
    PassKind,
    Post,
    RunPass,
    StagePass,
    Walk,
    asked_of_micro_batches,
    message_transfers,
    messages,
    plain_walk,
)
from towpath.core.schedule import Schedule
from towpath.core.transfer import Transfer
from towpath.core.units import StageOutput
from towpath.errors import ShardError
from towpath.observe.totals import SentBytes
from towpath.topology.cluster import Topology


def schedule_class(name: str) -> Any:
    """Return PyTorch's class of a schedule; raise `ShardError` if `name` is unknown. Case does not matter."""
    known = {each.lower(): each for each in SCHEDULES}
    if name.lower() not in known:
        raise ShardError(f"Pipeline: unknown schedule {name!r}; known are {', '.join(SCHEDULES)}.")
    return get_schedule_class(known[name.lower()])


@contextmanager
def batched_by_group() -> Generator[None]:
    """Let schedules post messages of two process groups at once. A batch of PyTorch's has messages of one."""
    batch = schedules._batch_p2p  # pyright: ignore[reportPrivateUsage]

    def by_group(messages: list[dist.P2POp], *of: Any, **named: Any) -> list[dist.Work]:
        # All ranks launch in the order of these names.
        groups = sorted({each.group for each in messages}, key=lambda group: group.group_name)
        return [w for g in groups for w in batch([m for m in messages if m.group is g], *of, **named)]

    schedules._batch_p2p = by_group  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        schedules._batch_p2p = batch  # pyright: ignore[reportPrivateUsage]


def order_of(kind: Any, stages: int, ranks: int, micro_batches: int) -> Order:
    """Return the passes of every rank, in the order of the schedule. Raise `ShardError` for impossible numbers."""
    name = kind.__name__.removeprefix("Schedule")
    if asked := asked_of_micro_batches(name, ranks, micro_batches):
        raise ShardError(f"Pipeline: {name} of {ranks} ranks asks for {asked}; got {micro_batches}.")
    if issubclass(kind, PipelineScheduleSingle):
        return plain_walk(name, ranks, micro_batches)[0]
    planned = _planned(kind, stages, ranks, micro_batches).pipeline_order
    return {rank: [_pass(action) for action in actions if action is not None] for rank, actions in planned.items()}


def walks(schedule: str, ranks: int, micro_batches: int) -> tuple[Order, Walk]:
    """Return the passes and the operations of every rank, for the planner (`towpath.plan.pipelines`)."""
    kind, stages = schedule_class(schedule), SCHEDULES[schedule] * ranks
    if issubclass(kind, PipelineScheduleSingle):
        return plain_walk(schedule, ranks, micro_batches)
    order = order_of(kind, stages, ranks, micro_batches)
    planned, found = _planned(kind, stages, ranks, micro_batches).pipeline_order_with_comms, Messages(order)
    return order, {rank: list(_operations(actions, found)) for rank, actions in planned.items()}


def _operations(actions: Iterable[Any], found: Messages) -> Iterator[Operation]:
    """Yield the operations of one rank, which posts messages where PyTorch does.

    It waits for a message that it receives when it needs it, and at the end for those that it sends.
    """
    sent: list[Operation] = []
    for action in actions:
        # PyTorch's letters: F and B are passes. SEND_F posts what a forward sends, RECV_F what a forward needs.
        match action.computation_type.value.split("_"):
            case ["SEND" | "RECV" as does, _]:
                each = _pass(action)
                message = found.sent_by(each) if does == "SEND" else found.needed_by(each)
                assert message is not None
                sent += [Await(message, sends=True)] if does == "SEND" else []
                yield Post(message, does == "SEND")
            case ["F" | "B"]:
                each = _pass(action)
                if (needed := found.needed_by(each)) is not None:
                    yield Await(needed, sends=False)
                yield RunPass(each)
            case _:  # for FSDP2's modules
                pass
    yield from sent


def _pass(action: Any) -> StagePass:
    kind = PassKind(action.computation_type.value[-1])
    return StagePass(action.stage_index, kind, action.microbatch_index)


def _planned(kind: Any, stages: int, ranks: int, micro_batches: int) -> Any:
    return kind([_StandIn(index, stages, ranks) for index in range(stages // ranks)], micro_batches)


class _StandIn:
    """The attributes of a stage that a schedule reads to plan."""

    submod = nn.Identity()

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, 0
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, True


def owners_of(kind: Any, stages: int, ranks: int, name: str) -> list[int]:
    """Return the rank of the pipeline that has each stage. Raise `ShardError` for impossible numbers."""
    if stages < ranks:
        raise ShardError(f"Pipeline: {stages} stages for {ranks} ranks of the mesh's 'pp'. Cut the model further.")
    if issubclass(kind, PipelineScheduleSingle) and stages != ranks:
        raise ShardError(
            f"Pipeline: {name} has one stage on each rank, and there are {stages} for {ranks} ranks. Take "
            "Interleaved1F1B, or cut the model into as many."
        )
    if ranks == 1 and stages > 1:
        raise ShardError(
            f"Pipeline: {stages} stages for one rank of the mesh's 'pp': expected several ranks. Join the stages into "
            "one, and take 1F1B."
        )
    if stages % ranks:
        raise ShardError(f"Pipeline: {stages} stages do not divide among {ranks} ranks.")
    return [index % ranks for index in range(stages)]


@dataclass(frozen=True, slots=True)
class StageSchedule:
    """One stage of a pipeline job, with its ranks, its own schedule and its outputs.

    `ranks` are numbered as in the topology, in the order of the stage's data-parallel group. `outputs` are the tensors
    that the stage sends to the next one. The last stage has none.
    """

    ranks: tuple[int, ...]
    schedule: Schedule
    outputs: tuple[StageOutput, ...]


@dataclass(frozen=True, slots=True)
class JobSchedule(SentBytes):
    """Every transfer of one optimizer step of a pipeline job.

    For each pipeline, the transfers of its stages come first, then the messages between them, rank by rank. The first
    pipeline also has the gathers of all tensor-parallel ranks.
    """

    topology: Topology
    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        return f"bytes sent by all ranks together\n{self.by_kind()}"


def job_schedule(
    topology: Topology,
    pipelines: Sequence[Sequence[StageSchedule]],
    order: Order,
    compression: Compression,
    walks: int = 1,
) -> JobSchedule:
    """Return the schedule of a job with pipeline stages.

    Args:
        pipelines: One entry for each tensor-parallel rank: the stages of its pipeline in order. Parts of the model that
            are sharded by themselves over the ranks of several stages, such as tied embeddings, follow the stages.
        walks: How many times a step runs the whole order, with gradient accumulation. Default: 1.
    """
    found: list[Transfer] = []
    for stages in pipelines:
        for stage in stages:
            found += [transfer.over(stage.ranks, topology) for transfer in stage.schedule.transfers]
        for message in list(messages(order)) * walks:
            pairs = list(zip(stages[message.source].ranks, stages[message.target].ranks, strict=True))
            outputs = stages[message.output_of].outputs
            peers = list(zip(*(each[message.target].ranks for each in pipelines), strict=True))
            gathering = peers if stages is pipelines[0] else ()
            found += message_transfers(message, pairs, outputs, topology, compression, gathering)
    return JobSchedule(topology, tuple(found))
