"""How a job starts on GPUs: `towpath.init()`, groups that connect, and what is refused. Skipped without a GPU.

Ranks that share a GPU are hosts of their own to NCCL (`share_gpu`).
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import towpath
from benchmarks.harness.shared_gpu import share_gpu
from tests.ranks.test_pipeline import BATCH, LENGTH, _gpt, _token_loss
from towpath.errors import TopologyError
from towpath.pipeline import Pipeline, split

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROOT = Path(__file__).parents[2]
BOTH = "cpu:gloo,cuda:nccl"
PATIENCE_SECONDS = 120  # a rank that hangs says where, and ends


def _spawn(world: int, folder: Path, work: Any, *args: Any) -> None:
    torch.multiprocessing.spawn(_rank, (world, folder / "meeting", work, args), nprocs=world)  # pyright: ignore


def _rank(rank: int, world: int, meeting: Path, work: Any, args: tuple[Any, ...]) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    work(rank, world, f"file://{meeting}", *args)
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(rank: int, world: int, meeting: str, backend: str = BOTH, bound: bool = False, own_host: bool = True) -> None:
    if own_host:
        share_gpu(rank)
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0) if bound else None
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world, device_id=device)


def test_one_process_initializes_shards_and_trains(tmp_path: Path) -> None:
    _spawn(1, tmp_path, _train_alone)


def _train_alone(rank: int, world: int, meeting: str) -> None:
    device = towpath.init()
    assert device == torch.device("cuda", 0) == towpath.init()
    model = towpath.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).to(device), "zero3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, losses = torch.randn(16, 8, device=device), []
    for _ in range(10):
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_model_in_host_memory_is_moved_unit_by_unit(tmp_path: Path) -> None:
    """Only rank 0 has it. No rank ever has all of it on its GPU."""
    _spawn(2, tmp_path, _move)


def _move(rank: int, world: int, meeting: str) -> None:
    _join(rank, world, meeting)
    device = torch.device("cuda", 0)
    with torch.device("meta" if rank else "cpu"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024)) for _ in range(32)))
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    towpath.shard(nn.Sequential(nn.Linear(8, 8)), "zero3", topology=towpath.Topology(1, 2), device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = towpath.shard(model, "zero3", topology=towpath.Topology(1, 2), device=device)
    assert torch.cuda.max_memory_allocated() - before < 1.3 * whole  # shards, their gradients, and a few units
    assert {t.device for t in (*model.parameters(), *model.buffers())} == {device}
    model(torch.randn(4, 1024, device=device)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "arguments",
    [("train.py", "zero3", "3"), ("resnet.py", "paro-iig", "5"), ("codec.py", "10"), ("meta_device.py", "2")],
    ids=lambda arguments: arguments[0],
)
def test_examples_run_under_torchrun_on_all_gpus(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    ranks = ("--standalone", "--nproc-per-node", str(torch.cuda.device_count()))
    script = (str(ROOT / "examples" / arguments[0]), *arguments[1:])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *ranks, *script],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout


@pytest.mark.parametrize("bound", [False, True], ids=["no bound device", "bound device"])
def test_all_ranks_connect_before_some_of_them_are_probed(tmp_path: Path, bound: bool) -> None:
    """ "auto" begins with messages between some ranks only."""
    _spawn(4, tmp_path, _probe, bound)


def _probe(rank: int, world: int, meeting: str, bound: bool) -> None:
    from towpath.auto.probe import probe

    _join(rank, world, meeting, bound=bound)
    assert probe(towpath.Topology(2, 2), 1.0).has("inter, one")


@pytest.mark.parametrize("bound", [False, True], ids=["no bound device", "bound device"])
def test_a_tied_pipeline_of_three_stages_starts_and_trains(tmp_path: Path, bound: bool) -> None:
    """The group of the two ends is no matter of the stage between them."""
    _spawn(3, tmp_path, _tied, bound)


def _tied(rank: int, world: int, meeting: str, bound: bool) -> None:
    _join(rank, world, meeting, bound=bound)
    example = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    mesh = init_device_mesh("cuda", (3, 1), mesh_dim_names=("pp", "dp"))
    stages = [stage.cuda() for stage in split(_gpt(tied=True), 3, example)]
    pipeline = Pipeline(stages, "ddp", mesh=mesh, micro_batches=3, loss=_token_loss, example=example)
    optimizer = torch.optim.SGD(list(pipeline.parameters()), lr=0.1)
    ids = torch.randint(24, (3 * BATCH, LENGTH), generator=torch.Generator().manual_seed(0)).cuda()
    losses: list[float] = []
    for _ in range(3):
        losses.append(float(pipeline.step(ids, target=ids)))
        assert torch.isfinite(pipeline.clip_grad_norm_(1.0))
        optimizer.step()
        pipeline.zero_grad()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("backend", [BOTH, "nccl"])
def test_ranks_that_share_a_gpu_are_refused_on_every_rank(tmp_path: Path, backend: str) -> None:
    _spawn(2, tmp_path, _share, backend)


def _share(rank: int, world: int, meeting: str, backend: str) -> None:
    _join(rank, world, meeting, backend, own_host=False)
    with pytest.raises(TopologyError, match="ranks 0 and 1 share a GPU"):
        towpath.shard(nn.Linear(4, 4).cuda(), "zero3")


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cpu"), ("gloo", "cuda")])
def test_a_model_that_the_group_cannot_carry_is_refused_on_every_rank(
    tmp_path: Path, backend: str, device: str
) -> None:
    _spawn(2, tmp_path, _refuse, backend, device)


def _refuse(rank: int, world: int, meeting: str, backend: str, device: str) -> None:
    _join(rank, world, meeting, backend)
    with pytest.raises(TopologyError, match=r"the model is on .*towpath\.init\(\)"):
        towpath.shard(nn.Linear(4, 4).to(device), "zero3")


def test_buffers_on_the_host_are_broadcast_where_the_group_has_nccl_alone(tmp_path: Path) -> None:
    _spawn(2, tmp_path, _host_buffers)


def _host_buffers(rank: int, world: int, meeting: str) -> None:
    _join(rank, world, meeting, "nccl")
    model: Any = nn.Linear(4, 4).cuda()
    model.register_buffer("on_host", torch.full((3,), rank, dtype=torch.int16))
    model.register_buffer("on_gpu", torch.full((3,), rank, dtype=torch.int16, device="cuda"))
    model = towpath.shard(model, "zero3")
    assert not model.on_host.any() and not model.on_gpu.any()
