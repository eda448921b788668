"""What `towpath.wires` says to programs that misuse it: an error on every rank, never other values or a hang."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import towpath
from tests.ranks.server import on_ranks, run_ranks
from towpath import Topology
from towpath.errors import ConfigError, MismatchError, ShardError, StepError


def sharded(*blocks: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A model of two blocks and a root, each an FSDPModule, with the same values on every rank."""
    torch.manual_seed(0)
    first, second = (*map(copy.deepcopy, blocks), nn.Linear(6, 6), nn.Linear(6, 6))[:2]
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(first), nn.Sequential(second)).to(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (model[1], model[2], model):
        fully_shard(block, mesh=mesh)
    return model


def sharded_over(mesh: DeviceMesh) -> nn.Linear:
    model = nn.Linear(4, 6).double()
    fully_shard(model, mesh=mesh)
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
        model = sharded_over(DeviceMesh.from_group(group, "cpu"))  # pyright: ignore
        with pytest.raises(ConfigError, match="2 on node 0, 1 on node 1"):
            towpath.wires(model, topology=Topology(2, 2))


@on_ranks(2)
def test_ranks_with_other_dtypes_name_them() -> None:
    model = sharded(dtype=torch.float32 if dist.get_rank() else torch.float64)
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
    model = sharded_over(DeviceMesh.from_group(group, "cpu"))  # pyright: ignore
    if dist.get_rank() == 0:
        with pytest.raises(ConfigError, match=r"wires\(\).*ranks \[1\]"):
            towpath.wires(model, topology=Topology(2, 1))


class Branches(nn.Module):
    """A module whose forward passes use one of two layers of different sizes in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide, self.passes = nn.Linear(6, 6), nn.Linear(6, 24), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.narrow(x) if self.passes % 2 else self.wide(x).view(*x.shape, 4).sum(-1)


def check_like_stock(
    run: Callable[[nn.Sequential], list[torch.Tensor]], topology: Topology, *blocks: nn.Module
) -> None:
    """Compare what `run` returns for a model with wires, and for one without."""
    plain, wired = sharded(*blocks), sharded(*blocks)
    towpath.wires(wired, topology=topology)
    for one, other in zip(run(plain), run(wired), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@on_ranks(4)
def test_gradients_of_other_parameters_than_before_are_right() -> None:
    def run(model: nn.Sequential) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            train(model, optimizer, step)
            model[1].requires_grad_(step != 1)
            next(model[2].parameters()).requires_grad_(step != 2)
        return [p.full_tensor() for p in model.parameters()]  # pyright: ignore

    check_like_stock(run, Topology(2, 2), Branches())


@on_ranks(4)
def test_inference_mode_between_steps_changes_nothing() -> None:
    def run(model: nn.Sequential) -> list[torch.Tensor]:
        optimizer, outputs = torch.optim.SGD(model.parameters(), lr=0.1), list[torch.Tensor]()
        for step in range(3):
            train(model, optimizer, step)
            with torch.inference_mode():
                outputs.append(model(torch.ones(2, 4, dtype=torch.float64)).clone())
        return outputs

    check_like_stock(run, Topology(2, 2))


@on_ranks(2)
def test_an_error_in_a_sum_over_replicas_is_not_hidden() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded_over(mesh)
    towpath.wires(model, gradients="int8", topology=Topology(2, 1))
    with pytest.raises(ConfigError, match="reduce_dtype"):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def write_on_one_rank() -> None:
    model = sharded()
    towpath.wires(model, topology=Topology(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    if dist.get_rank() == 0:
        with torch.no_grad():
            next(model[2].parameters()).mul_(0.5)
    with pytest.raises(StepError, match=r"param_sync of unit.*Weights are sent after they have changed"):
        train(model, optimizer)
    dist.barrier()  # no rank ends before the other has raised


def test_weights_written_on_one_rank_only_are_reported() -> None:
    run_ranks(write_on_one_rank, 2)  # ranks of their own: their transfers are stuck afterwards


def evaluate_after_writes(blocks: dict[int, int], match: str) -> None:
    """Write to one block on each of these ranks, and evaluate once. No optimizer step follows, so none compares."""
    model = sharded()
    towpath.wires(model, topology=Topology(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    model.eval()
    model(torch.ones(2, 4, dtype=torch.float64))
    if dist.get_rank() in blocks:
        with torch.no_grad():
            next(model[blocks[dist.get_rank()]].parameters()).mul_(0.5)
    with pytest.raises(StepError, match=match), torch.inference_mode():
        model(torch.ones(2, 4, dtype=torch.float64))
    dist.monitored_barrier()  # no rank ends before the others have raised


def test_an_evaluation_with_weights_that_one_rank_has_written_fails_on_all_ranks() -> None:
    run_ranks(partial(evaluate_after_writes, {0: 2}, "param_sync of unit '2'"), 4)


def test_an_evaluation_with_different_units_written_in_a_column_fails_on_all_ranks() -> None:
    run_ranks(partial(evaluate_after_writes, {0: 1, 2: 2}, "param_sync of unit"), 4)


@on_ranks(2)
def test_ranks_with_fewer_batches_join_under_ddp() -> None:
    results: list[list[torch.Tensor]] = []
    for wired in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6)).double())
        if wired:
            towpath.wires(model, topology=Topology(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(2 + dist.get_rank()):
                train(model, optimizer, step)
        train(model, optimizer)  # the ranks still agree on what they have sent
        results.append([p.detach() for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@on_ranks(2)
def test_copies_of_a_ddp_with_wires_are_refused() -> None:
    model = DistributedDataParallel(nn.Linear(4, 6).double())
    towpath.wires(model, topology=Topology(2, 1))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ShardError, match="state_dict"):
            copied(model)
    copy.deepcopy(model.module)
    pickle.dumps(model.state_dict())


@on_ranks(2)
def test_a_nan_in_the_weights_of_one_rank_changes_no_transfer() -> None:
    def run(model: nn.Sequential) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer)
        for p in model[2].parameters():
            p.grad = torch.full_like(p, math.nan if dist.get_rank() == 1 else 0.0)
        optimizer.step()
        outputs = [model(torch.ones(2, 4, dtype=torch.float64)) for _ in range(2)]
        return [output.isnan().double() for output in outputs]

    check_like_stock(run, Topology(2, 1))


@on_ranks(2)
def test_a_negative_zero_is_sent() -> None:
    def run(model: nn.Sequential) -> list[torch.Tensor]:
        signs: list[torch.Tensor] = []
        for value in (0.0, -0.0):
            with torch.no_grad():
                for p in model[2].parameters():
                    p.fill_(value)
            model[2].unshard()  # pyright: ignore
            signs += [torch.signbit(p).double() for p in model[2].parameters()]
            model[2].reshard()  # pyright: ignore
        return signs

    check_like_stock(run, Topology(2, 1))


@on_ranks(4)
def test_ranks_compare_over_several_groups_in_one_order() -> None:
    kept = [bytearray(1000 * dist.get_rank() + 50 * i) for i in range(300)][:: 1 + dist.get_rank()]  # other addresses
    models: list[nn.Module] = []
    for _ in range(6):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        models.append(sharded_over(mesh))
        towpath.wires(models[-1], topology=Topology(4, 1))
        kept = kept[:: 1 + dist.get_rank() % 2]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    for model in models:
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()


@on_ranks(2)
def test_ranks_that_step_with_other_options_are_reported_before_the_step() -> None:
    model = sharded()
    towpath.wires(model, topology=Topology(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = (0.1, 0.2)[dist.get_rank()]
    with pytest.raises(StepError, match=r"different programs.*SGD.step\(\) with lr=0.1.*SGD.step\(\) with lr=0.2"):
        train(model, optimizer, 1)


@pytest.mark.parametrize("form", ["a keyword", "an argument"])
@on_ranks(2)
def test_passes_of_a_closure_are_compared_before_its_step(form: str) -> None:
    """Lightning and LBFGS pass the forward and backward passes to `step`."""
    model = sharded()
    towpath.wires(model, topology=Topology(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4, dtype=torch.float64)).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    def step() -> torch.Tensor:
        return optimizer.step(closure=closure) if form == "a keyword" else optimizer.step(closure)  # pyright: ignore

    assert [step().item(), step().item()] == losses
    assert losses[1] < losses[0]
    before = [parameter.full_tensor() for parameter in model.parameters()]  # pyright: ignore
    if dist.get_rank():
        model[1], model[2] = model[2], model[1]
    with pytest.raises(StepError, match="the ranks ran different units"):
        step()
    if dist.get_rank():
        model[1], model[2] = model[2], model[1]
    assert all(map(torch.equal, before, [parameter.full_tensor() for parameter in model.parameters()]))  # pyright: ignore
