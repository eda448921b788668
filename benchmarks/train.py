"""What `towpath train` costs beside the bare engine: data, agreement, metrics and the live line, by the step.

    python benchmarks/train.py [--rounds 7] [-o benchmarks/results/train.json]

One sharded model on two nodes of two ranks, 200 mbit between them. Its steps are taken in turn by the loop that a user
would write around the engine, over batches that are ready, and by the one of `towpath train`: A B A B. Asked: ≤ 1.02.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import towpath
from results_file import keep
from towpath import lab
from towpath.train.config import Config, LogConfig, ModelConfig, StrategyConfig, TrainConfig
from towpath.train.job import joined
from towpath.train.loop import Training
from towpath.train.models import next_token_loss
from towpath.train.run import begin
from towpath.train.watch import Watch

SHAPE = towpath.Topology(2, 2)
STEPS = 4  # of each in a round
ASKED = 1.02
STRATEGIES = ("zero3", "paro-iig")


def configuration(strategy: str, folder: str, steps: int) -> Config:
    return Config(
        model=ModelConfig(width=256, depth=6, heads=8),
        train=TrainConfig(steps=steps, batch=32, micro_batch=4, length=128, threads=1),
        strategy=StrategyConfig(name=strategy),
        log=LogConfig(folder=folder),
    )


def bare(training: Training) -> Callable[[], None]:
    """What a user writes who has batches and wants nothing but steps."""
    model, optimizer, count = training.model, training.optimizer, training.micro_steps
    rank, world, at_once = training.job.rank, training.job.world, training.config.micro_batch
    batches = [training.windows.batch((m * world + rank) * at_once, at_once) for m in range(count)]

    def step() -> None:
        for number, (inputs, targets) in enumerate(batches):
            with contextlib.nullcontext() if number == count - 1 else model.no_sync():
                (next_token_loss(model, inputs, targets) / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def race(rank: int, world: int, config: Config, rounds: int) -> list[tuple[float, float]]:
    """(bare, whole) seconds a step, by round."""
    with joined() as job:
        training = begin(config, job)
        plain = bare(training)
        with Watch(config, training) as watch:

            def whole() -> None:
                with watch.traced(training.done + 1):
                    step = training.step()
                watch.stepped(step)

            for _ in range(2):  # both warm up
                plain()
                whole()
            return [(timed(training, plain), timed(training, whole)) for _ in range(rounds)]


def timed(training: Training, step: Callable[[], None]) -> float:
    training.job.groups.barrier()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    training.job.groups.barrier()
    return (time.perf_counter() - began) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/train.json"))
    options = parser.parse_args()
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder, lab.Lab(SHAPE, inter="200mbit") as cluster:
            config = configuration(strategy, folder, steps=2 + options.rounds * STEPS)
            seconds = cluster.call(race, config, options.rounds, timeout_seconds=1800)[0]
        ratios = [whole / plain for plain, whole in seconds]
        ratio = statistics.median(ratios)
        print(f"{strategy}: towpath train / bare loop = {ratio:.3f} (asked ≤ {ASKED}); by round", end=" ")
        print(", ".join(f"{r:.3f}" for r in ratios))
        case: dict[str, Any] = {"name": strategy, "topology": str(SHAPE), "inter": "200mbit", "steps": STEPS}
        keep(options.output, {"case": case, "asked": ASKED, "ratio": ratio, "seconds": seconds}, list(STRATEGIES))


if __name__ == "__main__":
    main()
