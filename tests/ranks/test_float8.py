"""torchao's float8 layers compute with the unsharded weights of `shard()`. Their own float8 all-gather is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import towpath
from tests.ranks.models import noise
from tests.ranks.server import on_ranks
from tests.ranks.strategies import in_turn
from towpath.errors import ShardError

WIDTH = 32  # float8 layers take multiples of 16

pytest.importorskip("torchao.float8", reason="torchao is not installed: pip install torchao")


def _model(gathers_float8: bool = False) -> Any:
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]
        Float8LinearConfig,  # pyright: ignore[reportUnknownVariableType]
        convert_to_float8_training,  # pyright: ignore[reportUnknownVariableType]
    )

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    # Emulated, because float8 products need a GPU.
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers_float8, emulate=True)
    return convert_to_float8_training(model, config=config)


def _step(model: Any, optimizer: torch.optim.Optimizer, ranks: range, step: int) -> None:
    for rank in ranks:
        (model(noise(rank, 0, step, 16, WIDTH).float()) - 1).square().mean().div(len(ranks)).backward()
    optimizer.step()
    optimizer.zero_grad()


@in_turn(["zero3", "mics", "paro-iig", "ddp"], 1)
@pytest.mark.parametrize("bf16", [False, True])
@on_ranks(2)
def test_float8_layers_train_as_in_one_process(label: str, bf16: bool) -> None:
    rank, kept = dist.get_rank(), torch.bfloat16 if bf16 else torch.float32
    plain, model = _model().to(kept), _model().to(kept)
    assert [type(layer).__name__ for layer in model] == ["Float8Linear"] * 3
    model = towpath.shard(model, towpath.strategy(label, towpath.Topology(1, 2)))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        _step(plain, optimizers[0], range(2), step)
        _step(model, optimizers[1], range(rank, rank + 1), step)
    with towpath.full_parameters(model):
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected)


def test_its_all_gather_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        ShardError, match=r"0.weight is a WeightWithDynamicFloat8CastTensor; .*enable_fsdp_float8_all_g"
    ):
        towpath.shard(_model(gathers_float8=True), "zero3")
