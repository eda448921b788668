"""A pipeline as data: in which order each rank computes which passes, and which messages go between stages.

A pass is of one stage and one micro-batch: forward; backward, whole or in two halves. Between neighbouring stages on
different ranks each forward pass sends its output on, and each backward pass its input's gradient back. Such a gradient
is *exposed* if the rank that sends it has no forward pass left to compute meanwhile: the stages before it then wait for
nothing else (Optimus-CC's epilogue, for any schedule). Both ends know the whole order, so no flag travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum

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
