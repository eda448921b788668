"""In which dtype gradients travel, and in which they are summed: judged by sums that are exact in float32.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import towpath
from tests.forms import in_form
from tests.ranks.models import MODELS
from tests.ranks.reference import optimizer_for
from tests.ranks.server import on_ranks
from tests.ranks.strategies import in_turn, seldom, strategy_of
from tests.ranks.twin import accumulating
from towpath import Precision, Topology
from towpath.core.routes import Form
from towpath.core.unit_plan import BucketPlan
from towpath.engine.executor import engine_of

SHAPE = Topology(2, 2)

# Sums in place, early and late reductions, over one hop, two and a ring; at the boundary nothing, one sync or two.
KINDS = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "zero3@ring",
    "zero3@two-hop",
    "hpz",
    "mics:2x1",
    "paro-nig",
    "paro-iig",
    "lins:1x1|1x1|2x1",
)
FEWER = ("ddp", "zero1", "zero3", "zero3@two-hop", "mics:2x1", "paro-iig")  # by `make test`: one of each sort


class Summed(nn.Module):
    """The gradient of each parameter is the input: whatever is wrong in a sum of gradients shows as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(37))
        self.blocks = nn.ModuleList(Weight() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first * x[:37]).sum() + sum(block(x) for block in self.blocks)


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100))
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum() + self.gain * x[0]


def _summed(label: str, precision: Precision, inputs: list[Tensor]) -> list[Tensor]:
    """The gradients of one accumulation over `inputs`, this rank's."""
    model: Any = towpath.shard(Summed(), strategy_of(label, SHAPE), precision=precision)
    for micro in accumulating(model, len(inputs)):
        model(inputs[micro]).backward()
    return [p.grad.full_tensor().flatten() for p in model.parameters()]


def _is(gradients: list[Tensor], expected: Tensor) -> bool:
    return all(torch.equal(g, expected[: g.numel()]) for g in gradients)


@on_ranks(4)
def test_a_bf16_sum_over_many_micro_steps_is_that_of_float32(whole_product: bool) -> None:
    """256, and then 8 times a half, one, one and a half or two, by rank. bf16 has 8 bits: 256 and a half is 256."""
    labels = KINDS if whole_product else FEWER
    scale = 2.0 ** (torch.arange(100) % 3)
    inputs = [256 * scale, *[0.5 * (1 + dist.get_rank()) * scale] * 8]
    # 256 + 4, 8, 12 and 16; that sum, its halves and its mean are multiples of what bf16 resolves there.
    exact = 266 * scale
    for label in labels:
        default = Precision(params=torch.bfloat16, reduce=torch.bfloat16)
        assert _is(_summed(label, default, inputs), exact), label
        # And so the sum would be lost: this test can fail.
        if label not in ("ddp", "zero3", "paro-iig"):
            continue
        taken_back = Precision(params=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.bfloat16)
        assert not _is(_summed(label, taken_back, inputs), exact), label


@on_ranks(4)
def test_an_fp16_sum_loses_neither_end_of_its_range(whole_product: bool) -> None:
    """Four times 30,000 is infinite; a quarter of 2^-23 is zero. Ranks that agree lose nothing."""
    labels = KINDS if whole_product else FEWER
    half = Precision(params=torch.float16, reduce=torch.float16)
    exact = torch.tensor([30_000.0, -30_000.0, 2.0**-23, 1.0]).repeat(25)
    for label in labels:
        assert _is(_summed(label, half, [exact]), exact), label
        taken_back = Precision(params=torch.float16, reduce=torch.float16, accumulate=None)
        assert _is(_summed(label, taken_back, [exact]), exact), label


# --- gradients of a model --------------------------------------------------------------------------------------------


@in_turn(KINDS, 1)
@on_ranks(4)
def test_mixed_precision_trains_fp32_masters_on_the_exact_mean_of_bf16_gradients(label: str) -> None:
    """Each step has an exact twin: gradients of the bf16 model that the masters make, summed in fp32."""
    entry, dtype = MODELS["gpt"], torch.float32
    precision = Precision(params=torch.bfloat16, reduce=torch.float32)
    model: Any = towpath.shard(entry.make(dtype), strategy_of(label, SHAPE), precision=precision)
    masters, half = entry.make(dtype), entry.make(dtype).to(torch.bfloat16)
    optimizers = optimizer_for(model), optimizer_for(masters)
    for step in range(3):
        half.load_state_dict(masters.state_dict())
        for rank in range(4):
            half.zero_grad()
            entry.loss(half, *entry.micro_batch(rank, 0, step, dtype)).backward()
            for master, p in zip(masters.parameters(), half.parameters(), strict=True):
                assert p.grad is not None
                master.grad = (0 if master.grad is None else master.grad) + p.grad.float() / 4
        entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, step, dtype)).backward()
        for (name, p), master in zip(model.named_parameters(), masters.parameters(), strict=True):
            assert p.dtype == p.grad.dtype == dtype
            assert master.grad is not None
            # fp32 sums of four terms in another order: a few times 2^-24 of the largest of them.
            limit = 1e-6 * max(1.0, master.grad.abs().max().item())
            assert (p.grad.full_tensor() - master.grad).abs().max().item() <= limit, (name, step)
            master.grad.copy_(p.grad.full_tensor())  # AdamW makes much of such differences
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, p), master in zip(model.named_parameters(), masters.named_parameters(), strict=True):
            # The same operations on the same numbers; bf16 masters would be off by 2^-9 of a weight.
            assert torch.allclose(p.full_tensor(), master[1], rtol=1e-6, atol=1e-8), (name, step)


# --- weights that gathers cast from the master ------------------------------------------------------------------------

BF16 = Precision(params="bfloat16", reduce="float32")
CAST = ("zero3", "mics", "hpz", "zero3@hierarchical", "qwz", "zero3 frozen=2x1", "lins:2x2|2x2|2x2")


class WithFrozen(nn.Module):
    """The model of the tests, with one parameter that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = MODELS["gpt"].make(torch.float32)
        next(iter(self.gpt.parameters())).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.gpt(ids)


@in_turn(CAST, 2)
@on_ranks(4)
def test_gathers_that_cast_the_master_bring_the_bits_of_a_shard(label: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for form in Form:
            with in_form(form):
                found = _trained(label)
                patch.setattr(BucketPlan, "casts_master", property(lambda _: False))
                kept = _trained(label)
            patch.undo()
            assert all(map(torch.equal, found, kept)) and len(found) == len(kept)


def _trained(label: str) -> list[Tensor]:
    """Losses and parameters of a training that also writes whole parameters, evaluates and loads a state dict."""
    torch.manual_seed(0)
    entry, plain = MODELS["gpt"], WithFrozen()
    model: Any = towpath.shard(plain, strategy_of(label, SHAPE), precision=BF16)
    assert any(b.plan.casts_master for u in engine_of(model).units for b in u.buckets) == _casts()
    optimizer = optimizer_for(model)
    losses: list[Tensor] = []
    for step in range(3):
        for micro in accumulating(model, 2):
            loss = entry.loss(model, *entry.micro_batch(dist.get_rank(), micro, step, torch.float32))
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        with towpath.full_parameters(model), torch.no_grad():
            for p in model.gpt.parameters():
                p.view(-1)[::3] *= -1  # all others keep the bits that their rounded copies have lost
        if step == 1:
            values = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
            model.load_state_dict({name: value * 0.75 for name, value in values.items()}, strict=False)
        with torch.inference_mode():
            losses.append(entry.loss(model, *entry.micro_batch(0, 0, step, torch.float32)).clone())
    return [*losses, *(p.full_tensor() for p in model.parameters())]


def _casts() -> bool:
    return BucketPlan.casts_master.fget is not None and "lambda" not in BucketPlan.casts_master.fget.__qualname__


@pytest.mark.parametrize("label", ["zero3", seldom("mics")])
@on_ranks(4)
def test_bf16_training_with_adamw_keeps_16_bytes_of_a_parameter(label: str) -> None:
    """As FSDP2 does: master, gradient and two states in float32. A rank of zero3 has them of its part only."""
    strategy = strategy_of(label, SHAPE)
    model: Any = towpath.shard(MODELS["gpt"].make(torch.float32), strategy, precision=BF16)
    optimizer = torch.optim.AdamW(model.parameters())
    entry = MODELS["gpt"]
    for step in range(2):
        entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, step, torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    memory = towpath.stats(model).memory_bytes
    ranks = strategy.placement.params.size
    padded = sum(b.plan.numel for u in engine_of(model).units for b in u.buckets) // ranks
    own = sum(p.numel() for p in model.parameters())  # padding has states only where it is in a shard
    assert {kind: memory[kind] for kind in ("params", "master", "grads", "grad", "optimizer")} == {
        "params": 0,
        "master": 4 * padded,
        "grads": 4 * padded,
        "grad": 0,
        "optimizer": memory["optimizer"],
    }
    assert 8 * own / ranks == pytest.approx(memory["optimizer"], rel=0.1)
    expected = towpath.schedule(strategy, model, 1).memory_bytes()
    assert {kind: memory[kind] for kind in expected} == expected
