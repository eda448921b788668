"""`towpath demo`: the same small GPT, trained by several strategies on a shaped cluster of this machine."""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.multiprocessing
from torch import distributed as dist

from towpath import lab, tracing
from towpath.api import schedule
from towpath.core.strategy import TransferKind
from towpath.observing import Stats, stats
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups, as_rank
from towpath.train.config import Config, DataConfig, ModelConfig, StrategyConfig, TrainConfig
from towpath.train.job import init_distributed
from towpath.train.report import Outcome
from towpath.train.trainer import Trainer

TOPOLOGY = Topology(nodes=2, ranks_per_node=2)
STRATEGIES = ("zero3", "hpz", "mics", "paro-iig", "paro-nig", "zero++", "auto")

# A function that runs another one on every rank, and returns what each rank returned.
Launch = Callable[..., list[Any]]

# The first steps record their order and allocate buffers. They are not measured.
_WARM_UP = 2


def configuration(strategy: str, steps: int) -> Config:
    """Return the configuration of a strategy's training."""
    return Config(
        model=ModelConfig(width=192, depth=6, heads=6),
        data=DataConfig(),
        train=TrainConfig(steps=steps, batch=24, micro_batch=3, length=128, learning_rate=2e-3, threads=1),
        strategy=StrategyConfig(name=strategy),
    )


@contextmanager
def cluster(inter: str, reason: str | None) -> Generator[Launch]:
    """Yield the launcher of a shaped cluster or, where there is a `reason` why there is none, of plain processes."""
    if reason is not None:
        yield on_loopback
        return
    with lab.Lab(TOPOLOGY, inter=inter) as shaped:
        yield partial(shaped.call, timeout_seconds=600)


def trained(rank: int, world: int, config: Config, counted: bool) -> Outcome:
    """Train on one rank, and return what it observed.

    Args:
        rank: The rank, which launchers pass.
        world: The number of ranks.
        config: What to train.
        counted: Whether the kernel counts what is sent over the node's cable.
    """
    with init_distributed() as job:
        trainer = Trainer(config, job)
        steps = config.train.steps
        losses: list[float] = []
        ends: list[float] = []
        seen: list[tuple[Stats, float]] = []  # after the warm-up and after the last step
        sent_before, began = _sent_bytes(job.groups, counted), time.perf_counter()
        for step in range(1, steps + 1):
            losses.append(trainer.train_step().loss)
            ends.append(time.perf_counter() - began)
            if step in (_WARM_UP, steps):
                seen.append((stats(trainer.model), trainer.timers.besides_passes))
        sent_bytes = _sent_bytes(job.groups, counted) - sent_before
        validation, _ = trainer.evaluate()
        with tracing.trace(trainer.model) as trace:
            trainer.train_step()
        (warm, host_before), (now, host) = seen
        measured, timed = now.since(warm), steps - _WARM_UP
        planned = schedule(trainer.strategy, trainer.model, trainer.micro_steps)
        durations = [end - begin for begin, end in itertools.pairwise(ends)][_WARM_UP - 1 :]
        return Outcome(
            strategy=f"auto: {trainer.strategy.name}" if config.strategy.auto else config.strategy.name,
            losses=tuple(losses),
            ends=tuple(ends),
            validation=validation,
            step_seconds=statistics.mean(durations),
            exposed_seconds=measured.seconds_exposed / timed,
            host_seconds=(measured.seconds_host + host - host_before) / timed,
            cable_bytes=sent_bytes / steps if counted else None,
            scheduled_bytes=planned.cable_bytes(job.topology.node_of(job.rank)),
            inside_bytes=measured.intra_bytes / timed / TOPOLOGY.nodes,
            memory_bytes=now.memory_bytes,
            lossless=all(trainer.strategy.transport(kind).encoding is None for kind in TransferKind),
            timeline=tuple(trace.intervals),
        )


def _sent_bytes(groups: Groups, counted: bool) -> int:
    """Return the bytes sent over this node's cable so far. No rank sends anything until all ranks have read theirs."""
    groups.barrier()
    sent = lab.link_counters().sent_bytes if counted else 0
    groups.barrier()
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
