"""Cases of how a step runs: whether the host waits for the device, and what a step tells of itself."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import towpath
from tests.ranks.checkpoints import Run
from tests.ranks.models import DEVICE, MODELS
from tests.ranks.strategies import strategy_of
from towpath import Outer, Topology

SHAPE = Topology(2, 2)

# --- the host runs ahead ----------------------------------------------------------------------------------------------

ASLEEP_SECONDS, BACK_SECONDS = 0.5, 0.2


@mock.patch("towpath.core.transport.SMALLEST_BYTES", 1)  # this model is small
def the_host_is_back_while_the_device_works(
    label: str, waits: bool = False, outer: Outer | None = None
) -> dict[str, Any]:
    """A step behind half a second of other work on the device: the host only enqueues it.

    Args:
        label: The strategy.
        waits: Whether the host waits once, after the optimizer's step. It must be back from the passes before.
        outer: Outer steps, of which the sixth step applies an exchange.
    """
    entry, dtype = MODELS["gpt"], torch.bfloat16
    model: Any = towpath.shard(entry.make(dtype), strategy_of(label, SHAPE, outer=outer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    batch = entry.micro_batch(dist.get_rank(), 0, 0, dtype)

    def step() -> float:
        entry.loss(model, *batch).backward()
        back = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return back if waits else time.perf_counter()

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    cycles = _cycles_of(ASLEEP_SECONDS)
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(cycles)
    host = step() - began
    torch.cuda.synchronize()
    both = time.perf_counter() - began
    assert host < BACK_SECONDS, f"the host was back after {host:.2f} s, the device after {both:.2f} s"
    return {"host_seconds": host, "device_seconds": both}


def _cycles_of(seconds: float) -> int:
    """How long the device has to count."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    torch.cuda.synchronize()
    return int(10_000_000 * seconds * 1e3 / begin.elapsed_time(end))


def towpath_train_does_not_wait(folder: Path, offload: str | None, offload_activations: bool) -> None:
    """Only for the loss and the norm of the step before, by an event behind them, once a step is enqueued.

    PyTorch's own check finds `.item()`, and copies from memory that is not pinned.
    """
    from towpath.engine import saved_activations
    from towpath.train.config import Config
    from towpath.train.data import prepare
    from towpath.train.job import init_distributed
    from towpath.train.trainer import TrainingRun

    if dist.get_rank() == 0:
        (folder / "text.txt").write_text("".join(f"the {i}th line says {i * i % 97}\n" for i in range(400)))
        prepare([str(folder / "text.txt")], folder / "tokens")
    dist.barrier()
    strategy: dict[str, Any] = {"name": "zero3", "nodes": f"{SHAPE.nodes}x{SHAPE.ranks_per_node}"}
    sections: dict[str, dict[str, Any]] = {
        "data": {"tokens": str(folder / "tokens")},
        "model": {"width": 64, "depth": 4, "heads": 2},
        "train": {"steps": 6, "batch": 16, "micro_batch": 4, "length": 64, "offload_activations": offload_activations},
        "strategy": strategy | ({"offload": offload} if offload else {}),
    }
    some_of_a_pass = mock.patch.object(saved_activations, "_AHEAD_BYTES", 1 << 18)
    with init_distributed() as job, some_of_a_pass:
        training = TrainingRun(Config.from_dict(sections), job)
        try:
            for step in range(6):
                torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
                assert training.train_step().loss > 0
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        cycles = _cycles_of(ASLEEP_SECONDS)
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda._sleep(cycles)
        training.train_step()
        assert (host := time.perf_counter() - began) < BACK_SECONDS, f"the host was back after {host:.2f} s"
        assert towpath.stats(training.model).transfers


def inference_keeps_no_events() -> dict[str, Any]:
    """However many forward passes run without a step."""
    import gc

    torch.manual_seed(0)
    model: Any = towpath.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(DEVICE), "zero3", topology=SHAPE)
    x, held = torch.ones(1, 8, device=DEVICE), list[int]()
    for count in (300, 1_500):
        with torch.no_grad():
            for _ in range(count):
                model(x)
        torch.cuda.synchronize()
        towpath.stats(model)  # reads what the device has finished
        gc.collect()
        held.append(sum(isinstance(each, torch.cuda.Event) for each in gc.get_objects()))
    assert held[1] <= held[0], held
    return {"events": held[1]}


# --- what a step tells ------------------------------------------------------------------------------------------------


def seconds_of_transfers_are_counted() -> dict[str, Any]:
    run = Run.of("zero3", SHAPE)
    before = towpath.stats(run.model)  # seconds are counted from here on
    run.train(range(3))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    done = towpath.stats(run.model).since(before)
    assert done.transfers and all(t.seconds_in_flight > 0 for t in done.transfers), done
    return {"exposed_seconds": done.seconds_exposed}


def a_step_is_traced_in_the_order_of_its_stream() -> None:
    """On one rank, where nothing is sent. A time is an event in a stream."""
    from itertools import pairwise

    from towpath import tracing
    from towpath.observe.trace import BETWEEN, COMPUTE, INSIDE, WAITING

    width, rows = (2048, 4096) if DEVICE.type == "cuda" else (64, 64)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)]
    model: Any = towpath.shard(nn.Sequential(*layers).to(DEVICE), "zero3")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(rows, width, device=DEVICE)
    for _ in range(3):
        with tracing.trace(model) as trace:
            model(x).square().mean().backward()
            with trace.phase("optimizer"):
                optimizer.step()
            optimizer.zero_grad()
    assert not [i for i in trace.intervals if i.track in (BETWEEN, INSIDE)]
    computed = [i for i in trace.intervals if i.track in (COMPUTE, WAITING)]
    assert {"forward 0", "backward 3", "optimizer"} <= {i.name for i in computed}
    for one, following in pairwise(computed):
        assert following.start_seconds >= one.end_seconds - 1e-6  # an event is true to half a microsecond
    assert sum(i.seconds for i in computed) > 0


def plans_for_what_it_measured(folder: Path) -> dict[str, Any]:
    """`"auto"` measures the ranks and the model, chooses, and trains."""
    os.environ["XDG_CACHE_HOME"] = str(folder)  # of profiles
    entry = MODELS["gpt"]
    workload = towpath.Workload(tokens=64)
    model: Any = towpath.shard(entry.make(torch.float32), "auto", topology=SHAPE, workload=workload)
    entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, 0, torch.float32)).backward()
    return {"strategy": model.towpath_engine.strategy.name}
