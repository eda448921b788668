"""The benchmarks' pipeline in one process takes the optimizer steps of a pipeline on ranks.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.suites.emulated_pipeline import EmulatedPipeline
from benchmarks.suites.pipeline import Sizes, Stage, compression_of, loss_of
from tests.ranks.server import World
from towpath.codecs.low_rank import first_factor
from towpath.engine.parameters import low_rank_sync
from towpath.pipeline import Pipeline

Worlds = Callable[[int], World]

SIZES = Sizes(16, 2, 2, 24, batch=2, length=6, micro_batches=4, wait_seconds=0.0, rank=2, gradient_rank=3)


def test_emulated_steps_are_those_of_the_pipeline(world: Worlds) -> None:
    world(4).run(_same_steps)


def _same_factor(columns: int, rank: int, seed: int, *like: Any) -> torch.Tensor:
    return first_factor(columns, rank, 0, *like)


def _same_steps() -> None:
    """With errors carried between steps, encoded sums of the first stage, and one sum of the tied embeddings."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    compression = compression_of("cb+fe+sc, 0.5 of stages", SIZES)
    with (
        patch.object(low_rank_sync, "first_factor", _same_factor),
        patch("benchmarks.suites.emulated_pipeline.first_factor", _same_factor),
    ):
        made = Pipeline(
            [lambda index=index: Stage(SIZES, index, count=2).double() for index in range(2)],
            "ddp",
            mesh=mesh,
            micro_batches=SIZES.micro_batches,
            loss=loss_of,
            example=torch.zeros(SIZES.batch, SIZES.length, dtype=torch.int64),
            compression=compression,
            tied=("tokens", "head"),
        )
        emulated = EmulatedPipeline(SIZES, compression, 0, stages=2, copies=2, dtype=torch.float64)
        optimizer, other = (torch.optim.SGD(each, lr=1.0) for each in (list(made.parameters()), emulated.parameters()))
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            ids, targets = torch.randint(
                24, (2, 2 * SIZES.batch * SIZES.micro_batches, SIZES.length), generator=generator
            )
            copy = mesh["dp"].get_local_rank()
            made.step(ids.chunk(2)[copy], target=targets.chunk(2)[copy])
            emulated.step(ids, targets)
            optimizer.step(), other.step()
            optimizer.zero_grad()
    (index,) = made.modules
    for name, parameter in made.modules[index].named_parameters():
        expected = emulated.stages[index].get_parameter(name)
        torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-9, atol=1e-12, msg=name)
