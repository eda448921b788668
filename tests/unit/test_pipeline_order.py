"""Which passes each rank of a pipeline computes when, and which gradients nobody has anything else to do for."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from towpath.core.passes import (
    SCHEDULES,
    Compression,
    Message,
    Order,
    PassKind,
    asked_of_micro_batches,
    encoded_gradients,
    messages,
    one_forward_one_backward,
)
from towpath.errors import ShardError
from towpath.pipeline.schedules import _StandIn, order_of, schedule_class

SIZES = list(product((1, 2, 3, 4, 7, 8), (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32)))


def exposed(order: Order) -> Counter[int]:
    """How many, by the stage that sends them."""
    return Counter(m.source for m in messages(order) if m.exposed)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pass_is_there_once_and_every_neighbour_is_sent_something(name: str) -> None:
    for ranks, micro_batches in SIZES:
        if ranks == 1 or (order := planned(name, ranks, micro_batches)) is None:
            continue
        count = SCHEDULES[name] * ranks
        for rank, passes in order.items():
            own = range(rank, count, ranks)
            expected = Counter((s, kind, j) for s in own for kind in PassKind for j in range(micro_batches))
            assert Counter((p.stage, p.kind, p.micro_batch) for p in passes) == expected
        found = [(m.source, m.target, m.micro_batch) for m in messages(order)]
        links = [(s, s + 1) for s in range(count - 1)] + [(s + 1, s) for s in range(count - 1)]
        assert sorted(found) == sorted((s, t, j) for s, t in links for j in range(micro_batches))


@pytest.mark.parametrize("name", SCHEDULES)
def test_of_every_schedule_what_is_sent_after_the_last_forward_pass_is_exposed(name: str) -> None:
    """By their places in the lists, for all sizes that the schedule takes."""
    taken = 0
    for ranks, micro_batches in SIZES:
        order = planned(name, ranks, micro_batches)
        if order is None:
            continue
        taken += 1
        homes = {p.stage: rank for rank, passes in order.items() for p in passes}
        expected: set[tuple[int, int]] = set()
        for rank, passes in order.items():
            last = max(i for i, p in enumerate(passes) if p.kind is PassKind.FORWARD)
            expected |= {
                (p.stage, p.micro_batch)
                for i, p in enumerate(passes)
                if i > last and p.kind is PassKind.BACKWARD and homes.get(p.stage - 1, rank) != rank
            }
        assert {(m.source, m.micro_batch) for m in messages(order) if m.exposed} == expected, (ranks, micro_batches)
        assert encoded_gradients(order, Compression("low-rank:1")) == expected
    assert taken >= 32


def planned(name: str, ranks: int, micro_batches: int) -> Order | None:
    """None: not with these sizes."""
    kind = schedule_class(name)
    try:
        return order_of(kind, SCHEDULES[name] * ranks, ranks, micro_batches)
    except ShardError:
        return None


def test_outputs_are_never_exposed_and_neighbours_on_one_rank_send_nothing() -> None:
    order = one_forward_one_backward(3, 4)
    assert not any(m.exposed for m in messages(order) if not m.backward)
    together: Order = {0: [*order[0], *order[1]], 1: order[2]}
    assert {(m.source, m.target) for m in messages(together)} == {(1, 2), (2, 1)}
    assert Message(2, 1, 0).backward and not Message(1, 2, 0).backward


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_schedule_asks_of_micro_batches_is_what_pytorch_asks(name: str) -> None:
    for ranks in (1, 2, 3, 4):
        for micro_batches in range(1, 13):
            told = asked_of_micro_batches(name, ranks, micro_batches)
            assert bool(told) is not _pytorch_takes(name, ranks, micro_batches), (ranks, micro_batches, told)


def _pytorch_takes(name: str, ranks: int, micro_batches: int) -> bool:
    kind, count = schedule_class(name), SCHEDULES[name]
    stages: Any = [_StandIn(index, count * ranks, ranks) for index in range(count)]
    try:
        kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, micro_batches)
    except ValueError:
        return False
    return True
