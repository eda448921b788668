"""What the planner counts of a pipeline, against the schedule of the pipeline that runs.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import towpath
from tests.profiles import made_profile
from tests.ranks.server import Worlds
from tests.ranks.strategies import seldom
from towpath.core.transport import Transport
from towpath.core.units import UnitSpec
from towpath.pipeline import Compression, Pipeline
from towpath.pipeline.schedules import walks
from towpath.plan.model import Model, ModelUnit, StagedModel
from towpath.plan.pipelines import Layout, Pipelines
from towpath.plan.request import Optimizer, Request
from towpath.plan.solver import Batching

WIDTH, VOCABULARY, TOKENS = 16, 32, 8
PACKED = Compression("low-rank:2")


class _Stage(nn.Module):
    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        if index == 0:
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        if index == count - 1:
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) if hasattr(self, "tokens") else x
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) if hasattr(self, "head") else x


@pytest.mark.parametrize(
    "schedule, strategy, packed, fused",
    [
        ("1F1B", "zero3", PACKED, True),
        ("1F1B", "hpz", Compression(), None),
        seldom("GPipe", "zero2", PACKED, False),
        ("Interleaved1F1B", "zero1", PACKED, True),
        ("Interleaved1F1B", "ddp", Compression("low-rank:2", gradients="low-rank:2"), None),
    ],
)
def test_as_many_bytes_are_planned_as_are_scheduled(
    world: Worlds, schedule: str, strategy: str, packed: Compression, fused: bool | None
) -> None:
    """`fused`: tied embeddings, by one sum or by two."""
    planned, scheduled = world(4).run(_bytes, schedule, strategy, packed, fused)[0]
    assert planned == scheduled


BOTH = Compression("low-rank:2", Transport(codec="int8", feedback="first"))


@pytest.mark.parametrize("schedule, packed", [("1F1B", PACKED), ("1F1B", BOTH), ("Interleaved1F1B", BOTH)])
def test_the_plan_counts_what_senders_keep_for_messages(world: Worlds, schedule: str, packed: Compression) -> None:
    found = world(4).run(_kept_bytes, schedule, packed)
    assert any(held for of_rank in found for _, held in of_rank.values())
    for of_rank in found:
        assert all(planned == held for planned, held in of_rank.values()), found


def _kept_bytes(schedule: str, packed: Compression) -> Any:
    layout, batching, precision = Layout(2, schedule, "ddp", packed), Batching(1, 4), towpath.Precision("float16")
    pipeline, planner = _both(layout, fused=None, precision=precision)
    stages = planner._stages(layout, batching, planner._walks(schedule, layout.pipeline, batching.micro_steps)[0])
    found: dict[int, tuple[int, int]] = {}
    for stage in pipeline._stages:
        index = stage.stage_index
        memory = planner._stage_memory(index, stages[index], layout, batching, in_flight=1.0)
        held = sum(kept.nbytes for sender in stage.senders.values() for kept in sender.state)
        found[index] = memory.get("compression", 0), held
    return found


def _bytes(schedule: str, strategy: str, packed: Compression, fused: bool | None) -> Any:
    # A name would stand for the ranks of this machine, which are one node.
    layout = Layout(
        2, schedule, towpath.strategy(strategy, towpath.Topology(2, 1)), replace(packed, fused_embeddings=bool(fused))
    )
    pipeline, planner = _both(layout, fused, towpath.Precision())
    scheduled, priced = pipeline.schedule(towpath.Topology(4, 1)), planner.predict(layout, Batching(1, 4))
    return (priced.inter_bytes, priced.intra_bytes), (scheduled.inter_bytes, scheduled.intra_bytes)


def _both(
    layout: Layout, fused: bool | None, precision: towpath.Precision, copies: int = 2
) -> tuple[Pipeline, Pipelines]:
    """Return a pipeline of two ranks with so many copies on four nodes, and the planner for its model."""
    pipeline = Pipeline(
        [partial(_Stage, index, layout.stages) for index in range(layout.stages)],
        layout.strategy,
        mesh=init_device_mesh("cpu", (2, copies), mesh_dim_names=("pp", "dp")),
        schedule=layout.schedule,
        micro_batches=4,
        loss=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()),
        example=torch.zeros(1, TOKENS, dtype=torch.int64),
        units=[nn.Linear],
        compression=layout.compression,
        precision=precision,
        tied=("tokens", "head") if fused is not None else ("", ""),
    )
    specs = {stage.stage_index: [u.plan.spec for u in stage.engine.units] for stage in pipeline._stages}
    everyones: list[Any] = [None] * 2
    torch.distributed.all_gather_object(everyones, specs, group=pipeline._group)
    by_stage: dict[int, list[UnitSpec]] = {index: found for each in everyones for index, found in each.items()}
    models = [
        Model("", TOKENS, tuple(ModelUnit(spec, 0.0, 0.0, 0.0) for spec in by_stage[i])) for i in range(layout.stages)
    ]
    tied = VOCABULARY * WIDTH if fused is not None else 0
    staged = StagedModel(models[0], tuple(models), WIDTH, tied)
    cluster = replace(made_profile(), topology=towpath.Topology(4, copies // 2)).cluster()
    request = Request(4 * copies, 1 << 30, precision, optimizer=Optimizer.named("sgd"), checkpointing=False)
    return pipeline, Pipelines(lambda _: staged, cluster, request, walks)
