"""The same small GPT, trained by several strategies on a shaped cluster of this machine, one after the other."""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.multiprocessing
from torch import distributed as dist

from towpath import lab
from towpath.api import schedule
from towpath.core.strategy import TransferKind
from towpath.observing import Interval, Stats, stats, tracing
from towpath.topology.cluster import Topology
from towpath.topology.groups import as_rank
from towpath.train.config import Config, DataConfig, ModelConfig, StrategyConfig, TrainConfig
from towpath.train.job import joined
from towpath.train.loop import Training
from towpath.train.observe.plots import Outcome
from towpath.train.run import begin

TOPOLOGY = Topology(nodes=2, ranks_per_node=2)
STRATEGIES = ("zero3", "hpz", "mics", "paro-iig", "paro-nig", "zero++", "auto")

# What runs a function on every rank, and returns what each of them returned.
Launch = Callable[..., list[Any]]


def configuration(strategy: str, steps: int) -> Config:
    return Config(
        model=ModelConfig(width=192, depth=6, heads=6),
        data=DataConfig(),
        train=TrainConfig(steps=steps, batch=24, micro_batch=3, length=128, learning_rate=2e-3, threads=1),
        strategy=StrategyConfig(name=strategy),
    )


@contextmanager
def cluster(inter: str, reason: str | None) -> Generator[Launch]:
    """A shaped one; where there is a `reason` why there can be none, plain processes."""
    if reason is not None:
        yield on_loopback
        return
    with lab.Lab(TOPOLOGY, inter=inter) as raised:
        yield partial(raised.call, timeout_seconds=600)


def trained(rank: int, world: int, config: Config, counted: bool) -> Outcome:
    """What every rank does. `counted`: there is a cable, and a kernel that counts what goes over it."""
    with joined() as job:
        training = begin(config, job)
        course = _Course(training, counted)
        for _ in range(config.train.steps):
            course.step()
        sent_bytes = course.sent_bytes()
        validation, _ = training.evaluate()
        with tracing(training.model) as trace:
            training.step()
        name = f"auto: {training.strategy.name}" if config.strategy.auto else config.strategy.name
        return course.outcome(name, sent_bytes, validation, trace.intervals)


# The first steps find their order, and make their buffers.
_WARM_UP = 2


class _Course:
    """A training under observation."""

    def __init__(self, training: Training, counted: bool) -> None:
        self._training, self._counted = training, counted
        self._losses: list[float] = []
        self._ends: list[float] = []
        self._seen: list[tuple[Stats, float]] = []  # after the warm-up and the last step: the engine's, the loop's
        self._before_bytes = self._carried()
        self._began = time.perf_counter()

    def step(self) -> None:
        training = self._training
        self._losses.append(training.step().loss)
        self._ends.append(time.perf_counter() - self._began)
        if len(self._ends) in (_WARM_UP, training.config.steps):
            self._seen.append((stats(training.model), training.clocks.own_seconds))

    def sent_bytes(self) -> int | None:
        """Over this rank's node's cable, since the first step."""
        return self._carried() - self._before_bytes if self._counted else None

    def _carried(self) -> int:
        """Nobody may begin before all have read."""
        groups = self._training.job.groups
        groups.barrier()
        carried = lab.link_counters().sent_bytes if self._counted else 0
        groups.barrier()
        return carried

    def outcome(
        self, strategy: str, sent_bytes: int | None, validation: float | None, timeline: Sequence[Interval]
    ) -> Outcome:
        training = self._training
        (warm, own_before), (now, own) = self._seen
        counted, steps = now.since(warm), training.config.steps
        timed = steps - _WARM_UP
        planned = schedule(training.strategy, training.model, training.micro_steps)
        seconds = [end - begin for begin, end in itertools.pairwise(self._ends)][_WARM_UP - 1 :]
        return Outcome(
            strategy=strategy,
            losses=tuple(self._losses),
            ends=tuple(self._ends),
            validation=validation,
            step_seconds=statistics.mean(seconds),
            exposed_seconds=counted.seconds_exposed / timed,
            host_seconds=(counted.seconds_host + own - own_before) / timed,
            cable_bytes=None if sent_bytes is None else sent_bytes / steps,
            scheduled_bytes=planned.cable_bytes(training.job.topology.node_of(training.job.rank)),
            inside_bytes=counted.intra_bytes / timed / TOPOLOGY.nodes,
            memory_bytes=now.memory_bytes,
            lossless=all(training.strategy.transport(kind).encoding is None for kind in TransferKind),
            timeline=tuple(timeline),
        )


def on_loopback(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Every rank as a process on this machine, without a lab."""
    context = torch.multiprocessing.get_context("spawn")
    answers: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = torch.multiprocessing.spawn(  # pyright: ignore[reportPrivateImportUsage]
            _rank, (folder, answers, fn, args), nprocs=TOPOLOGY.world, join=False
        )
        assert ranks is not None
        found: dict[int, Any] = {}
        while not ranks.join(0.1) or not answers.empty():
            while not answers.empty():
                rank, value = answers.get()
                found[rank] = value
    return [found[rank] for rank in range(TOPOLOGY.world)]


def _rank(rank: int, folder: str, answers: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # All ranks share one loopback; the first node is ranks 0 and 1.
    os.environ.update(as_rank(rank, TOPOLOGY.world, 0), GROUP_RANK=str(TOPOLOGY.node_of(rank)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TOPOLOGY.world)
    answers.put((rank, fn(rank, TOPOLOGY.world, *args)))
    dist.destroy_process_group()
