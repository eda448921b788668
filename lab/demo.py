"""`python -m lab demo`: the same small GPT, trained by several strategies on a shaped cluster of this machine."""

from __future__ import annotations

import itertools
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch.multiprocessing
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

import lab
import towpath
from lab.report import Outcome
from lab.runs import as_rank
from towpath import tracing
from towpath.core.strategy import TransferKind
from towpath.train.models import GPT, Shape

TOPOLOGY = towpath.Topology(nodes=2, ranks_per_node=2)
STRATEGIES = ("zero3", "hpz", "mics", "paro-iig", "paro-nig", "zero++", "auto")
# The vocabulary is that of bytes.
SHAPE = Shape(vocabulary=256, width=192, depth=6, heads=6, hidden=512, tied=False)
MICRO_STEPS, BATCH, LENGTH = 2, 3, 128
LEARNING_RATE = 2e-3

# A function that runs another one on every rank, and returns what each rank returned.
Launch = Callable[..., list[Any]]

# The first steps record their order and allocate buffers. They are not measured.
_WARM_UP = 2
_HELD_OUT = 0.1
_EVALUATED_BATCHES = 8


@contextmanager
def cluster(inter: str, reason: str | None) -> Generator[Launch]:
    """Yield the launcher of a shaped cluster or, where there is a `reason` why there is none, of plain processes."""
    if reason is not None:
        yield on_loopback
        return
    with lab.Lab(TOPOLOGY, inter=inter) as shaped:
        yield partial(shaped.call, timeout_seconds=600)


def trained(rank: int, world: int, strategy: str, steps: int, counted: bool) -> Outcome:
    """Train on one rank, and return what it observed.

    Args:
        rank: The rank, which launchers pass.
        world: The number of ranks.
        strategy: The name of the strategy, or "auto".
        steps: The number of optimizer steps.
        counted: Whether the kernel counts what is sent over the node's cable.
    """
    torch.set_num_threads(1)  # all ranks share the cores of one machine
    towpath.init()
    torch.manual_seed(0)
    workload = towpath.Workload(BATCH * LENGTH, MICRO_STEPS, inputs=(torch.zeros(BATCH, LENGTH, dtype=torch.long),))
    model: Any = towpath.shard(GPT(SHAPE), strategy, workload=workload if strategy == "auto" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    training, held_out = batches(rank), batches(rank, held_out=True)
    host_seconds = 0.0  # of the data and the optimizer

    def train_step() -> Tensor:
        nonlocal host_seconds
        total = torch.zeros(())
        for micro_step in range(MICRO_STEPS):
            began = time.perf_counter()
            inputs, targets = next(training)
            host_seconds += time.perf_counter() - began
            with nullcontext() if micro_step == MICRO_STEPS - 1 else model.no_sync():
                loss = _loss(model, inputs, targets) / MICRO_STEPS
                loss.backward()
            total += loss.detach()
        began = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        host_seconds += time.perf_counter() - began
        return total

    losses: list[Tensor] = []
    ends: list[float] = []
    seen: list[tuple[towpath.Stats, float]] = []  # after the warm-up and after the last step
    sent_before, began = _sent_bytes(counted), time.perf_counter()
    for step in range(1, steps + 1):
        losses.append(train_step())
        ends.append(time.perf_counter() - began)
        if step in (_WARM_UP, steps):
            seen.append((towpath.stats(model), host_seconds))
    sent_bytes = _sent_bytes(counted) - sent_before
    with torch.no_grad():
        validation = torch.stack([_loss(model, *next(held_out)) for _ in range(_EVALUATED_BATCHES)]).mean()
    means = torch.stack([*losses, validation])
    dist.all_reduce(means)
    means /= world
    with tracing.trace(model) as trace:
        train_step()
    (warm, host_before), (now, host) = seen
    measured, timed = now.since(warm), steps - _WARM_UP
    chosen = model.towpath_engine.strategy
    durations = [end - begin for begin, end in itertools.pairwise(ends)][_WARM_UP - 1 :]
    return Outcome(
        strategy=f"auto: {chosen.name}" if strategy == "auto" else strategy,
        losses=tuple(means[:-1].tolist()),
        ends=tuple(ends),
        validation=float(means[-1]),
        step_seconds=statistics.mean(durations),
        exposed_seconds=measured.seconds_exposed / timed,
        host_seconds=(measured.seconds_host + host - host_before) / timed,
        cable_bytes=sent_bytes / steps if counted else None,
        scheduled_bytes=towpath.schedule(chosen, model, MICRO_STEPS).cable_bytes(TOPOLOGY.node_of(rank)),
        inside_bytes=measured.intra_bytes / timed / TOPOLOGY.nodes,
        memory_bytes=now.memory_bytes,
        lossless=all(chosen.transport(kind).encoding is None for kind in TransferKind),
        timeline=tuple(trace.intervals),
    )


def batches(rank: int, held_out: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a rank's batches of inputs and targets without end. They are the same under every strategy."""
    text, generator = _text(), torch.Generator().manual_seed(rank)
    begins = int(len(text) * (1 - _HELD_OUT))
    low, high = (begins, len(text) - LENGTH) if held_out else (0, begins - LENGTH)
    while True:
        starts = torch.randint(low, high, (BATCH, 1), generator=generator)
        windows = text[starts + torch.arange(LENGTH + 1)].long()
        yield windows[:, :-1], windows[:, 1:]


@cache
def _text() -> Tensor:
    """Return the bytes of the sources of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def _loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _sent_bytes(counted: bool) -> int:
    """Return the bytes sent over this node's cable so far. No rank sends anything until all ranks have read theirs."""
    dist.barrier()
    sent = lab.link_counters().sent_bytes if counted else 0
    dist.barrier()
    return sent


def on_loopback(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function on every rank, as processes of this machine that share its loopback."""
    context = torch.multiprocessing.get_context("spawn")
    answers: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = torch.multiprocessing.spawn(  # pyright: ignore[reportPrivateImportUsage]
            _run_rank, (folder, answers, fn, args), nprocs=TOPOLOGY.world, join=False
        )
        assert ranks is not None
        found: dict[int, Any] = {}
        while not ranks.join(0.1) or not answers.empty():
            while not answers.empty():
                rank, value = answers.get()
                found[rank] = value
    return [found[rank] for rank in range(TOPOLOGY.world)]


def _run_rank(rank: int, folder: str, answers: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # All ranks share one loopback. Ranks 0 and 1 are the first node.
    os.environ.update(as_rank(rank, TOPOLOGY.world, 0), GROUP_RANK=str(TOPOLOGY.node_of(rank)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TOPOLOGY.world)
    answers.put((rank, fn(rank, TOPOLOGY.world, *args)))
    dist.destroy_process_group()
