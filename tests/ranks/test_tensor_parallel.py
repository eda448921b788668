"""Tensor-parallel models train, load and initialize as whole ones do, and what cannot be is refused.

All is in float64, where only the order of sums differs from one process (see TOLERANCE in twin.py).
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import towpath
from tests.ranks.models import DEVICE, noise
from tests.ranks.reference import optimizer_for
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn, strategy_of
from tests.ranks.test_every_model import SHAPE, WIDTH, Block
from tests.ranks.twin import TOLERANCE
from towpath import Topology, errors


class ParallelModel(nn.Module):
    """Two transformer-like MLPs: matrices are split over the tensor-parallel ranks, norms and embeddings are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


# Two data-parallel ranks: on two nodes (the tensor-parallel mesh is the node), or, for mics, as one.
PARALLEL = (
    *((label, Topology(2, 1)) for label in ("zero3", "hpz", "paro-iig", "zero1", "paro-igg offload=params")),
    ("mics:2x1", Topology(1, 2)),
)


@in_turn(PARALLEL, 1, "parallel")
def test_a_tensor_parallel_model_trains_exactly_and_clips_by_the_norm_over_both_meshes(
    world: Worlds, parallel: tuple[str, Topology]
) -> None:
    world(4).run(_train_tensor_parallel, *parallel)


SPLIT_MATRICES = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
# The norm's parameters are the same on every rank of the mesh, and their gradients come as partial sums.
SPLIT_ROWS_TOO = {
    "norm": SequenceParallel(sequence_dim=0),
    "mlp.0": ColwiseParallel(input_layouts=Shard(0)),
    "mlp.2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    "": PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(0),
        output_layouts=Shard(0),
        desired_output_layouts=Replicate(),
    ),
}


def _mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "tp"))


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: dict[str, Any]) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh["tp"], plan)
    return model


def _rows(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(noise(rank, 0, step, 4, WIDTH)).square().mean()


def _train_tensor_parallel(label: str, topology: Topology) -> None:
    _check_tensor_parallel(label, topology, SPLIT_MATRICES)


def _check_tensor_parallel(label: str, topology: Topology, plan: dict[str, Any]) -> None:
    mesh = _mesh()
    torch.manual_seed(7)
    plain = ParallelModel().to(DEVICE, torch.float64)
    model = _tensor_parallel(copy.deepcopy(plain), mesh, plan)
    towpath.shard(model, strategy_of(label, topology), topology=topology, group=mesh["dp"].get_group())
    optimizers = [optimizer_for(model), optimizer_for(plain)]
    for step in range(3):
        _rows(model, mesh["dp"].get_local_rank(), step).backward()
        for rank in range(2):
            (_rows(plain, rank, step) / 2).backward()
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        # float64, sums in another order; each split matrix counts in full, and what is not split counts once.
        assert abs(float(found) - float(expected)) <= TOLERANCE * float(expected)
        assert float(expected) > 0.05  # it clips
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert found.shape == expected.shape, name
        assert (found.full_tensor() - expected).abs().max() <= TOLERANCE, name
        for statistic in (lambda t: t.norm(), lambda t: t.sum(), lambda t: t.norm(float("inf")), lambda t: t.max()):
            assert abs(float(statistic(found.detach()) - statistic(expected.detach()))) <= TOLERANCE, name


@on_ranks(4)
def test_other_layouts_train_exactly() -> None:
    _check_tensor_parallel("zero3", Topology(2, 1), SPLIT_ROWS_TOO)


@on_ranks(4)
def test_an_optimizer_made_before_shard_is_refused() -> None:
    mesh = _mesh()
    model = _tensor_parallel(ParallelModel().double(), mesh, SPLIT_MATRICES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name = next(name for name, p in model.named_parameters() if isinstance(p, DTensor))
    towpath.shard(model, "zero3", topology=Topology(2, 1), group=mesh["dp"].get_group())
    _rows(model, mesh["dp"].get_local_rank(), 0).backward()
    words = rf"SGD has the DTensor that {name} was before shard\(\).*Make the optimizer after shard"
    with pytest.raises(errors.ShardError, match=words):
        optimizer.step()
    with pytest.raises(errors.ShardError, match=words):
        towpath.checkpoint.get_optimizer_state_dict(model, optimizer)


@on_ranks(4)
def test_whole_values_are_loaded_into_split_parameters() -> None:
    mesh = _mesh()
    torch.manual_seed(7)
    other = ParallelModel()
    model = _tensor_parallel(ParallelModel(), mesh, SPLIT_ROWS_TOO)
    towpath.shard(model, "zero3", topology=Topology(2, 1), group=mesh["dp"].get_group())
    model.load_state_dict(other.state_dict())
    for (name, found), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), expected), name
    with towpath.full_parameters(model):
        for found, expected in zip(model.parameters(), other.parameters(), strict=True):
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.equal(whole, expected)


@on_ranks(4)
def test_what_a_tensor_parallel_mesh_cannot_have_is_refused() -> None:
    mesh = _mesh()
    group = {"topology": Topology(2, 1), "group": mesh["dp"].get_group()}
    offloading = towpath.strategy("zero2", Topology(2, 1), offload="optimizer")
    for strategy, options, words in (
        ("zero3", {"topology": SHAPE}, "Pass group=, the data-parallel process group"),  # as if nothing were split
        ("zero++", group, r"zero\+\+ has codecs, and the model is on a tensor-parallel mesh"),
        (offloading, group, "tensor-parallel mesh"),
    ):
        model = _tensor_parallel(ParallelModel(), mesh, SPLIT_MATRICES)
        with pytest.raises(errors.ShardError, match=words):
            towpath.shard(model, strategy, **options)


# --- values -----------------------------------------------------------------------------------------------------------

SPLIT = {"0": ColwiseParallel(), "1": RowwiseParallel()}


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_of_split_parameters_a_rank_asks_for_its_part_only(world: Worlds, device: str) -> None:
    asked: Counter[str] = sum(world(4).run(_split, device), Counter[str]())
    assert asked["0.weight"] == asked["1.weight"] == 6 * 8  # each element once
    assert asked["1.bias"] == 2 * 6  # once on each rank of the mesh


def _split(device: str) -> Counter[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = {"0.weight": (8, 6), "0.bias": (8,), "1.weight": (6, 8), "1.bias": (6,)}
    whole = {name: torch.randn(shape, generator=torch.Generator().manual_seed(7)) for name, shape in values.items()}
    counts = Counter[str]()

    def asked(name: str, start: int, end: int) -> Tensor:
        counts[name] += end - start
        return whole[name].reshape(-1)[start:end]

    with torch.device(device):
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    model = parallelize_module(model, mesh["tp"], SPLIT)
    towpath.shard(model, "zero3", topology=Topology(1, 2), group=mesh["dp"].get_group(), values=asked)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole[name]), name
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    expected = nn.functional.linear(nn.functional.linear(x, whole["0.weight"], whole["0.bias"]), whole["1.weight"])
    assert torch.allclose(model(x), expected + whole["1.bias"], atol=1e-5)
    return counts


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_tensor_parallel_model_begins_alike_on_its_mesh_whatever_its_ranks_have_drawn(
    world: Worlds, device: str
) -> None:
    """Halves of a matrix are not alike, and what is replicated is."""
    for seeds in ([0, 1, 2, 3], [5, 5, 5, 5]):
        drawn = world(4).run(_drawn, device, seeds)
        assert all(torch.equal(one, other) for found in drawn for one, other in zip(drawn[0], found, strict=True))
        for matrix, dim in zip(drawn[0][:4:2], (0, 1), strict=True):
            assert not torch.equal(*matrix.chunk(2, dim))


def _drawn(device: str, seeds: list[int]) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(seeds[dist.get_rank()])
    with torch.device(device):
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3))  # of the last one all is on each
    model = parallelize_module(model, mesh["tp"], SPLIT)
    towpath.shard(model, "zero3", topology=Topology(1, 2), group=mesh["dp"].get_group())
    return [parameter.full_tensor().detach() for parameter in model.parameters()]
