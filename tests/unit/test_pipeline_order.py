"""Which passes each rank of a pipeline computes when, and which gradients nobody has anything else to do for."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from towpath.core.pipeline import Message, Order, PassKind, gpipe, messages, one_forward_one_backward

SIZES = list(product(range(1, 9), range(1, 33)))


def exposed(order: Order) -> Counter[int]:
    """How many, by the stage that sends them."""
    return Counter(m.source for m in messages(order) if m.exposed)


@pytest.mark.parametrize("make", [gpipe, one_forward_one_backward])
def test_every_pass_is_there_once_and_every_neighbour_is_sent_something(make: object) -> None:
    assert callable(make)
    for ranks, micro_batches in SIZES:
        order: Order = make(ranks, micro_batches)
        for rank, passes in order.items():
            expected = {(rank, part, j) for part in (PassKind.FORWARD, PassKind.BACKWARD) for j in range(micro_batches)}
            assert {(p.stage, p.kind, p.micro_batch) for p in passes} == expected
            assert len(passes) == len(expected)
            assert all(
                [p.micro_batch for p in passes if p.kind is part] == list(range(micro_batches))
                for part in PassKind
                if part in "FB"
            )
        found = [(m.source, m.target, m.micro_batch) for m in messages(order)]
        links = [(s, s + 1) for s in range(ranks - 1)] + [(s + 1, s) for s in range(ranks - 1)]
        assert sorted(found) == sorted((s, t, j) for s, t in links for j in range(micro_batches))


def test_of_1f1b_the_epilogue_is_exposed() -> None:
    """Optimus-CC: micro-batch j of stage s, where j ≥ M − (P − s)."""
    for ranks, micro_batches in SIZES:
        found = {
            (m.source, m.micro_batch) for m in messages(one_forward_one_backward(ranks, micro_batches)) if m.exposed
        }
        assert found == {
            (s, j) for s in range(1, ranks) for j in range(micro_batches) if j >= micro_batches - (ranks - s)
        }
    assert exposed(one_forward_one_backward(4, 8)).total() == 6


def test_of_gpipe_all_gradients_are_exposed() -> None:
    for ranks, micro_batches in SIZES:
        assert exposed(gpipe(ranks, micro_batches)).total() == (ranks - 1) * micro_batches


def test_outputs_are_never_exposed_and_neighbours_on_one_rank_send_nothing() -> None:
    order = one_forward_one_backward(3, 4)
    assert not any(m.exposed for m in messages(order) if not m.backward)
    together: Order = {0: [*order[0], *order[1]], 1: order[2]}
    assert {(m.source, m.target) for m in messages(together)} == {(1, 2), (2, 1)}
    assert Message(2, 1, 0).backward and not Message(1, 2, 0).backward
