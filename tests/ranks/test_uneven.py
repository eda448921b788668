"""Ranks whose data, buffers or writes differ, and models that come and go.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import towpath
from tests.ranks.models import noise
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.test_never_silent import Net
from tests.ranks.twin import Twin, mean_of_all_ranks
from towpath.errors import ConfigError, StepError

SHAPE = towpath.Topology(2, 1)
LABELS = ("zero3", "zero1", "paro-iig")
BATCHES = (5, 3)


def _batches(rank: int) -> list[Tensor]:
    return [noise(rank, 0, step) for step in range(BATCHES[rank])]


def test_a_rank_that_is_through_takes_part_with_gradients_of_zero(world: Worlds) -> None:
    world(2).run(_join)


def _join() -> None:
    rank = dist.get_rank()
    mine = _batches(rank)
    for build, label, units in (*((Net, n, None) for n in LABELS), (Towers, "zero3", [nn.Linear])):
        twin = Twin(build, lambda *_: torch.zeros(()), label, SHAPE, units=units)
        count = 0
        for batch in towpath.join(twin.sharded, mine):
            twin.sharded(batch).square().mean().backward()
            with mean_of_all_ranks(twin.plain):
                if count < len(mine):
                    twin.plain(mine[count]).square().mean().backward()
            assert torch.equal(batch, mine[min(count, len(mine) - 1)])
            twin.check_gradients()
            twin.step()
            count += 1
        assert count == max(BATCHES)
        twin.check_parameters()
        with pytest.raises(StepError, match="rank 1 has no batch at all"):
            for _ in towpath.join(twin.sharded, mine if rank == 0 else []):
                pytest.fail("it went on")


class Towers(nn.Module):
    """Side by side on the same input: nothing but the last of its gradients tells that one is through with backward."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([tower(x) for tower in self.towers]).sum(0)


@pytest.mark.parametrize("label", ["zero3", "ddp"])
@on_ranks(2)
def test_a_write_to_whole_parameters_that_differs_is_refused_by_name_or_taken_from_one_rank(label: str) -> None:
    rank = dist.get_rank()
    model: Any = towpath.shard(Net().double(), label, topology=SHAPE)
    with towpath.full_parameters(model), torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)  # alike: kept
    kept = [p.full_tensor().detach() for p in model.parameters()]
    with towpath.full_parameters(model), torch.no_grad():
        assert all(torch.equal(p, k) for p, k in zip(model.parameters(), kept, strict=True))
    for swap in (True, False):  # two values that change places, or others
        words = rf"^rank {rank}: parameter 'blocks.1.a.weight' was written.*rank 1 changed it.*modifier_rank=0"
        with pytest.raises(StepError, match=words), towpath.full_parameters(model), torch.no_grad():
            weight = model.blocks[1].a.weight
            if rank == 1:
                weight.view(-1)[[3, 4]] = weight.view(-1)[[4, 3]] if swap else torch.zeros(2).double()
    assert all(isinstance(p, towpath.ShardTensor) for p in model.parameters())
    with towpath.full_parameters(model, modifier_rank=1), torch.no_grad():
        model.first.bias.fill_(float(rank + 1))
    assert torch.equal(model.first.bias.full_tensor(), torch.full((6,), 2.0).double())


@on_ranks(2)
def test_models_that_come_and_go_leave_threads_and_descriptors_as_they_were() -> None:
    after: list[tuple[int, ...]] = []
    for _ in range(25):
        for label in ("zero3", "mics"):
            model: Any = towpath.shard(Net(), label, topology=SHAPE)
            model(torch.ones(2, 6)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            del model
        gc.collect()
        after.append(tuple(len(list(Path("/proc/self", kind).iterdir())) for kind in ("task", "fd")))
    assert after[-1] == after[0], after


@on_ranks(2)
def test_two_models_at_a_time_share_queues_and_train_as_alone() -> None:
    """One loss of both: their units' backward passes alternate on the queues that they share."""

    def loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
        return model(noise(rank, micro, step)).square().mean()

    twins = [Twin(Net, loss, label, SHAPE) for label in ("zero3", "paro-iig")]
    for step in range(3):
        (loss(twins[0].sharded, dist.get_rank(), 0, step) * loss(twins[1].sharded, dist.get_rank(), 0, step)).backward()
        with mean_of_all_ranks(nn.ModuleList(t.plain for t in twins)):
            (loss(twins[0].plain, dist.get_rank(), 0, step) * loss(twins[1].plain, dist.get_rank(), 0, step)).backward()
        for twin in twins:
            twin.check_gradients()
            twin.step()


def test_under_a_launcher_shard_refuses_to_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"rank 1: the launcher started 2 ranks.*init_process_group\(\)"):
        towpath.shard(nn.Linear(2, 2), "zero3")
