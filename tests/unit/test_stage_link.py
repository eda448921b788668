"""What stages send in fewer bytes: what a message misses comes with a later one, and nothing is lost on the way."""

from __future__ import annotations

import pytest
import torch

from towpath.core.wire import Wire
from towpath.pipeline.stage_link import Encoding, Sender

CPU = torch.device("cpu")
SHAPE = (3, 8, 16)
LOW_RANK = Wire(codec="low-rank:2", feedback="first")
INT8 = Wire(codec="int8:32+stochastic", feedback="first")


def sender(wire: Wire, dtype: torch.dtype = torch.float32) -> Sender:
    return Sender(Encoding(SHAPE, dtype, wire), CPU, "gradients of stage 1, 0")


def drawn(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(SHAPE, generator=generator, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("wire", [LOW_RANK, INT8], ids=str)
def test_what_has_arrived_and_what_is_kept_are_all_that_was_sent(wire: Wire) -> None:
    made, sent = sender(wire), drawn(4)
    arrived = sum(made.encoding.decoded(made.encoded(x)) for x in sent)
    kept = made._error.view(SHAPE)
    assert kept.abs().max() > 1e-3
    assert torch.allclose(arrived + kept, sum(sent), atol=1e-5)  # type: ignore[arg-type]


def test_without_feedback_nothing_is_kept_but_what_the_next_factors_start_from() -> None:
    made = sender(Wire(codec="low-rank:2"))
    first, second = drawn(2)
    made.encoded(first)
    assert [kept.shape for kept in made.state] == [(16, 2)]
    assert not torch.equal(made.encoding.decoded(made.encoded(second)), second)


def test_of_its_own_rank_a_message_arrives_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    rows, columns = (torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (24, 16))
    x = (rows @ columns.T).view(SHAPE)
    made = sender(LOW_RANK, torch.float64)
    message = made.encoded(x)
    assert message.numel() == 2 * (24 + 16) < x.numel()
    assert torch.allclose(made.encoding.decoded(message), x, atol=1e-12)


@pytest.mark.parametrize("wire", [LOW_RANK, INT8], ids=str)
def test_what_is_not_finite_arrives_so_and_no_later_message_hears_of_it(wire: Wire) -> None:
    made, (first, second) = sender(wire), drawn(2)
    made.encoded(first)
    before = [kept.clone() for kept in made.state[:2]]
    broken = second.clone()
    broken[0, 0, 0] = float("inf")
    assert not made.encoding.decoded(made.encoded(broken)).isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(before[: 2 - (wire is INT8)], made.state, strict=False))
    assert made.encoding.decoded(made.encoded(second)).isfinite().all()


def test_a_sender_that_takes_over_anothers_state_sends_the_same() -> None:
    """Stochastic rounding draws from numbers that go on."""
    for wire in (LOW_RANK, INT8):
        one, other = sender(wire), sender(wire)
        first, second = drawn(2)
        one.encoded(first)
        for mine, theirs in zip(other.state, one.state, strict=True):
            mine.copy_(theirs)
        assert torch.equal(one.encoded(second), other.encoded(second)), wire
        one.restart()
        assert torch.equal(one._error, torch.zeros_like(one._error))
