"""The engine on CUDA: one rank on NCCL, and several ranks that share one GPU. Skipped, and counted, without one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import towpath
from benchmarks.harness.shared_gpu import share_gpu
from tests.ranks.islands import Islands, fragments_of, mean_of
from tests.ranks.models import MODELS
from tests.ranks.reference import optimizer_for
from tests.ranks.strategies import strategy_of
from towpath import Topology
from towpath.engine import saved_activations
from towpath.train.config import Config, DataConfig
from towpath.train.data import corpus
from towpath.train.data.prepare import prepare
from towpath.train.job import init_distributed
from towpath.train.optimizers import can_skip_on_device
from towpath.train.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS, MICRO_STEPS = 3, 2
LABELS = (
    *("ddp", "zero2", "zero3", "hpz", "mics:2x1", "paro-iig", "paro-nig", "zero3@hierarchical", "zero3@ho-ring"),
    *("paro-igg offload=params", "paro-igg offload=optimizer+params"),
)


@pytest.mark.parametrize("precision", [None, towpath.Precision(params=torch.bfloat16, reduce=torch.float32)], ids=str)
@pytest.mark.parametrize("label", ["ddp", "zero3", "hpz", "zero3 offload=params"])
def test_one_rank_on_nccl_trains_as_the_bare_model(label: str, precision: Any, tmp_path: Path) -> None:
    _spawn(1, tmp_path, _train, label, Topology(1, 1), precision)


@pytest.mark.parametrize("label", LABELS)
def test_ranks_that_share_a_gpu_train_as_one_process(label: str, tmp_path: Path) -> None:
    _spawn(4, tmp_path, _train, label, Topology(2, 2), None)


@pytest.mark.parametrize("label", ["ddp", "zero3", "paro-igg", "zero1 offload=optimizer"])
def test_islands_that_share_a_gpu_train_as_in_one_process(label: str, tmp_path: Path) -> None:
    _spawn(4, tmp_path, _train_islands, label)


def test_the_host_is_not_held_up_by_a_step(tmp_path: Path) -> None:
    """A step enqueues its work and returns: nothing in it waits for the device."""
    _spawn(2, tmp_path, _enqueue_under_sync_debug)


@pytest.mark.parametrize("offload_activations", [False, True])
def test_towpath_train_does_not_wait_for_the_device(tmp_path: Path, offload_activations: bool) -> None:
    """Only for the loss and the norm, by an event behind them, once the optimizer is enqueued."""
    (tmp_path / "text.txt").write_text("".join(f"the {i}th line says {i * i % 97}\n" for i in range(400)))
    prepare(corpus.find(DataConfig(text=(str(tmp_path / "text.txt"),))), "bytes", tmp_path / "tokens")
    _spawn(2, tmp_path, _train_steps_under_sync_debug, tmp_path, offload_activations)


def test_the_seconds_of_transfers_are_the_devices(tmp_path: Path) -> None:
    _spawn(2, tmp_path, _time_transfers)


def _spawn(world: int, folder: Path, work: Any, *args: Any) -> None:
    torch.multiprocessing.spawn(_rank, (world, folder / "meeting", work, args), nprocs=world)  # pyright: ignore


def _rank(rank: int, world: int, meeting: Path, work: Any, args: tuple[Any, ...]) -> None:
    share_gpu(rank)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        work(*args)
    finally:
        dist.destroy_process_group()


def _train(label: str, topology: Topology, precision: towpath.Precision | None) -> None:
    entry = MODELS["gpt"]
    dtype = torch.float64 if precision is None else torch.float32
    plain, model = (entry.make(dtype).cuda() for _ in range(2))
    towpath.shard(model, strategy_of(label, topology), topology=topology, precision=precision)
    optimizers = optimizer_for(plain), optimizer_for(model)
    for step in range(STEPS):
        if precision is not None:
            _check_gradients_of_one_rank(model, step)
        for micro in range(MICRO_STEPS):
            with nullcontext() if micro == MICRO_STEPS - 1 else model.no_sync():
                (_loss(model, dist.get_rank(), micro, step, dtype) / MICRO_STEPS).backward()
        for rank in range(topology.world):
            for micro in range(MICRO_STEPS):
                (_loss(plain, rank, micro, step, dtype) / (MICRO_STEPS * topology.world)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if topology.world > 1:
        assert towpath.stats(model).transfers
    if precision is None:
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            # In float64 only the order of sums differs.
            assert (found.full_tensor() - expected).abs().max() <= 1e-9, name


def _train_islands(label: str) -> None:
    """With a delay. In the middle of an exchange, all islands are averaged."""
    topology, outer = Topology(2, 2), towpath.Outer(every=2, fragments=2, delay=1, blend=0.5)
    plain, model = (MODELS["gpt"].make(torch.float64).cuda() for _ in range(2))
    towpath.shard(model, strategy_of(label, topology, outer=outer))
    islands = Islands(plain, outer, 2, fragments_of(model, outer), optimizer_for)
    gradients = mean_of(lambda of, rank, micro, step: _loss(of, rank, micro, step, torch.float64))
    optimizer = optimizer_for(model)
    for step in range(5):
        _loss(model, dist.get_rank(), 0, step, torch.float64).backward()
        optimizer.step()
        optimizer.zero_grad()
        islands.step(lambda island, copy, step=step: gradients(range(2 * island, 2 * island + 2), step)(copy))
    towpath.average_islands(model)
    islands.average()
    expected = dict(islands.models[0].named_parameters())
    for name, found in model.named_parameters():
        assert (found.full_tensor() - expected[name]).abs().max() <= 1e-9, name


def _check_gradients_of_one_rank(model: Any, step: int) -> None:
    """The sum over micro-steps, in float32, of the gradients of the bf16 model that the masters make."""
    half = MODELS["gpt"].make(torch.float32).cuda()
    with torch.no_grad():
        for master, p in zip(model.parameters(), half.parameters(), strict=True):
            p.copy_(master.full_tensor())
    half.to(torch.bfloat16)
    expected = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in half.named_parameters()}
    for micro in range(MICRO_STEPS):
        with nullcontext() if micro == MICRO_STEPS - 1 else model.no_sync():
            (_loss(model, 0, micro, step, torch.float32) / MICRO_STEPS).backward()
        half.zero_grad()
        (_loss(half, 0, micro, step, torch.float32) / MICRO_STEPS).backward()
        for name, p in half.named_parameters():
            expected[name] += p.grad.float()
    for name, p in model.named_parameters():
        # The same kernels on the same numbers: but for one that adds in no fixed order (an embedding's), to 8 bits.
        limit = 2**-7 * expected[name].abs().max().item()
        assert (p.grad.full_tensor() - expected[name]).abs().max().item() <= limit, (name, step)
    model.zero_grad()


def _loss(model: Any, rank: int, micro: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    entry = MODELS["gpt"]
    return entry.loss(model, *(t.cuda() for t in entry.micro_batch(rank, micro, step, dtype)))


def _time_transfers() -> None:
    entry = MODELS["gpt"]
    model = towpath.shard(entry.make(torch.float32).cuda(), "zero3", topology=Topology(2, 1))
    optimizer = optimizer_for(model)
    inputs = [t.cuda() for t in entry.micro_batch(dist.get_rank(), 0, 0, torch.float32)]
    before = towpath.stats(model)  # seconds are counted from here on
    for _ in range(3):
        entry.loss(model, *inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    done = towpath.stats(model).since(before)
    assert done.transfers and all(t.seconds_in_flight > 0 for t in done.transfers), done
    # Two processes that share a GPU take turns on it: their transfers are waited for.
    assert done.seconds_exposed > 0, done


def _train_steps_under_sync_debug(folder: Path, offload_activations: bool) -> None:
    saved_activations._WINDOW_BYTES = 1 << 18  # some of a pass
    sections: dict[str, dict[str, Any]] = {
        "data": {"tokens": str(folder / "tokens")},
        "model": {"width": 64, "depth": 4, "heads": 2},
        "train": {"steps": 6, "batch": 16, "micro_batch": 4, "length": 64, "offload_activations": offload_activations},
        "strategy": {"nodes": 2, "ranks_per_node": 1},
    }
    with init_distributed() as job:
        training = Trainer(Config.from_dict(sections), job)
        assert can_skip_on_device(training.optimizer, job.device)
        for step in range(6):
            torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
            result = training.train_step()
            assert result.loss > 0 and not result.skipped
        torch.cuda.set_sync_debug_mode("default")
        assert towpath.stats(training.model).transfers


def _enqueue_under_sync_debug() -> None:
    entry = MODELS["gpt"]
    for offload in (None, "params"):
        model = towpath.shard(entry.make(torch.float32).cuda(), "zero3", topology=Topology(2, 1), offload=offload)
        optimizer = optimizer_for(model)
        inputs = [t.cuda() for t in entry.micro_batch(dist.get_rank(), 0, 0, torch.float32)]
        for step in range(4):
            torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
            entry.loss(model, *inputs).backward()
            torch.cuda.set_sync_debug_mode("default")
            optimizer.step()
            optimizer.zero_grad()
        assert towpath.stats(model).transfers
