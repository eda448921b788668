"""What `towpath.wires` launches on NCCL for each module of FSDP2, counted on one rank without the others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import towpath
from benchmarks.harness.fake_world import CALLS, CODECS, MESSAGES, Launches, fake_world
from tests.ranks.strategies import seldom
from towpath.core.strategy import TransferKind

WIDTH, STEPS, MICRO_STEPS = 96, 2, 2
MOST_KERNELS = 3  # of codecs in a gather


def _train(topology: towpath.Topology, **wires: Any) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    mesh = init_device_mesh("cpu", (topology.world,))
    for module in model:
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    towpath.wires(model, topology=topology, **wires)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(MICRO_STEPS):
            model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _jobs(launches: Launches, kind: TransferKind) -> list[Counter[str]]:
    return [counts for transfers, counts in launches.jobs if {t.kind for t in transfers} == {kind}]


@pytest.mark.parametrize("shape", [(2, 8), seldom((2, 2)), seldom((8, 1))], ids=str)
def test_gathers_and_reductions_take_two_calls_at_most(shape: tuple[int, int]) -> None:
    with fake_world(*shape) as (topology, launches):
        _train(topology)
    rows = int(topology.ranks_per_node > 1)
    gathers, sent = _jobs(launches, TransferKind.GATHER), _jobs(launches, TransferKind.PARAM_SYNC)
    # Weights cross before the first step and after each, in one call. All other gathers stay inside the node.
    assert [job[CALLS] for job in sent] == [1] * 3 * (STEPS + 1)
    assert all(job[CODECS] <= MOST_KERNELS for job in sent)
    assert len(gathers) >= rows * 3 * STEPS * MICRO_STEPS
    assert all(job[CALLS] == rows and not job[CODECS] for job in gathers)
    sums = _jobs(launches, TransferKind.REDUCE), _jobs(launches, TransferKind.GRAD_SYNC)
    assert [len(jobs) for jobs in sums] == [rows * 3 * STEPS * MICRO_STEPS, 3 * STEPS * MICRO_STEPS]
    assert all(job[CALLS] == 1 and not job[CODECS] for jobs in sums for job in jobs)
    assert not any(job[MESSAGES] for _, job in launches.jobs)


def test_coded_gradients_take_two_calls_and_few_kernels() -> None:
    for codec in ("int8", "int4:64"):
        with fake_world(2, 8) as (topology, launches):
            _train(topology, gradients=codec)
        for job in _jobs(launches, TransferKind.GRAD_SYNC):
            assert job[CALLS] == 1 and 0 < job[CODECS] <= 12, (codec, job)
