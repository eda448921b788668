"""One rank: nothing of the gradients travels, and what autograd made of them is what the optimizer gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import towpath
from tests.ranks.models import MODELS
from tests.ranks.server import on_ranks
from tests.ranks.test_engine_promises import Branching
from tests.ranks.twin import Twin, loss_on
from towpath.engine.parameters.gradients import UnsentGradients
from towpath.engine.parameters.shard_tensor import ShardTensor

ALONE = towpath.Topology(1, 1)
LABELS = ("ddp", "zero3", "zero++", "paro-iig")


@on_ranks(1)
def test_it_trains_as_plain_pytorch_does_whatever_is_done_with_gradients() -> None:
    for label in LABELS:
        twin = Twin(MODELS["gpt"].build, loss_on("gpt"), label, ALONE)
        for step in range(4):
            twin.backward(step, micro_steps=1 + step % 3)
            if step == 2:  # a second boundary without zero_grad
                twin.backward(step + 4, micro_steps=2)
            twin.check_gradients()
            twin.step(set_to_none=step != 1)
        twin.check_parameters()


@on_ranks(1)
def test_a_parameter_that_some_micro_steps_leave_out_has_the_gradient_of_the_others() -> None:
    def loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
        use = [0] + [1] * (micro == 1) + [2] * (micro == 0) + [3] * (step % 2)
        torch.manual_seed(10 * step + micro)
        return model(torch.randn(3, 6, dtype=torch.float64), tuple(use)).square().mean()

    twin = Twin(Branching, loss, "zero3", ALONE)
    for step in range(3):
        twin.backward(step, micro_steps=2)
        twin.check_gradients()
        twin.step()


@on_ranks(1)
def test_no_gradient_is_copied_and_one_that_is_kept_stays_as_it_was() -> None:
    model = towpath.shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), "zero3")
    assert all(type(b.gradients) is UnsentGradients for u in model.towpath_engine.units for b in u.trainable)
    made: list[int] = []
    for bucket in (b for u in model.towpath_engine.units for b in u.trainable):
        for view in bucket.views:
            view.register_hook(lambda grad: made.append(grad.data_ptr()))
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    delivered = {p.grad.local.data_ptr() for p in model.parameters()}
    assert delivered <= set(made)
    kept = [p.grad for p in model.parameters()]
    before = [grad.local.clone() for grad in kept]
    model.zero_grad()
    model(2 * x).square().sum().backward()
    assert all(torch.equal(grad.local, values) for grad, values in zip(kept, before, strict=True))
    assert not any(torch.equal(p.grad.local, v) for p, v in zip(model.parameters(), before, strict=True))


class Sum(nn.Module):
    """Autograd gives its parameters one gradient, in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a.view(2, 2) + self.b.view(2, 2) + x).square().sum()


@on_ranks(1)
def test_gradients_that_share_their_memory_are_summed_and_scaled_once() -> None:
    """Plain PyTorch does both twice: it is compared with what autograd.grad returns."""
    model = towpath.shard(Sum(), "ddp")
    inputs = [torch.full((2, 2), float(i)) for i in range(3)]
    with model.no_sync():
        model(inputs[0]).backward()
        model(inputs[1]).backward()
    model(inputs[2]).backward()
    plain = Sum()
    each = [torch.autograd.grad(plain(x), list(plain.parameters())) for x in inputs]
    expected = [torch.stack(found).sum(0) for found in zip(*each, strict=True)]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() == pytest.approx(nn.utils.get_total_norm(expected).item())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient / norm.item(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@on_ranks(1)
def test_narrow_gradients_are_summed_in_float32(dtype: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 16, bias=False)
    whole = linear.weight.detach().clone()
    model = towpath.shard(nn.Sequential(linear), "zero3", precision=towpath.Precision(dtype, dtype))
    x = [torch.randn(4, 16).to(getattr(torch, dtype)) for _ in range(3)]
    for micro in range(2):
        with model.no_sync():
            model(x[micro]).sum().backward()
    model(x[2]).sum().backward()
    rounded = whole.to(getattr(torch, dtype)).requires_grad_()
    expected = torch.zeros(16, 16)
    for each in x:
        expected += torch.autograd.grad(torch.nn.functional.linear(each, rounded).sum(), rounded)[0].float()
    (found,) = [p.grad.full_tensor() for p in model.parameters()]
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Called(TorchDispatchMode):
    """Which operations run on ShardTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if ShardTensor in types:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@on_ranks(1)
def test_norms_are_taken_and_gradients_scaled_in_one_call_for_all() -> None:
    """As PyTorch does where it knows the class of a tensor: a call for each costs more than the work on a small one."""
    model = towpath.shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), "zero3")
    model(torch.ones(1, 8)).sum().backward()
    with Called() as called:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert called.names == ["_foreach_norm", "_foreach_mul_"]
