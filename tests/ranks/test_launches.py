"""The launches that gradients take: per unit and micro-step, and per bucket at the boundary.

On a GPU each of the counted operations is a launch, or a few for very large lists.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import towpath
from tests.ranks.server import on_ranks
from tests.ranks.twin import accumulating
from towpath.engine.executor import engine_of
from towpath.engine.parameters.gradients import FlatGradients

SHAPE = towpath.Topology(2, 2)
SUMMED_WIDE = towpath.Precision(params=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.float32)
WIDTH, DEPTH = 24, 3  # biases of 24 elements leave padding behind them
WRITES = ("copy_", "add_", "zero_", "fill_", "_foreach_copy_", "_foreach_add_", "_foreach_zero_")


class Block(nn.Module):
    """Eight parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layers(x))


class Net(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant:  # its gradients arrive twice
                x = checkpoint(block, x, use_reentrant=True) + checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        return self.head(x)


class Counting(TorchDispatchMode):
    """Counts the operations of one thread that write to memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in WRITES:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _model(strategy: str, precision: towpath.Precision, reentrant: bool = False) -> Any:
    torch.manual_seed(0)
    return towpath.shard(Net(reentrant), strategy, topology=SHAPE, units=[Block], precision=precision)


def _counted(model: Any, micro_steps: int) -> list[Counter[str]]:
    """Run a step, and return the writes of the training thread in each backward pass."""
    found: list[Counter[str]] = []
    for _ in accumulating(model, micro_steps):
        loss = model(torch.ones(2, WIDTH, requires_grad=True)).square().mean()
        with Counting() as counting:
            loss.backward()
        found.append(counting.counts)
    model.zero_grad()
    return found


@pytest.mark.parametrize("label", ["zero3", "ddp"])
@on_ranks(4)
def test_gradients_of_a_unit_take_one_launch(label: str) -> None:
    for precision in (towpath.Precision(), SUMMED_WIDE):
        model = _model(label, precision)
        units = [unit for unit in engine_of(model).units if unit.trainable]
        assert [len(unit.views) for unit in units] == [2, *[8] * DEPTH]
        for _ in range(2):
            micro_steps = _counted(model, 3)
        padded = {"_foreach_zero_": len(units)}
        for number, counts in enumerate(micro_steps):
            if label == "zero3" or not number:  # reduced from a slot, or the first terms of a sum
                assert counts == padded | {"_foreach_copy_": len(units)}, (precision, number)
            else:
                assert counts == {"_foreach_add_": len(units)}, (precision, number)


@pytest.mark.parametrize("label", ["zero3", "ddp"])
@on_ranks(4)
def test_gradients_that_count_as_zero_take_one_launch(label: str) -> None:
    model = _model(label, towpath.Precision())
    _counted(model, 1)
    engine = engine_of(model)
    engine.muted = True
    [counts] = _counted(model, 1)
    engine.muted = False
    assert counts == {"_foreach_zero_": 2 * (DEPTH + 1)}, counts  # padding, and what this rank leaves out


@on_ranks(4)
def test_gradients_that_arrive_twice_are_summed_in_one_launch() -> None:
    # The gradients of the two recomputations arrive one after the other, each time those of all eight parameters.
    model = _model("ddp", towpath.Precision(), reentrant=True)
    _counted(model, 1)
    [counts] = _counted(model, 1)
    assert counts["_foreach_copy_"] == DEPTH + 1
    assert counts["_foreach_add_"] == DEPTH, counts


@on_ranks(4)
def test_only_one_unit_s_gradients_are_held() -> None:
    model = _model("zero3", towpath.Precision())
    engine = engine_of(model)
    most = 0

    def look(_: Tensor) -> None:
        nonlocal most
        held = {unit: sum(len(b.gradients._held) for b in unit.trainable) for unit in engine.units}
        assert sum(n > 0 for n in held.values()) <= 1, held
        most = max(most, *held.values())

    for unit in engine.units:
        for view in unit.views:
            view.register_post_accumulate_grad_hook(look)
    _counted(model, 2)
    assert most == 8
    assert not any(b.gradients._held for unit in engine.units for b in unit.trainable)
    largest = max(b.plan.numel * 4 for unit in engine.units for b in unit.trainable)
    assert towpath.stats(model).memory_bytes["arriving gradients"] == largest


@pytest.mark.parametrize("label", ["ddp", "zero1", "mics", "paro-iig", "paro-nig"])
@on_ranks(4)
def test_a_sum_is_narrowed_and_widened_in_two_launches(label: str) -> None:
    model = _model(label, SUMMED_WIDE)
    made = towpath.schedule(engine_of(model).strategy, model, 1, SUMMED_WIDE)
    counts: list[Counter[str]] = []
    grad_sync = FlatGradients.grad_sync

    def counted(self: FlatGradients, *args: Any) -> None:
        assert self.sums is not None
        before = self.sums.clone()
        with Counting() as counting:
            grad_sync(self, *args)
        # Every rank has the same gradients. The sum of so many equal ones divided by their number is exact.
        mine = self._own_slice(self.sums)
        assert torch.equal(mine, self._own_slice(before).bfloat16().float() / self.plan.grads.count)
        counts.append(counting.counts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatGradients, "grad_sync", counted)
        model(torch.ones(2, WIDTH)).square().mean().backward()
    assert len(counts) == DEPTH + 1
    assert all(each["copy_"] == 2 for each in counts), counts
    assert towpath.stats(model).memory_bytes["wire"] == made.buffer_bytes()["wire"]
    # Without a wider sum nothing is narrowed.
    plain = towpath.schedule(engine_of(model).strategy, model, 1, towpath.Precision("bfloat16", "bfloat16", None))
    assert plain.buffer_bytes()["wire"] < made.buffer_bytes()["wire"]
