"""How long a checkpoint holds the training up: in the background against at once, and what it costs the steps after.

    python benchmarks/checkpoints.py [CASE …] [--folder DIR] [--rounds 8] [--quick] [--resume]

A chain of matrices with AdamW, a multiple of 12 bytes a parameter: weights and two states. Two such trainings, in
processes of their own, take turns: one saves in the background, one at once. `held`: from the call of save() to its
return. `written`: until the checkpoint has its name. A step is timed with nothing under way, and with a save under way.
Every run is added to benchmarks/results/checkpoints.jsonl.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import towpath
from towpath import checkpoint
from towpath.bench.harness import figures, race
from towpath.bench.harness.contestants import Cluster, Entry
from towpath.bench.harness.pool import started
from towpath.bench.harness.suite import Settings, Suite
from towpath.train.config import Config, LogConfig, ModelConfig, StrategyConfig, TrainConfig
from towpath.train.job import init_distributed
from towpath.train.trainer import Trainer

BACKGROUND, AT_ONCE = "background", "at once"


@dataclass(frozen=True, slots=True)
class Case:
    """`layers` matrices of `width` × `width` on one rank; or so many blocks of our GPT in `towpath train` on four."""

    name: str
    width: int
    layers: int
    ranks: int = 1

    @property
    def topology(self) -> towpath.Topology:
        return towpath.Topology(2, 2) if self.ranks == 4 else towpath.Topology(1, 1)

    def measure(self, settings: Settings) -> dict[str, Any]:
        width = 64 if settings.quick else self.width
        with tempfile.TemporaryDirectory(prefix="towpath-checkpoints-", dir=settings.options.folder) as folder:
            entries = {
                kind: Entry(Cluster(self.topology), Saving, (kind, self, width, Path(folder, kind)), warm_turns=1)
                for kind in (BACKGROUND, AT_ONCE)
            }
            with started(entries, settings.say) as made:
                run = race.run(made, settings.rounds, settings.say)
                told = {kind: one.ask("facts")[0] for kind, one in made.items()}
        held = figures.ratio(run.seconds, BACKGROUND, AT_ONCE)
        return {
            "checks": [figures.Check("background held / at once held", held.found, interval=held.interval)],
            "bytes": told[BACKGROUND]["bytes"],
            "medians": {kind: figures.medians(facts["seconds"]) for kind, facts in told.items()},
            "raw": {kind: facts["seconds"] for kind, facts in told.items()},
            **run.recorded(),
        }


CASES = (Case("100 MB", 1024, 8), Case("800 MB", 2048, 16), Case("GPT, 4 ranks", 512, 6, 4))


class Saving:
    """The worker: a turn is a step, a save, and steps until the checkpoint is written; its seconds are those held.

    The first turn makes the memory that later ones reuse.
    """

    def __init__(self, rank: int, world: int, kind: str, case: Case, width: int, folder: Path) -> None:
        self._stack = ExitStack()  # the ranks end with the race, and what they hold with them
        state, self._step = chain(case, width) if world == 1 else gpt_on_ranks(case, width, folder, self._stack)
        self._step()
        self._folder, self._number = folder / "checkpoints", 0
        self._saver = checkpoint.Saver(self._folder, state, keep_last=1, background=kind == BACKGROUND)
        self._seconds: dict[str, list[float]] = {}

    def turn(self) -> float:
        self._note(step=self._step())
        self._number += 1
        saving = self._saver.save(self._number)
        while not everywhere(saving.done):
            self._note(step_while_writing=self._step())
        outcome = saving.outcome()
        assert outcome.ok, outcome
        self._note(held=outcome.held_seconds, written=outcome.seconds)
        return outcome.held_seconds

    def facts(self) -> dict[str, Any]:
        size = checkpoint.read_manifest(self._folder / f"step-{self._number:06d}").bytes
        return {"bytes": size, "seconds": self._seconds}

    def _note(self, **found: float) -> None:
        for name, value in found.items():
            self._seconds.setdefault(name, []).append(value)


def everywhere(done: bool) -> bool:
    """How many steps a save lasts must be one number: all ranks step together."""
    both = torch.tensor([int(done)])
    dist.all_reduce(both, dist.ReduceOp.MIN)
    return bool(both.item())


def chain(case: Case, width: int) -> tuple[checkpoint.State, Callable[[], float]]:
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
    case: Case, width: int, folder: Path, stack: ExitStack
) -> tuple[checkpoint.State, Callable[[], float]]:
    """A training loop as `towpath train` has it."""
    config = Config(
        model=ModelConfig(width=width, depth=case.layers, heads=8),
        train=TrainConfig(steps=100_000, batch=4, micro_batch=1, length=128, threads=1),
        strategy=StrategyConfig(name="zero3", nodes=2, ranks_per_node=2),
        log=LogConfig(folder=str(folder / "log")),
    )
    trainer = Trainer(config, stack.enter_context(init_distributed()))
    return (
        checkpoint.State(trainer.model, trainer.optimizer, training=trainer.state),
        lambda: trainer.train_step().seconds,
    )


def add_folder(parser: argparse.ArgumentParser) -> None:
    default = Path(tempfile.gettempdir())
    parser.add_argument("--folder", type=Path, default=default, help="on the disk to be measured")


SUITE = Suite("checkpoints", __doc__ or "", CASES, rounds=8, options=add_folder)

if __name__ == "__main__":
    import checkpoints  # ranks find by this name what they are sent

    checkpoints.SUITE.main()
