"""What `towpath.wires` says to programs that misuse it: an error on every rank, never other values or a hang."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import towpath
from tests.ranks.server import on_ranks
from towpath import Topology
from towpath.errors import ConfigError, MismatchError


def sharded(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A model of two blocks and a root, each an FSDPModule, with the same values on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6)), nn.Sequential(nn.Linear(6, 6))).to(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (model[1], model[2], model):
        fully_shard(block, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    """Make a step on a batch of this rank's own."""
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    model(torch.randn(3, 4, generator=generator, dtype=torch.float64).to(dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_a_topology_of_other_ranks_than_the_job_is_refused() -> None:
    model = sharded()
    for topology in (Topology(3, 2), Topology(1, 1), Topology(2, 2)):
        with pytest.raises(ConfigError, match=f"{topology.world} ranks, and the job has 2"):
            towpath.wires(model, topology=topology)


@on_ranks(4)
def test_a_process_group_with_uneven_nodes_is_refused() -> None:
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() < 3:
        model = fully_shard(nn.Linear(4, 6), mesh=DeviceMesh.from_group(group, "cpu"))  # pyright: ignore
        with pytest.raises(ConfigError, match="2 on node 0, 1 on node 1"):
            towpath.wires(model, topology=Topology(2, 2))


@on_ranks(2)
def test_ranks_with_other_dtypes_name_them() -> None:
    model = sharded(torch.float32 if dist.get_rank() else torch.float64)
    with pytest.raises(MismatchError, match=r"float64.*float32"):
        towpath.wires(model, topology=Topology(2, 1))


@on_ranks(2)
def test_a_codec_of_float64_gradients_is_refused() -> None:
    model = sharded()
    towpath.wires(model, gradients="int8", topology=Topology(2, 1))
    with pytest.raises(ConfigError, match="reduce_dtype"):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@on_ranks(2)
def test_wires_on_one_rank_only_name_the_others() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = fully_shard(nn.Linear(4, 6), mesh=DeviceMesh.from_group(group, "cpu"))  # pyright: ignore
    if dist.get_rank() == 0:
        with pytest.raises(ConfigError, match=r"wires\(\).*ranks \[1\]"):
            towpath.wires(model, topology=Topology(2, 1))
