"""A rank's way through a pipeline's step: when it computes what, posts which message, and waits for which.

As torch.distributed.pipelining does it. A message moves once both ends have posted it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from towpath.core.pipeline import (
    Message,
    Order,
    PassKind,
    StagePass,
    gpipe,
    messages,
    one_forward_one_backward,
    owners,
)


@dataclass(frozen=True, slots=True)
class Run:
    """Compute a pass."""

    stage_pass: StagePass


@dataclass(frozen=True, slots=True)
class Post:
    """Let a message be sent, or be received, as soon as the other end does."""

    message: Message
    sends: bool


@dataclass(frozen=True, slots=True)
class Await:
    """Until a message has been sent, or received."""

    message: Message
    sends: bool


Operation = Run | Post | Await
# By rank of the pipeline, in the order in which it does them.
Walk = Mapping[int, Sequence[Operation]]


class Messages:
    """Those of an order, by the pass that sends them, and by the pass that needs them."""

    def __init__(self, order: Order) -> None:
        homes = owners(order)
        self._sent: dict[tuple[int, bool, int], Message] = {}
        self._needed: dict[tuple[int, bool, int], Message] = {}
        for each in messages(order):
            assert homes[each.source] != homes[each.target]
            self._sent[each.source, each.backward, each.micro_batch] = each
            self._needed[each.target, each.backward, each.micro_batch] = each

    def sent_by(self, each: StagePass) -> Message | None:
        if each.kind is PassKind.WEIGHT_GRADIENTS:
            return None
        return self._sent.get((each.stage, each.kind is not PassKind.FORWARD, each.micro_batch))

    def needed_by(self, each: StagePass) -> Message | None:
        if each.kind is PassKind.WEIGHT_GRADIENTS:
            return None
        return self._needed.get((each.stage, each.kind is not PassKind.FORWARD, each.micro_batch))


def plain_walk(schedule: str, ranks: int, micro_batches: int, halved: bool = False) -> tuple[Order, Walk]:
    """Of the two schedules that have one stage on each rank; neither halves its backward passes, even where stages
    could. The others are PyTorch's to plan (`towpath.pipeline.schedules.walks`)."""
    if schedule == "GPipe":
        order = gpipe(ranks, micro_batches)
        return order, gpipe_walk(order)
    assert schedule == "1F1B", schedule
    order = one_forward_one_backward(ranks, micro_batches)
    return order, one_forward_one_backward_walk(order)


def gpipe_walk(order: Order) -> Walk:
    """What is sent is waited for when all passes of its kind are computed."""
    return {rank: list(_gpipe(passes, Messages(order))) for rank, passes in order.items()}


def _gpipe(passes: Sequence[StagePass], found: Messages) -> Iterator[Operation]:
    for forward in (True, False):
        sent: list[Message] = []
        for each in passes:
            if (each.kind is PassKind.FORWARD) is forward:
                yield from _received(found.needed_by(each))
                yield Run(each)
                if (message := found.sent_by(each)) is not None:
                    sent.append(message)
                    yield Post(message, sends=True)
        yield from (Await(message, sends=True) for message in sent)


def one_forward_one_backward_walk(order: Order) -> Walk:
    """Before the first backward pass, a message is waited for when the next is to be sent. Then each is waited for with
    what is needed next; and behind the last forward pass as before the first backward pass."""
    return {rank: list(_walk_1f1b(passes, Messages(order))) for rank, passes in order.items()}


def _walk_1f1b(passes: Sequence[StagePass], found: Messages) -> Iterator[Operation]:
    under_way: Message | None = None
    for index, each in enumerate(passes):
        following = passes[index + 1] if index + 1 < len(passes) else None
        if index == 0:
            yield from _received(found.needed_by(each))
        yield Run(each)
        yield from _sent(under_way)
        turns = following is not None and (following.kind is PassKind.FORWARD) is not (each.kind is PassKind.FORWARD)
        message = found.sent_by(each)
        needed = found.needed_by(following) if following is not None else None
        if message is not None:
            yield Post(message, sends=True)
        if needed is not None:
            yield Post(needed, sends=False)
        if turns:
            yield from _sent(message)
        under_way = None if turns else message
        if needed is not None:
            yield Await(needed, sends=False)
    yield from _sent(under_way)


def _received(message: Message | None) -> Iterator[Operation]:
    if message is not None:
        yield Post(message, sends=False)
        yield Await(message, sends=False)


def _sent(message: Message | None) -> Iterator[Operation]:
    if message is not None:
        yield Await(message, sends=True)
