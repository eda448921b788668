"""Trial steps tell apart the optimizers that step each parameter by itself, and leave no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from towpath.engine.optimizer_steps import coupling, small_copy


def _parameters() -> list[nn.Parameter]:
    shapes = [(64, 16), (16,), (64, 16), (3, 5, 2, 2), (), (1, 7)]
    return [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0))) for shape in shapes]


APART: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    **{
        f"{kind.__name__}, foreach={foreach}": lambda ps, kind=kind, foreach=foreach: kind(ps, lr=0.01, foreach=foreach)
        for kind in (optim.SGD, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adadelta, optim.Rprop, optim.Adafactor)
        for foreach in (False, True)
    },
    "AdamW, fused": lambda ps: optim.AdamW(ps, fused=True, amsgrad=True),
    "Muon": lambda ps: optim.Muon([p for p in ps if p.dim() == 2]),
    "Muon of one": lambda ps: optim.Muon(ps[:1]),
    "named, and a tensor as lr": lambda ps: optim.AdamW([(f"p{i}", p) for i, p in enumerate(ps)], lr=torch.tensor(0.1)),
    "a group each": lambda ps: optim.Adam([{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(ps)]),
    "an empty group": lambda ps: optim.Adam([{"params": ps}, {"params": []}]),
    "bfloat16": lambda ps: optim.AdamW([nn.Parameter(p.detach().bfloat16()) for p in ps]),
}


@pytest.mark.parametrize("name", APART)
def test_optimizers_that_step_each_parameter_by_itself_pass(name: str) -> None:
    assert coupling(APART[name](_parameters())) is None


class Clipping(optim.SGD):
    """Divides its gradients by the norm of all of them."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 0.1)
        return super().step(closure)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lr", [1e-6, 1.0])
def test_coupling_is_seen_in_every_dtype_and_at_the_start_of_a_warm_up(dtype: torch.dtype, lr: float) -> None:
    parameters = [nn.Parameter(p.detach().to(dtype)) for p in _parameters()]
    optimizer = Clipping([{"params": parameters[:3]}, {"params": parameters[3:]}], lr=lr)
    assert "depends on the gradients of the others" in str(coupling(optimizer))
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    assert optimizer.param_groups[0]["lr"] == 0
    assert "depends on the gradients of the others" in str(coupling(optimizer))


class Configured(optim.SGD):
    """Has an object in its groups, of which each copy has its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group.update(config=object(), history=[torch.zeros(2), None], function=max)


def test_objects_in_groups_are_not_compared() -> None:
    assert coupling(Configured(_parameters())) is None


def test_others_are_told_by_why() -> None:
    parameters = _parameters()
    assert "all parameters at once" in str(coupling(optim.LBFGS(parameters)))
    assert "SparseAdam does not support dense gradients" in str(coupling(optim.SparseAdam(parameters)))


class Drawing(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        random.random()
        torch.rand(())
        return super().step(closure)


def test_a_trial_leaves_no_trace() -> None:
    """Schedulers and hooks are not run; parameters, states, options and random numbers stay as they are."""
    parameters, called = _parameters(), list[str]()
    optimizer = Drawing(parameters, lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: called.append("hook"))
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before, options = [p.detach().clone() for p in parameters], repr(optimizer.param_groups)
    drawn = torch.get_rng_state(), random.getstate()
    assert "random numbers" in str(coupling(optimizer))
    assert torch.equal(torch.get_rng_state(), drawn[0]) and random.getstate() == drawn[1]
    assert all(map(torch.equal, parameters, before)) and all(p.grad is None for p in parameters)
    assert not optimizer.state and repr(optimizer.param_groups) == options and called == []
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    scheduler.step()
    assert set(called) == {"hook"} and optimizer.param_groups[0]["lr"] == 0.05


def test_a_trial_is_small_however_many_parameters_there_are() -> None:
    many = [nn.Parameter(torch.zeros(40, 30)) for _ in range(50)]
    copied = small_copy(optim.AdamW([{"params": many[:25]}, *({"params": [p]} for p in many[25:])]))
    found = [p for group in copied.param_groups for p in group["params"]]
    assert 1 < len(found) < 10 and sum(p.numel() for p in found) < 500
