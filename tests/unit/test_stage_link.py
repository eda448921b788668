"""What stages send in fewer bytes: what a message misses comes with a later one, and nothing is lost on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from towpath.core.formats import Precision
from towpath.core.transport import Transport
from towpath.pipeline.agreement import meta_outputs
from towpath.pipeline.messages import Encoding, RecvDecoder, Sender

CPU = torch.device("cpu")
SHAPE = (3, 8, 16)
LOW_RANK = Transport(codec="low-rank:2", feedback="first")
INT8 = Transport(codec="int8:32+stochastic", feedback="first")


def sender(transport: Transport, dtype: torch.dtype = torch.float32) -> Sender:
    return Sender(Encoding(SHAPE, dtype, transport), CPU, "gradients of stage 1, 0")


def drawn(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(SHAPE, generator=generator, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("transport", [LOW_RANK, INT8], ids=str)
def test_what_has_arrived_and_what_is_kept_are_all_that_was_sent(transport: Transport) -> None:
    made, sent = sender(transport), drawn(4)
    arrived = sum(made.encoding.decoded(made.encoded(x)) for x in sent)
    kept = made._error.view(SHAPE)
    assert kept.abs().max() > 1e-3
    assert torch.allclose(arrived + kept, sum(sent), atol=1e-5)  # type: ignore[arg-type]


def test_without_feedback_nothing_is_kept_but_what_the_next_factors_start_from() -> None:
    made = sender(Transport(codec="low-rank:2"))
    first, second = drawn(2)
    made.encoded(first)
    assert [kept.shape for kept in made.state] == [(16, 2)]
    assert not torch.equal(made.encoding.decoded(made.encoded(second)), second)


@pytest.mark.parametrize("transport", [LOW_RANK, INT8], ids=str)
def test_what_is_not_finite_arrives_so_and_no_later_message_hears_of_it(transport: Transport) -> None:
    made, (first, second) = sender(transport), drawn(2)
    made.encoded(first)
    before = [kept.clone() for kept in made.state[:2]]
    broken = second.clone()
    broken[0, 0, 0] = float("inf")
    assert not made.encoding.decoded(made.encoded(broken)).isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(before[: 2 - (transport is INT8)], made.state, strict=False))
    assert made.encoding.decoded(made.encoded(second)).isfinite().all()


def test_a_sender_that_takes_over_anothers_state_sends_the_same() -> None:
    """Stochastic rounding draws from numbers that go on."""
    for transport in (LOW_RANK, INT8):
        one, other = sender(transport), sender(transport)
        first, second = drawn(2)
        one.encoded(first)
        for mine, theirs in zip(other.state, one.state, strict=True):
            mine.copy_(theirs)
        assert torch.equal(one.encoded(second), other.encoded(second)), transport
        one.restart()
        assert torch.equal(one._error, torch.zeros_like(one._error))


def test_stages_agree_on_the_dtype_that_inputs_are_cast_to() -> None:
    """A residual connection would keep float32. The hooks of a sharded stage cast its inputs first."""

    class Residual(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x.to(self.weight.dtype))

    stage, inputs = Residual(4, 4), (torch.empty(2, 4),)
    for precision, expected in ((Precision(), torch.float32), (Precision("bfloat16"), torch.bfloat16)):
        (output,) = meta_outputs(stage, inputs, precision)
        assert output.dtype == expected


def test_inputs_of_the_model_receive_no_message_in_any_pytorch() -> None:
    """In 2.11 what stands for them has no buffer at all, and not the attribute that tells them apart later."""
    receive: Any = SimpleNamespace(tensor=None)
    receiver = RecvDecoder([Encoding(SHAPE, torch.float32, INT8)] * 2, CPU)
    receiver.begin(0, [receive], [SimpleNamespace(meta=None), SimpleNamespace(buffer=torch.empty(SHAPE))], True)
    assert list(receiver.arriving) == [(0, 1)] and receive.tensor is receiver.arriving[0, 1]
