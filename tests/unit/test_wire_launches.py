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
from benchmarks.harness.fake_world import CALLS, CODECS, MESSAGES, OTHERS, Launches, fake_world
from tests.ranks.strategies import seldom
from towpath.core.strategy import TransferKind

WIDTH, STEPS, MICRO_STEPS = 96, 2, 2
UNITS, MOST_KERNELS = 3, 3


def _train(topology: towpath.Topology, **wires: Any) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
    mesh = init_device_mesh("cpu", (topology.world,))
    for module in (*model, model):
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


@pytest.fixture(autouse=True)
def _encode_small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("towpath.core.transport.SMALLEST_BYTES", 1)


@pytest.mark.parametrize("shape", [(2, 8), seldom((2, 2)), seldom((8, 1))], ids=str)
def test_gathers_and_reductions_take_two_calls_at_most(shape: tuple[int, int]) -> None:
    with fake_world(*shape) as (topology, launches):
        _train(topology)
    rows, passes = int(topology.ranks_per_node > 1), UNITS * STEPS * MICRO_STEPS
    assert not any(job[MESSAGES] for _, job in launches.jobs)
    # Weights cross before the first step and after each, in one call. Sizes are agreed once a step, for all units.
    sent, agreed = _jobs(launches, TransferKind.PARAM_SYNC), _jobs(launches, TransferKind.MESSAGE_SIZES)
    assert [job[CALLS] for job in sent] == [1] * UNITS * (STEPS + 1)
    assert [job[CALLS] for job in agreed] == [1] * STEPS
    # All gathers, of the forward and the backward pass, stay inside the node.
    gathers = _jobs(launches, TransferKind.GATHER)
    assert [job[CALLS] for job in gathers] == [1] * 2 * rows * passes
    reductions = _jobs(launches, TransferKind.REDUCE), _jobs(launches, TransferKind.GRAD_SYNC)
    assert [[job[CALLS] for job in jobs] for jobs in reductions] == [[1] * rows * passes, [1] * passes]
    # One copy changes the order of a node's slices. A CPU decodes what other nodes have sent node by node.
    assert all(job[OTHERS] <= 1 for jobs in (gathers, *reductions) for job in jobs)
    assert all(job[OTHERS] < topology.nodes for job in sent)


def test_coded_gradients_take_one_call_and_few_kernels() -> None:
    for codec in ("int8", "int4:64"):
        with fake_world(2, 8) as (topology, launches):
            _train(topology, gradients=codec)
        for job in _jobs(launches, TransferKind.GRAD_SYNC):
            assert job[CALLS] == 1 and 0 < job[CODECS] <= MOST_KERNELS, (codec, job)
