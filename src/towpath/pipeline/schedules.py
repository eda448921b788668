"""The schedules of `torch.distributed.pipelining` as data: the rank of each stage, and the order of passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import Any

from torch import nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)

from towpath.core.pipeline import (
    SCHEDULES,
    Await,
    Message,
    Messages,
    Operation,
    Order,
    PassKind,
    Post,
    Run,
    StagePass,
    Walk,
    as_computed,
    asked_of_micro_batches,
    gpipe,
    gpipe_walk,
    one_forward_one_backward,
    one_forward_one_backward_walk,
)
from towpath.errors import ShardError


def splits_backward(kind: Any) -> bool:
    """Return whether a schedule computes the weights' gradients later than the inputs'."""
    return issubclass(kind, (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble))


def schedule_class(name: str) -> Any:
    """Return PyTorch's class of a schedule; raise `ShardError` if `name` is unknown. Case does not matter."""
    known = {each.lower(): each for each in SCHEDULES}
    if name.lower() not in known:
        raise ShardError(f"Pipeline: unknown schedule {name!r}; known are {', '.join(SCHEDULES)}.")
    return get_schedule_class(known[name.lower()])


def order_of(kind: Any, stages: int, ranks: int, micro_batches: int) -> Order:
    """Return the passes of every rank, in the order of the schedule. Raise `ShardError` for impossible numbers."""
    name = kind.__name__.removeprefix("Schedule")
    if asked := asked_of_micro_batches(name, ranks, micro_batches):
        raise ShardError(f"Pipeline: {name} of {ranks} ranks asks for {asked}; got {micro_batches}.")
    if kind is ScheduleGPipe:
        return gpipe(ranks, micro_batches)
    if kind is Schedule1F1B:
        return one_forward_one_backward(ranks, micro_batches)
    try:
        planned: Any = kind([_StandIn(index, stages, ranks) for index in range(stages // ranks)], micro_batches)
    except (ValueError, RuntimeError) as error:
        raise ShardError(
            f"Pipeline: {kind.__name__} of {stages} stages, {micro_batches} micro-batches: {error}"
        ) from None
    return {rank: list(_passes(actions)) for rank, actions in planned.pipeline_order.items()}


def walk_of(kind: Any, order: Order, stages: int, halved: Set[int]) -> Walk:
    """Return the operations of every rank. The stages in `halved` compute the weights' gradients separately."""
    if kind is ScheduleGPipe:
        return gpipe_walk(order)
    if kind is Schedule1F1B:
        return one_forward_one_backward_walk(order)
    micro_batches = 1 + max(each.micro_batch for passes in order.values() for each in passes)
    planned: Any = kind([_StandIn(index, stages, len(order)) for index in range(stages // len(order))], micro_batches)
    found = Messages(order)
    return {
        rank: list(_operations(actions, found, halved)) for rank, actions in planned.pipeline_order_with_comms.items()
    }


# The pass whose message PyTorch's action posts, and whether it posts the send.
_POSTS = {
    "SEND_F": (PassKind.FORWARD, True),
    "RECV_F": (PassKind.FORWARD, False),
    "SEND_B": (PassKind.BACKWARD, True),
    "RECV_B": (PassKind.BACKWARD, False),
}


def _operations(actions: Iterable[Any], found: Messages, halved: Set[int]) -> Iterator[Operation]:
    """Yield the operations of one rank, which posts messages where PyTorch does.

    It waits for a message that it receives when it needs it, and at the end for those that it sends.
    """
    sent: list[Message] = []
    for action in actions:
        text = action.computation_type.value
        if text in _POSTS:
            kind, sends = _POSTS[text]
            each = StagePass(action.stage_index, kind, action.microbatch_index)
            message = found.sent_by(each) if sends else found.needed_by(each)
            assert message is not None
            sent += [message] if sends else []
            yield Post(message, sends)
        elif text in {kind.value for kind in PassKind}:
            each = StagePass(action.stage_index, PassKind(text), action.microbatch_index)
            if (needed := found.needed_by(each)) is not None:
                yield Await(needed, sends=False)
            for computed in as_computed({0: [each]}, halved)[0]:
                yield Run(computed)
    yield from (Await(message, sends=True) for message in sent)


def walks(schedule: str, ranks: int, micro_batches: int, halved: bool) -> tuple[Order, Walk]:
    """Return the passes and the operations of every rank, for the planner (`towpath.planner.pipelines`).

    `halved` tells whether stages can compute the weights' gradients separately.
    """
    kind, stages = schedule_class(schedule), SCHEDULES[schedule] * ranks
    parts = set(range(stages)) if halved and splits_backward(kind) else set[int]()
    order = as_computed(order_of(kind, stages, ranks, micro_batches), parts)
    return order, walk_of(kind, order, stages, parts)


def _passes(actions: Iterable[Any]) -> Iterator[StagePass]:
    for action in actions:
        for each in () if action is None else (action.sub_actions or (action,)):
            if each.microbatch_index is not None:
                yield StagePass(each.stage_index, PassKind(each.computation_type.value), each.microbatch_index)


class _StandIn:
    """The attributes of a stage that a schedule reads to plan."""

    submod = nn.Identity()

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, 0
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, True


def owners_of(kind: Any, stages: int, ranks: int, name: str) -> list[int]:
    """Return the rank of the pipeline that has each stage. Raise `ShardError` for impossible numbers."""
    if stages < ranks:
        raise ShardError(f"Pipeline: {stages} stages for {ranks} ranks of the mesh's 'pp'. Cut the model further.")
    if issubclass(kind, PipelineScheduleSingle):
        if stages != ranks:
            raise ShardError(
                f"Pipeline: {name} has one stage on each rank, and there are {stages} for {ranks} ranks. Take "
                "Interleaved1F1B, or cut the model into as many."
            )
        return list(range(stages))
    if stages % ranks:
        raise ShardError(f"Pipeline: {stages} stages do not divide among {ranks} ranks.")
    if not issubclass(kind, ScheduleZBVZeroBubble):
        return [index % ranks for index in range(stages)]
    if stages != 2 * ranks:
        raise ShardError(f"Pipeline: {name} has two stages on each rank, and there are {stages} for {ranks} ranks.")
    return [*range(ranks), *reversed(range(ranks))]
