"""What stages send in fewer bytes: what a message misses comes with a later one, and nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from benchmarks.harness.fake_world import CALLS, MESSAGES, OTHERS, fake_world
from towpath.core.formats import Precision
from towpath.core.transport import Transport
from towpath.pipeline.agreement import DifferingTensors, meta_outputs
from towpath.pipeline.messages import Encoding, RecvDecoder, SendEncoder, Sender

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


# --- shares of tensor-parallel ranks ---------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def _local(mesh: DeviceMesh, *placed: Any, grads: Any = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a rank has of a replicated tensor that was placed otherwise, one placement after the other."""

    def function(x: torch.Tensor) -> torch.Tensor:
        made = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        for placement in placed:
            made = made.redistribute(placements=[placement])
        return made.to_local(grad_placements=grads)

    return function


def _written(mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    """Zeros but for a part, which is written through a view."""
    zeros = torch.zeros(x.shape)
    zeros[:2] = _local(mesh, Shard(0))(x)
    return zeros


MEGATRON: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCES: dict[str, ParallelStyle] = {
    "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
    "up": ColwiseParallel(input_layouts=Shard(0)),
    "down": RowwiseParallel(output_layouts=Shard(0)),
}
COLUMN: dict[str, ParallelStyle] = {"0": ColwiseParallel()}
# A stage, and whether its outputs differ.
STAGES: dict[str, tuple[Callable[[DeviceMesh], nn.Module], bool]] = {
    "plain layers": (lambda mesh: Layers(), False),
    "split layers": (lambda mesh: parallelize_module(Layers(), mesh, MEGATRON), False),
    "columns": (lambda mesh: parallelize_module(nn.Sequential(nn.Linear(4, 8)), mesh, COLUMN), True),
    "sequences": (lambda mesh: parallelize_module(Layers(), mesh, SEQUENCES), True),
    "replicated": (lambda mesh: Function(_local(mesh)), False),
    "gathered": (lambda mesh: Function(_local(mesh, Shard(0), Replicate())), False),
    "view": (lambda mesh: Function(lambda x: (x, _local(mesh, Shard(0))(x)[:1])), True),
    "beside": (lambda mesh: Function(lambda x: (_local(mesh, Shard(0))(x), x)[1]), False),
    "sum": (lambda mesh: Function(lambda x: x + DTensor.from_local(x, mesh, [Partial()]).to_local()), True),
    "gradient": (lambda mesh: Function(_local(mesh, grads=[Partial()])), True),
    "written": (lambda mesh: Function(partial(_written, mesh)), True),
}


@pytest.mark.parametrize("name", STAGES)
def test_what_differs_between_tensor_parallel_ranks_is_found_without_values(name: str) -> None:
    made, differs = STAGES[name]
    to_local = DTensor.to_local
    with fake_world(1, 2, watch=False):
        differing = DifferingTensors()
        meta_outputs(made(init_device_mesh("cpu", (2,))), (torch.empty(4, 4),), Precision(), differing)
    assert differing.in_outputs is differs and DTensor.to_local is to_local


@pytest.mark.parametrize("transport", [Transport(), Transport(codec="low-rank:2")], ids=str)
def test_a_share_is_sent_without_a_copy_and_gathered_by_one_call(transport: Transport) -> None:
    """After the first message, which peers compare. Two equal halves stand for the other rank's share."""
    x = drawn(1)[0][0, :4].repeat(2, 1)
    with fake_world(1, 2) as (_, launches):
        encoding = Encoding((4, 16), torch.float32, transport, dist.group.WORLD)
        sends, receives = SendEncoder([encoding], CPU, "outputs of stage 0"), RecvDecoder([encoding], CPU)
        receive: Any = SimpleNamespace(tensor=None)
        info = SimpleNamespace(buffer=torch.empty(x.shape))
        buffer = info.buffer
        sends.messages([x], encoded=True, in_step=True)
        launches.computation.clear()
        (message,) = sends.messages([x], encoded=True, in_step=True)
        receives.begin(0, [receive], [info], encoded=True)
        assert message is not None and receive.tensor.shape == message.shape
        sent = launches.computation.copy()
        launches.computation.clear()
        receives.decode(0, [info])
    assert sent[CALLS] == sent[MESSAGES] == launches.computation[MESSAGES] == 0
    assert launches.computation[CALLS] == 1 and info.buffer is buffer
    if transport.low_rank is None:
        assert sent[OTHERS] == launches.computation[OTHERS] == 0
        assert message.data_ptr() == x.data_ptr() and receive.tensor.data_ptr() == buffer.data_ptr()
