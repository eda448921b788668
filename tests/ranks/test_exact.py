"""Exact transports: training equals that without them to the bit, and encoded messages were sent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import towpath
from tests.ranks.models import DEVICE, LOUDNESS, MODELS
from tests.ranks.server import World
from tests.ranks.strategies import in_turn, strategy_of
from towpath.core import exact
from towpath.core.strategy import GRADIENTS

Worlds = Callable[[int], World]

# Every preset that sends gradients or a parameter sync between nodes, and every route.
LABELS = (
    *("ddp", "zero1", "zero2", "zero3", "mics", "hpz"),
    *(f"paro-{name}" for name in ("nnn", "nni", "nng", "nii", "nig", "ngg", "iii", "iig", "igg", "ggg")),
    *("zero1@ring", "zero1@hierarchical", "zero1@one-hop", "zero1@two-hop", "ddp@ho-ring", "ddp@two-hop"),
    "paro-iig gradients=int4",
)
# The dtype of the model, that of computation and messages, and that of the reduction.
PRECISIONS = {
    "bf16": (torch.bfloat16, towpath.Precision()),
    "bf16, fp32 masters": (torch.float32, towpath.Precision("bf16", "bf16")),
    "fp16, fp32 masters": (torch.float32, towpath.Precision("fp16", "fp16")),
    "fp32": (torch.float32, towpath.Precision()),
}


@in_turn([(label, name) for label in LABELS for name in PRECISIONS], 1, "case")
@pytest.mark.parametrize("micro_steps", [1, 4])
@pytest.mark.parametrize("shape", [(2, 2), (3, 1)], ids=["2x2", "3x1"])
def test_training_is_the_same_to_the_bit(
    world: Worlds, case: tuple[str, str], micro_steps: int, shape: tuple[int, int], pytestconfig: pytest.Config
) -> None:
    steps = 6 if "not parity" in pytestconfig.option.markexpr else 20
    world(shape[0] * shape[1]).run(_compare, *case, micro_steps, shape, steps)


def _compare(label: str, precision: str, micro_steps: int, shape: tuple[int, int], steps: int) -> None:
    strategy = strategy_of(label, towpath.Topology(*shape))
    exactly = strategy.with_exact_transports()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "SMALLEST_BYTES", 1)
        plain, _ = _trained(_by_messages(strategy), precision, micro_steps, steps)
        found, model = _trained(exactly, precision, micro_steps, steps)
        assert plain.keys() == found.keys()
        for name, expected in plain.items():
            assert torch.equal(_bits(found[name]), _bits(expected)), name
        schedule = towpath.schedule(exactly, model, micro_steps)
        used, memory = [t for t in schedule.transfers if t.exact], towpath.stats(model).memory_bytes
        assert used and {kind: memory[kind] for kind in schedule.buffer_bytes()} == schedule.buffer_bytes()
        sent = [each for each in towpath.stats(model).transfers if each.transfer.exact]
        assert {each.transfer.kind for each in sent} == {t.kind for t in used}
        # Of this size, encoded messages have another length than their values.
        assert all(each.inter_bytes != each.calls * each.transfer.inter_bytes for each in sent)


def _by_messages(strategy: towpath.Strategy) -> towpath.Strategy:
    """Return the strategy without the backend's own sums, which have an order of their own. Exact ones avoid them."""
    kinds = [kind for kind in GRADIENTS if strategy.transport(kind).route == "flat"]
    return replace(strategy, **{kind.value: replace(strategy.transport(kind), route="ring") for kind in kinds})


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _trained(
    strategy: towpath.Strategy, precision: str, micro_steps: int, steps: int
) -> tuple[dict[str, torch.Tensor], Any]:
    """Train, and return this rank's losses, gradients of the last step, parameters and optimizer states."""
    dtype, policy = PRECISIONS[precision]
    entry, rank = MODELS["gpt"], dist.get_rank()
    model: Any = towpath.shard(entry.make(dtype), strategy, precision=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept: dict[str, torch.Tensor] = {}
    for step in range(steps):
        for micro_step in range(micro_steps):
            with nullcontext() if micro_step == micro_steps - 1 else model.no_sync():
                loss = entry.loss(model, *entry.micro_batch(rank, micro_step, step, dtype))
                (LOUDNESS[step % len(LOUDNESS)] / micro_steps * loss).backward()
            kept[f"loss {step}.{micro_step}"] = loss.detach().to(DEVICE)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step < steps - 1:
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        kept[name] = parameter.local.clone()
        if parameter.grad is not None:
            kept[f"{name}.grad"] = parameter.grad.local.clone()
        kept |= {f"{name}.{k}": getattr(v, "local", v) for k, v in optimizer.state[parameter].items()}
    return kept, model


def test_a_rank_with_other_values_does_not_decode_them(world: Worlds) -> None:
    """Its replica has diverged in silence: nothing else in the step would notice."""
    diverged, other = world(2).run(_diverge)
    assert "param_sync" in diverged and "relative to other values" in diverged and not other


def _diverge() -> str:
    entry, rank = MODELS["gpt"], dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "SMALLEST_BYTES", 1)
        model: Any = towpath.shard(
            entry.make(torch.bfloat16), towpath.strategy("zero1", towpath.Topology(2, 1), exact=True)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        entry.loss(model, *entry.micro_batch(rank, 0, step, torch.bfloat16)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # waits for the parameter syncs, and for nothing else
            model(*entry.micro_batch(rank, 0, step, torch.bfloat16))
    entry.loss(model, *entry.micro_batch(rank, 0, 2, torch.bfloat16)).backward()
    optimizer.step()
    for bucket in (bucket for unit in model.towpath_engine.units for bucket in unit.buckets if rank == 0):
        bucket.shard.view(torch.int16).bitwise_xor_(1)
    try:
        with torch.no_grad():
            model(*entry.micro_batch(rank, 0, 2, torch.bfloat16))
    except towpath.TowpathError as error:
        return str(error)
    return ""
