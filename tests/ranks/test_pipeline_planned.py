"""What the planner counts of a pipeline, against the schedule of the pipeline that runs.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
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


@pytest.mark.parametrize("packed", [Compression(), Compression("low-rank:2", "int8", every_gradient=True)])
def test_the_plan_counts_shares_of_messages_and_their_gathers(world: Worlds, packed: Compression) -> None:
    for planned, scheduled, messages in world(4).run(_bytes_of_shares, packed):
        assert planned == scheduled and min(scheduled) > 0
        if packed == Compression():  # two messages of each micro-batch, in two shares, and two ranks gather the other's
            assert scheduled == (messages, messages)


def _bytes_of_shares(packed: Compression) -> Any:
    layout = Layout(2, "1F1B", "ddp", packed, tensor=2)
    pipeline, planner = _both(layout, None, towpath.Precision("float16"), copies=1)
    priced, scheduled = planner.predict(layout, Batching(1, 4)), pipeline.schedule(towpath.Topology(2, 2))
    planned = priced.inter_bytes, priced.intra_bytes
    return planned, (scheduled.inter_bytes, scheduled.intra_bytes), 2 * 4 * TOKENS * WIDTH * 2


BOTH = Compression(*(Transport(codec=codec, feedback="first") for codec in ("low-rank:2", "int8")))


@pytest.mark.parametrize(
    "schedule, packed, tensor", [("1F1B", PACKED, 1), ("1F1B", BOTH, 2), ("Interleaved1F1B", BOTH, 1)]
)
def test_the_plan_counts_what_senders_keep_for_messages(
    world: Worlds, schedule: str, packed: Compression, tensor: int
) -> None:
    found = world(4).run(_kept_bytes, schedule, packed, tensor)
    assert any(held for of_rank in found for _, held in of_rank.values())
    for of_rank in found:
        assert all(planned == held for planned, held in of_rank.values()), found


def _kept_bytes(schedule: str, packed: Compression, tensor: int) -> Any:
    layout, batching = Layout(2, schedule, "ddp", packed, tensor), Batching(1, 4)
    pipeline, planner = _both(layout, None, towpath.Precision("float16"), copies=2 // tensor)
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
    """Return a pipeline of two ranks with so many copies, and the planner for its model.

    Each rank is on one of four nodes, or on one of two with its tensor-parallel peer.
    """
    sizes, nodes = (2, copies, layout.tensor), 4 // layout.tensor
    pipeline = Pipeline(
        [partial(_Stage, index, layout.stages) for index in range(layout.stages)],
        layout.strategy,
        mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp")),
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
    cluster = replace(made_profile(), topology=towpath.Topology(nodes, prod(sizes) // nodes)).cluster()
    request = Request(4 * copies, 1 << 30, precision, optimizer=Optimizer.named("sgd"), checkpointing=False)
    return pipeline, Pipelines(lambda _: staged, cluster, request, walks)
