"""What `towpath train` costs beside the bare engine: data, agreement, metrics and the live line, by the step.

    python benchmarks/train.py [CASE …] [--rounds 8] [--quick] [--resume]

Two nodes of two ranks, 200 mbit between them. On ranks of their own, and in turns, one sharded model is trained by the
loop that a user would write around the engine, over batches that are ready, and another like it by the one of `towpath
train`; four steps are a turn. Asked: ≤ 1.02. Every run is added to benchmarks/results/train.jsonl.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import towpath
from towpath.bench.harness import figures, race
from towpath.bench.harness.contestants import Cluster, Entry
from towpath.bench.harness.pool import started
from towpath.bench.harness.suite import Settings, Suite
from towpath.bench.harness.worker import timed
from towpath.train.config import Config, LogConfig, ModelConfig, StrategyConfig, TrainConfig
from towpath.train.job import init_distributed
from towpath.train.models.bundle import next_token_loss
from towpath.train.trainer import Trainer

SHAPE = towpath.Topology(2, 2)
INTER = "200mbit"
STEPS = 4  # a turn
ASKED = 1.02
OURS, THEIRS = "towpath train", "bare loop"


@dataclass(frozen=True, slots=True)
class Case:
    """The strategy of both loops."""

    name: str

    def measure(self, settings: Settings) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            turns = 2 + settings.rounds
            entries = {
                kind: Entry(
                    Cluster(SHAPE, INTER), Loop, (kind, self.configuration(f"{folder}/{i}", turns, settings)), 1
                )
                for i, kind in enumerate((OURS, THEIRS))
            }
            with started(entries, settings.say) as made:
                run = race.run(made, settings.rounds, settings.say)
        return {"checks": [figures.ratio(run.seconds, OURS, THEIRS, ASKED)], "steps_a_turn": STEPS, **run.recorded()}

    def configuration(self, folder: str, turns: int, settings: Settings) -> Config:
        width, depth, length = (64, 2, 32) if settings.quick else (256, 6, 128)
        return Config(
            model=ModelConfig(width=width, depth=depth, heads=8),
            train=TrainConfig(steps=turns * STEPS, batch=32, micro_batch=4, length=length, threads=1),
            strategy=StrategyConfig(name=self.name),
            log=LogConfig(folder=folder),
        )


class Loop:
    """The worker: so many steps are a turn."""

    def __init__(self, rank: int, world: int, kind: str, config: Config) -> None:
        stack = contextlib.ExitStack()  # the ranks end with the race, and what they hold with them
        trainer = Trainer(config, stack.enter_context(init_distributed()))
        self._stack = stack
        self._step = bare(trainer) if kind == THEIRS else self._whole(trainer)

    def turn(self) -> float:
        return timed(self._steps) / STEPS

    def _steps(self) -> None:
        for _ in range(STEPS):
            self._step()

    def _whole(self, trainer: Trainer) -> Callable[[], None]:
        metrics = self._stack.enter_context(trainer.metrics_logger())

        def step() -> None:
            with metrics.traced(trainer.state.step + 1):
                result = trainer.train_step()
            metrics.log_step(**asdict(result))

        return step


def bare(trainer: Trainer) -> Callable[[], None]:
    """What a user writes who has batches and wants nothing but steps."""
    model, optimizer, count = trainer.model, trainer.optimizer, trainer.micro_steps
    rank, world, at_once = trainer.job.rank, trainer.job.world, trainer.config.train.micro_batch
    batches = [trainer.tokens.train.batch((m * world + rank) * at_once, at_once) for m in range(count)]

    def step() -> None:
        for number, (inputs, targets) in enumerate(batches):
            with contextlib.nullcontext() if number == count - 1 else model.no_sync():
                (next_token_loss(model, inputs, targets) / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


SUITE = Suite("train", __doc__ or "", [Case("zero3"), Case("paro-iig")], rounds=8)

if __name__ == "__main__":
    import train  # ranks find by this name what they are sent

    train.SUITE.main()
