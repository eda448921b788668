"""What a pipeline's cables carried is what its job's schedule said: messages between stages, and what stages sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import towpath
from lab import Lab
from tests.lab.test_bytes import ABOVE, BELOW, counters_at_rest
from towpath.pipeline import Compression, Pipeline

WIDTH, TOKENS, MICRO_BATCHES = 192, 384, 4


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def sent_in_a_step(rank: int, world: int, mesh: list[Any], cases: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The bytes this node sent over its cable in a step of each case: by the kernel, and by the schedule."""
    topology = towpath.Topology(2, 2)
    ranks = torch.tensor(mesh)
    made = DeviceMesh("cpu", ranks, mesh_dim_names=("pp", "dp", "tp")[: ranks.dim()])
    found: list[tuple[int, int]] = []
    for case in cases:
        options: dict[str, Any] = {"schedule": "1F1B", "strategy": "zero1"} | case
        count = 4 if "Interleaved" in options["schedule"] else 2
        torch.manual_seed(0)  # tensor-parallel ranks have the same values
        example = torch.empty(TOKENS, WIDTH)
        pipeline = Pipeline(
            [partial(Stage) for _ in range(count)],
            mesh=made,
            micro_batches=MICRO_BATCHES,
            loss=_loss,
            example=example,
            **options,
        )
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        x = torch.randn(MICRO_BATCHES * TOKENS, WIDTH)
        for step in range(2):
            before = counters_at_rest() if step else 0
            pipeline.step(x, target=x)
            optimizer.step()
            optimizer.zero_grad()
        counted = counters_at_rest() - before
        found.append((counted, pipeline.schedule(topology).cable_bytes(topology.node_of(rank))))
    return found


CASES: list[dict[str, Any]] = [
    {},
    {"schedule": "Interleaved1F1B", "strategy": "zero3"},
    {"compression": Compression("low-rank:32")},
    {"compression": Compression("low-rank:32", "int8", every_gradient=True)},
]


@pytest.mark.parametrize(
    "mesh", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]], ids=["stages across nodes", "data-parallel ranks across nodes"]
)
def test_each_cable_carries_the_jobs_bytes(lab: Callable[..., Lab], mesh: list[list[int]]) -> None:
    for rank, answer in enumerate(lab(2, 2).call(sent_in_a_step, mesh, CASES)):
        for case, (counted, scheduled) in zip(CASES, answer, strict=True):
            assert scheduled * (1 - BELOW) <= counted <= scheduled * (1 + ABOVE), (rank, case)


def test_of_two_tensor_parallel_ranks_each_sends_half_of_every_message(lab: Callable[..., Lab]) -> None:
    """What the ranks of a node gather crosses no cable."""
    whole = 2 * MICRO_BATCHES * TOKENS * WIDTH * 4  # what both ranks would send of one stage's outputs
    cases = [CASES[0], {"schedule": "Interleaved1F1B"}, CASES[2]]
    for rank, answer in enumerate(lab(2, 2).call(sent_in_a_step, [[[0, 1]], [[2, 3]]], cases)):
        for case, (counted, scheduled) in zip(cases, answer, strict=True):
            assert scheduled * (1 - BELOW) <= counted <= scheduled * (1 + ABOVE), (rank, case)
        # Two stages have one message each for either node, and four stages have three.
        for (counted, _), messages in zip(answer, (1, 3), strict=False):
            assert counted == pytest.approx(messages * whole / 2, rel=ABOVE), rank
