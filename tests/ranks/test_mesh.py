"""shard(mesh=): the ranks and the topology as a DeviceMesh says them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import towpath
from tests.ranks.server import on_ranks
from towpath import Topology
from towpath.errors import ConfigError, ShardError


@on_ranks(4)
def test_a_mesh_says_which_ranks_share_a_model_and_which_of_them_a_copy() -> None:
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names[:2])
    parts = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
    rank = dist.get_rank()
    for given, shape, over in (
        (mesh, Topology(2, 2), [0, 1, 2, 3]),
        (mesh["shard"], Topology(1, 2), [rank // 2 * 2, rank // 2 * 2 + 1]),
        (mesh["replicate"], Topology(1, 2), [rank % 2, rank % 2 + 2]),
        (parts["replicate", "shard"], Topology(1, 2), [rank % 2, rank % 2 + 2]),
    ):
        for label in ("mics", "zero3"):
            named = towpath.strategy(label, exact=True)
            model: Any = towpath.shard(_model(), named, mesh=given, topology=None if given.ndim == 2 else shape)
            assert model.towpath_engine.strategy == towpath.strategy(label, shape, exact=True)
            assert model.towpath_engine.comm.groups.members == over
            held = torch.tensor(model.weight.to_local().numel())
            dist.all_reduce(held)
            models, copies = 4 // len(over), shape.nodes if label == "mics" else 1
            assert held == models * copies * 8 * 8
            model(torch.full((1, 8), float(rank))).sum().backward()
            mean = sum(over) / len(over)
            assert torch.equal(model.weight.grad.full_tensor(), torch.full((8, 8), mean))


def _model() -> nn.Module:
    return nn.Linear(8, 8, bias=False)


@on_ranks(4)
def test_a_mesh_that_cannot_be_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    with pytest.raises(ShardError, match="mesh= and group="):
        towpath.shard(_model(), "zero3", mesh=mesh, group=dist.group.WORLD)
    with pytest.raises(ConfigError, match="the mesh has 2 × 2 ranks"):
        towpath.shard(_model(), "zero3", mesh=mesh, topology=Topology(4, 1))
    with pytest.raises(ShardError, match="expected one dim, or two"):
        towpath.shard(_model(), "zero3", mesh=init_device_mesh("cpu", (2, 2, 1)))
    with pytest.raises(ShardError, match="must rise from row to row"):
        towpath.shard(
            _model(), "zero3", mesh=DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
        )
