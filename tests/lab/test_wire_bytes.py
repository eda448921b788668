"""With `towpath.wires`, FSDP2 sends a fraction of its bytes between nodes, by the kernel's counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import towpath
from benchmarks import gpt
from lab import Lab
from tests.lab.test_bytes import WIDER, counters_at_rest
from tests.ranks.strategies import seldom

LENGTH, WARM_UP, COUNTED = 64, 2, 3


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank that trains."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, 4, bias=False)
        self.up = nn.Linear(4, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def sent_by_both(rank: int, world: int, reduce: str, lr: float, lora: bool) -> tuple[float, list[float]]:
    """The share of stock FSDP2's bytes that this node sends with wires, and the losses' differences."""
    policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, reduce))
    counted: list[int] = []
    losses: list[list[float]] = []
    for wired in (False, True):
        torch.manual_seed(0)
        model: Any = gpt.GPT(width=WIDER, depth=3, heads=2, context=LENGTH)
        if lora:
            model.requires_grad_(False)
            for block in model.blocks:
                block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)
        for module in (*model.blocks, model):
            fully_shard(module, mp_policy=policy)
        if wired:
            towpath.wires(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.95))
        data, before = gpt.batches(rank, batch=1, length=LENGTH), 0
        losses.append([])
        for step in range(WARM_UP + COUNTED):
            if step == WARM_UP:
                before = counters_at_rest()
            loss = model(*next(data))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        counted.append(counters_at_rest() - before)
    return counted[1] / counted[0], [a - b for a, b in zip(*losses, strict=True)]


@pytest.mark.parametrize(
    "reduce, lr, lora, most",
    [
        ("bfloat16", 1e-3, False, 0.20),
        seldom("bfloat16", 1e-4, False, 0.20),
        seldom("float32", 1e-3, False, 0.25),
        seldom("float32", 1e-4, False, 0.25),
        ("bfloat16", 1e-4, True, 0.02),
    ],
)
def test_wires_send_a_fraction_of_fsdp2_s_bytes(
    lab: Callable[..., Lab], reduce: str, lr: float, lora: bool, most: float
) -> None:
    for share, differences in lab(2, 2).call(sent_by_both, reduce, lr, lora, timeout_seconds=300):
        assert share <= most
        assert max(map(abs, differences)) < 1e-2  # sums in bf16, in another order
