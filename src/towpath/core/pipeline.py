"""A pipeline as data: in which order each rank computes which passes, and which messages go between stages.

A pass is of one stage and one micro-batch: forward; backward, whole or in two halves. Between neighbouring stages on
different ranks each forward pass sends its output on, and each backward pass its input's gradient back. Such a gradient
is *exposed* if the rank that sends it has no forward pass left to compute meanwhile: the stages before it then wait for
nothing else (Optimus-CC's epilogue, for any schedule). Both ends know the whole order, so no flag travels.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import ceil
from typing import Any

from towpath.core.routes import Op
from towpath.core.strategy import GRADIENTS, Strategy
from towpath.core.wire import LOW_RANK, LowRank, Wire
from towpath.errors import StrategyError

# By name, as torch.distributed.pipelining knows them: how many stages each rank has.
SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "LoopedBFS": 2,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
}


# What a schedule asks of the number of micro-batches, in words, and whether so many of ranks and of them have it. All
# others take any.
_ASKED: dict[str, tuple[str, Callable[[int, int], bool]]] = {
    "1F1B": ("at least as many micro-batches as ranks", lambda ranks, count: count >= ranks),
    **dict.fromkeys(
        ("Interleaved1F1B", "InterleavedZeroBubble"),
        (
            "equal rounds of micro-batches, as a multiple of the ranks gives",
            lambda ranks, count: count % max(1, count // ranks) == 0,
        ),
    ),
}


def asked_of_micro_batches(schedule: str, ranks: int, micro_batches: int) -> str:
    """What the schedule asks for, if so many micro-batches are not that."""
    words, has_it = _ASKED.get(schedule, ("", lambda ranks, count: True))
    return "" if has_it(ranks, micro_batches) else words


class PassKind(StrEnum):
    """Written as torch.distributed.pipelining does."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENTS = "I"  # a backward pass without those of the weights
    WEIGHT_GRADIENTS = "W"


@dataclass(frozen=True, slots=True)
class StagePass:
    stage: int
    kind: PassKind
    micro_batch: int


# By rank of the pipeline, in the order in which it computes them.
Order = Mapping[int, Sequence[StagePass]]


@dataclass(frozen=True, slots=True)
class Message:
    """What the forward or backward pass of `source` hands to the stage `target`, on another rank."""

    source: int
    target: int
    micro_batch: int
    exposed: bool = False

    @property
    def backward(self) -> bool:
        return self.target < self.source

    @property
    def output_of(self) -> int:
        """The stage whose outputs it has, or their gradients, which are of the same shapes."""
        return min(self.source, self.target)


def owners(order: Order) -> dict[int, int]:
    """By stage, the rank that has it."""
    return {each.stage: rank for rank, passes in order.items() for each in passes}


def messages(order: Order) -> Iterator[Message]:
    """Rank by rank, in the order in which each sends them."""
    homes = owners(order)
    for rank, passes in order.items():
        forwards_left = sum(each.kind is PassKind.FORWARD for each in passes)
        for each in passes:
            forwards_left -= each.kind is PassKind.FORWARD
            target = _target(each)
            if target is not None and homes.get(target, rank) != rank:
                exposed = target < each.stage and not forwards_left
                yield Message(each.stage, target, each.micro_batch, exposed)


def _target(each: StagePass) -> int | None:
    match each.kind:
        case PassKind.FORWARD:
            return each.stage + 1
        case PassKind.BACKWARD | PassKind.INPUT_GRADIENTS:
            return each.stage - 1
        case PassKind.WEIGHT_GRADIENTS:
            return None


def as_computed(order: Order, halved: Set[int]) -> Order:
    """Of a schedule that would compute the weights' gradients later: the stages in `halved` do. The others compute all
    at once, where those of the inputs are wanted; the first stage, whose inputs want none, where those of the weights
    are."""
    return {rank: list(_as_computed(passes, halved)) for rank, passes in order.items()}


def _as_computed(passes: Sequence[StagePass], halved: Set[int]) -> Iterator[StagePass]:
    for each in passes:
        later = each.stage in halved
        match each.kind:
            case PassKind.INPUT_GRADIENTS if not later:
                yield replace(each, kind=PassKind.BACKWARD)
            case PassKind.WEIGHT_GRADIENTS if later and not each.stage:
                yield replace(each, kind=PassKind.BACKWARD)
            case PassKind.INPUT_GRADIENTS | PassKind.WEIGHT_GRADIENTS:
                if later and each.stage:
                    yield each
            case _:
                yield each


def gpipe(ranks: int, micro_batches: int) -> Order:
    """All forward passes, then all backward passes."""
    return {
        rank: [
            StagePass(rank, part, each)
            for part in (PassKind.FORWARD, PassKind.BACKWARD)
            for each in range(micro_batches)
        ]
        for rank in range(ranks)
    }


def one_forward_one_backward(ranks: int, micro_batches: int) -> Order:
    """1F1B: as many forward passes as stages follow, this one among them; then in turns."""
    return {rank: list(_one_forward_one_backward(rank, ranks, micro_batches)) for rank in range(ranks)}


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> Iterator[StagePass]:
    ahead = min(micro_batches, ranks - rank)
    for each in range(ahead):
        yield StagePass(rank, PassKind.FORWARD, each)
    for each in range(micro_batches):
        yield StagePass(rank, PassKind.BACKWARD, each)
        if each + ahead < micro_batches:
            yield StagePass(rank, PassKind.FORWARD, each + ahead)


def balanced(weights: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Where each of `count` rows of neighbours begins and ends, so that the heaviest is as light as can be."""
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {(0, 0): (0, ())}
    for rows in range(1, count + 1):
        for end in range(rows, len(weights) + 1):
            found = [
                (max(best[rows - 1, start][0], sums[end] - sums[start]), (*best[rows - 1, start][1], end))
                for start in range(rows - 1, end)
                if (rows - 1, start) in best
            ]
            best[rows, end] = min(found)
    ends = best[count, len(weights)][1]
    return list(zip((0, *ends[:-1]), ends, strict=True))


def most_in_flight(passes: Sequence[StagePass]) -> int:
    """How many micro-batches a rank keeps activations of at the same time, over all its stages."""
    most = now = 0
    for each in passes:
        now += each.kind is PassKind.FORWARD
        most = max(most, now)
        now -= each.kind in (PassKind.BACKWARD, PassKind.WEIGHT_GRADIENTS)
    return most


# --- pipeline walk ----------------------------------------------------------------------------------------------------
#
# A rank's way through a pipeline's step: when it computes what, posts which message, and waits for which.
#
# As torch.distributed.pipelining does it. A message moves once both ends have posted it.


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


# --- compression ------------------------------------------------------------------------------------------------------
#
# What of a pipeline travels compressed (Optimus-CC): between stages, of tied embeddings, and inside stages.


@dataclass(frozen=True, slots=True)
class Compression:
    """Each of the first three is a codec's text, or a `Wire`; of 'low-rank:16' what a message misses is added to the
    next one, unless the `Wire` says otherwise.

    `activation_gradients`: what stages send back, where it is exposed (`core/pipeline.py`), or all of it
    (`every_gradient`). `activations`: what they hand on. `gradients`: how the data-parallel ranks of a stage bring
    theirs together, in the first stages of the pipeline, a `share_of_stages` of all; the others do it as their strategy
    says. `fused_embeddings`: the gradients of tied embeddings come together in one sum over the ranks of both ends;
    else first in each end, and then between the two.
    """

    activation_gradients: Any = "none"
    activations: Any = "none"
    gradients: Any = "none"
    every_gradient: bool = False
    share_of_stages: float = 0.75
    fused_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in ("activation_gradients", "activations", "gradients"):
            wire = getattr(self, name)
            if not isinstance(wire, Wire):
                wire = Wire(codec=wire, feedback="first" if str(wire).startswith(LOW_RANK) else "none")
                object.__setattr__(self, name, wire)
            if name != "gradients":
                wire.check(Op.SEND, f"Compression: {name}")
            elif wire.codec != "none" and not isinstance(wire.codec, LowRank):
                raise StrategyError(
                    f"Compression: gradients takes low rank, such as 'low-rank:4'; got {wire.codec}. Codecs of blocks "
                    "belong to the strategy."
                )
        if not 0 < self.share_of_stages <= 1:
            raise StrategyError(f"Compression: share_of_stages is above 0 and at most 1; got {self.share_of_stages!r}.")

    @property
    def _wires(self) -> dict[str, Wire]:
        return {name: getattr(self, name) for name in ("activation_gradients", "activations", "gradients")}

    @property
    def changes(self) -> set[int]:
        """The optimizer steps at which a codec begins or ceases to serve."""
        return {step for wire in self._wires.values() for step in wire.changes}

    def at(self, step: int) -> Compression:
        """Return the compression of optimizer step `step`, counted from 0."""
        return replace(self, **{name: wire.at(step) for name, wire in self._wires.items()}) if self.changes else self

    def encodes(self, message: Message) -> bool:
        """Whether it takes a wire of these; else it travels as it is."""
        return not message.backward or message.exposed or self.every_gradient

    def of(self, message: Message) -> Wire:
        wire: Wire = self.activation_gradients if message.backward else self.activations
        return wire if self.encodes(message) else Wire()

    def strategy_of(self, strategy: Strategy, stage: int, stages: int) -> Strategy:
        """That of a stage, of so many."""
        if self.gradients.codec == "none" or stage >= ceil(self.share_of_stages * stages):
            return strategy
        moving = [kind for kind in GRADIENTS if getattr(strategy.moves, kind.value)]
        return replace(strategy, **{k.value: replace(self.gradients, route=strategy.wire(k).route) for k in moving})


def encoded_gradients(order: Order, compression: Compression) -> frozenset[tuple[int, int]]:
    """Those that stages send back and that take its wire, by the stage that sends them and the micro-batch."""
    return frozenset((m.source, m.micro_batch) for m in messages(order) if m.backward and compression.encodes(m))


# The three parts of Optimus-CC, with the ranks of its section 9: compressed backpropagation, fused embedding
# synchronisation, selective stage compression.
_BACKPROPAGATION = Compression("low-rank:16", fused_embeddings=False)
_FUSED = replace(_BACKPROPAGATION, fused_embeddings=True)
COMPRESSIONS = {
    "none": Compression(),
    "optimus-cb": _BACKPROPAGATION,
    "optimus-cb+fe": _FUSED,
    "optimus-cb+fe+sc": replace(_FUSED, gradients="low-rank:128"),
}


def compression(name: str, **options: Any) -> Compression:
    """The preset `name`: 'none', 'optimus-cb', 'optimus-cb+fe' or 'optimus-cb+fe+sc'. Options: the fields of a
    `Compression`, in the place of the preset's."""
    if name not in COMPRESSIONS:
        close = difflib.get_close_matches(str(name), COMPRESSIONS, n=1, cutoff=0.0)[0]
        known = ", ".join(COMPRESSIONS)
        raise StrategyError(f"unknown compression {name!r}; did you mean {close!r}? Known: {known}.")
    known = [field.name for field in fields(Compression)]
    if unknown := set(options) - set(known):
        raise StrategyError(
            f"compression {name!r} has no option {', '.join(sorted(unknown))}; it has {', '.join(known)}."
        )
    return replace(COMPRESSIONS[name], **options)
