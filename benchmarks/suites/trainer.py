"""Measure `towpath train` against a hand-written loop, and how long a checkpoint stops training."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import towpath
from benchmarks.harness import figures
from benchmarks.harness.candidates import LabPlace, Launch, timed
from benchmarks.harness.comparison import compare, started
from benchmarks.harness.suite import Settings, Suite
from towpath import checkpoint
from towpath.checkpoint.manifest import read_manifest
from towpath.train.config import Config, LogConfig, ModelConfig, StrategyConfig, TrainConfig
from towpath.train.job import init_distributed
from towpath.train.metrics import MetricsLogger
from towpath.train.models import next_token_loss
from towpath.train.trainer import TrainingRun

# towpath train --------------------------------------------------------------------------------------------------------

SHAPE = towpath.Topology(2, 2)
INTER = "200mbit"
STEPS = 4  # per sample
LIMIT = 1.02
OURS, THEIRS = "towpath train", "bare loop"


@dataclass(frozen=True, slots=True)
class TrainCase:
    """Both loops under one strategy."""

    name: str

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the loops."""
        with tempfile.TemporaryDirectory() as folder:
            samples, place = 2 + settings.rounds, LabPlace(SHAPE, INTER)
            launches = {
                kind: Launch(place, Loop, (kind, self.configuration(f"{folder}/{i}", samples, settings)), 1)
                for i, kind in enumerate((OURS, THEIRS))
            }
            with started(launches, settings.say) as made:
                found = compare(made, settings.rounds, settings.say)
        return {
            "checks": [figures.ratio(found.seconds, OURS, THEIRS, LIMIT)],
            "steps_a_sample": STEPS,
            **found.recorded(),
        }

    def configuration(self, folder: str, samples: int, settings: Settings) -> Config:
        """Return the configuration of a training with so many samples."""
        width, depth, length = (64, 2, 32) if settings.quick else (256, 6, 128)
        return Config(
            model=ModelConfig(width=width, depth=depth, heads=8),
            train=TrainConfig(steps=samples * STEPS, batch=32, micro_batch=4, length=length, threads=1),
            strategy=StrategyConfig(name=self.name),
            log=LogConfig(folder=folder),
        )


class Loop:
    """A worker whose sample is the mean of a few steps."""

    def __init__(self, rank: int, world: int, kind: str, config: Config) -> None:
        stack = ExitStack()  # it stays open: the ranks end with the comparison
        trainer = TrainingRun(config, stack.enter_context(init_distributed()))
        self._stack = stack
        self._step = bare(trainer) if kind == THEIRS else self._whole(trainer)

    def sample(self) -> float:
        """Take steps, and return the seconds of one."""
        return timed(self._steps) / STEPS

    def _steps(self) -> None:
        for _ in range(STEPS):
            self._step()

    def _whole(self, trainer: TrainingRun) -> Callable[[], None]:
        metrics = self._stack.enter_context(MetricsLogger(trainer))

        def step() -> None:
            with metrics.traced(trainer.state.step + 1):
                result = trainer.train_step()
            metrics.log_step(result)

        return step


def bare(trainer: TrainingRun) -> Callable[[], None]:
    """Return a step of the loop that a user would write, over batches that are ready."""
    model, optimizer, count = trainer.model, trainer.optimizer, trainer.micro_steps
    rank, world, at_once = trainer.job.rank, trainer.job.world, trainer.config.train.micro_batch
    batches = [trainer.tokens.train.batch((m * world + rank) * at_once, at_once) for m in range(count)]

    def step() -> None:
        for number, (inputs, targets) in enumerate(batches):
            with nullcontext() if number == count - 1 else model.no_sync():
                (next_token_loss(model, inputs, targets) / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


# Checkpoints ----------------------------------------------------------------------------------------------------------

BACKGROUND, AT_ONCE = "background", "at once"


@dataclass(frozen=True, slots=True)
class CheckpointCase:
    """`layers` matrices of `width` × `width` on one rank, or so many blocks of a GPT in `towpath train` on four."""

    name: str
    width: int
    layers: int
    ranks: int = 1

    @property
    def topology(self) -> towpath.Topology:
        """Nodes and ranks per node."""
        return towpath.Topology(2, 2) if self.ranks == 4 else towpath.Topology(1, 1)

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the two ways to save."""
        width = 64 if settings.quick else self.width
        with tempfile.TemporaryDirectory(prefix="towpath-checkpoints-", dir=settings.options.folder) as folder:
            launches = {
                kind: Launch(LabPlace(self.topology), Saving, (kind, self, width, Path(folder, kind)), warm_up=1)
                for kind in (BACKGROUND, AT_ONCE)
            }
            with started(launches, settings.say) as made:
                found = compare(made, settings.rounds, settings.say)
                facts = {kind: one.ask("facts")[0] for kind, one in made.items()}
        held = figures.ratio(found.seconds, BACKGROUND, AT_ONCE)
        return {
            "checks": [figures.Check("background held / at once held", held.found, interval=held.interval)],
            "bytes": facts[BACKGROUND]["bytes"],
            "medians": {kind: figures.medians(each["seconds"]) for kind, each in facts.items()},
            "raw": {kind: each["seconds"] for kind, each in facts.items()},
            **found.recorded(),
        }


class Saving:
    """A worker that takes a step, saves, and takes steps until the checkpoint is written.

    A sample is the time for which the save stops training. The first save makes the memory that later ones reuse.
    """

    def __init__(self, rank: int, world: int, kind: str, case: CheckpointCase, width: int, folder: Path) -> None:
        self._stack = ExitStack()  # it stays open: the ranks end with the comparison
        state, self._step = chain(case, width) if world == 1 else gpt_on_ranks(case, width, folder, self._stack)
        self._step()
        self._folder, self._number = folder / "checkpoints", 0
        self._saver = checkpoint.Saver(self._folder, state, keep_last=1, background=kind == BACKGROUND)
        self._held = 0.0
        self._saver.settle = self._timed(self._saver.settle)  # each step of the optimizer calls it
        self._seconds: dict[str, list[float]] = {}

    def sample(self) -> float:
        """Save once, and return the seconds for which that stopped training."""
        self._note(step=self._step())
        self._number += 1
        self._held = 0.0
        saving = self._timed(self._saver.save)(self._number)
        while not everywhere(saving.done):
            self._note(step_while_writing=self._step())
        outcome = saving.outcome()
        assert outcome.ok, outcome
        self._note(held=self._held, written=outcome.seconds)
        return self._held

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `call`, and adds the seconds to those for which training was held."""

        def measured(*arguments: Any) -> Any:
            began = time.perf_counter()
            found = call(*arguments)
            self._held += time.perf_counter() - began
            return found

        return measured

    def facts(self) -> dict[str, Any]:
        """Return the size of a checkpoint, and all seconds that were recorded."""
        size = read_manifest(self._folder / f"step-{self._number:06d}").bytes
        return {"bytes": size, "seconds": self._seconds}

    def _note(self, **found: float) -> None:
        for name, value in found.items():
            self._seconds.setdefault(name, []).append(value)


def everywhere(done: bool) -> bool:
    """Return whether all ranks are done, because they have to take the same number of steps."""
    both = torch.tensor([int(done)])
    dist.all_reduce(both, dist.ReduceOp.MIN)
    return bool(both.item())


def chain(case: CheckpointCase, width: int) -> tuple[checkpoint.State, Callable[[], float]]:
    """Return the state of a chain of matrices, and a function that takes a step."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(case.layers)))
    model = towpath.shard(model, "zero3", topology=case.topology)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = torch.randn(64, width)

    def step() -> float:
        began = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return checkpoint.State(model, optimizer), step


def gpt_on_ranks(
    case: CheckpointCase, width: int, folder: Path, stack: ExitStack
) -> tuple[checkpoint.State, Callable[[], float]]:
    """Return the state of a training of `towpath train`, and a function that takes a step."""
    config = Config(
        model=ModelConfig(width=width, depth=case.layers, heads=8),
        train=TrainConfig(steps=100_000, batch=4, micro_batch=1, length=128, threads=1),
        strategy=StrategyConfig(name="zero3", nodes="2x2"),
        log=LogConfig(folder=str(folder / "log")),
    )
    trainer = TrainingRun(config, stack.enter_context(init_distributed()))
    state = checkpoint.State(trainer.model, trainer.optimizer, training=trainer.state)
    return state, lambda: trainer.train_step().seconds


# Suites ---------------------------------------------------------------------------------------------------------------

TRAIN = """Measure what `towpath train` costs over the engine: data, agreement, metrics and the progress line.

    train [CASE …] [--rounds 8] [--quick] [--resume]

Two nodes of two ranks have 200 Mbit/s between them. One model is trained by the loop that a user would write around the
engine, over batches that are ready, and another one by the loop of `towpath train`. The limit is 1.02.
"""

CHECKPOINTS = """Measure how long a checkpoint stops training, in the background and at once, and what later steps pay.

    checkpoints [CASE …] [--folder DIR] [--rounds 8] [--quick] [--resume]

A chain of matrices trains with AdamW: 12 bytes a parameter, for weights and two states. "held" is the time from the
call of save() to its return. "written" is the time until the checkpoint has its name. Steps are timed with and without
a save in progress.
"""


def _folder(parser: argparse.ArgumentParser) -> None:
    default = Path(tempfile.gettempdir())
    parser.add_argument("--folder", type=Path, default=default, help="on the disk to be measured")


_CHECKPOINTS = (
    CheckpointCase("100 MB", 1024, 8),
    CheckpointCase("800 MB", 2048, 16),
    CheckpointCase("GPT, 4 ranks", 512, 6, 4),
)
SUITES = (
    Suite("train", TRAIN, [TrainCase("zero3"), TrainCase("paro-iig")], rounds=8),
    Suite("checkpoints", CHECKPOINTS, _CHECKPOINTS, rounds=8, options=_folder),
)
