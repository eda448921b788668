"""How long a checkpoint holds the training up: in the background against at once, and what it costs the steps after.

    python benchmarks/checkpoints.py [CASE …] [--folder DIR] [--rounds 7] [-o benchmarks/results/checkpoints.json]

A chain of matrices with AdamW, a multiple of 12 bytes a parameter: weights and two states. In a round one save of each
kind takes its turn; figures are medians. `held`: from the call of save() to its return. `written`: until the checkpoint
has its name. A step is timed with nothing under way, and with a save under way.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import towpath
from results_file import keep, selected
from towpath import checkpoint, lab
from towpath.train.config import Config, LogConfig, ModelConfig, StrategyConfig, TrainConfig
from towpath.train.job import joined
from towpath.train.run import begin


@dataclass(frozen=True, slots=True)
class Case:
    """`layers` matrices of `width` × `width` on one rank; or so many blocks of our GPT in `towpath train` on four."""

    name: str
    width: int
    layers: int
    ranks: int = 1


CASES = (Case("100 MB", 1024, 8), Case("800 MB", 2048, 16), Case("GPT, 4 ranks", 512, 6, 4))


def measure(case: Case, folder: Path, rounds: int) -> dict[str, Any]:
    model = nn.Sequential(*(nn.Linear(case.width, case.width, bias=False) for _ in range(case.layers)))
    model = towpath.shard(model, "zero3", topology=towpath.Topology(1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = torch.randn(64, case.width)

    def step() -> float:
        began = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return compare(checkpoint.State(model, optimizer), step, folder, rounds)


def train(rank: int, world: int, case: Case, folder: Path, rounds: int) -> dict[str, Any]:
    """The same on each rank of a training loop."""
    config = Config(
        model=ModelConfig(width=case.width, depth=case.layers, heads=8),
        train=TrainConfig(steps=1000, batch=4, micro_batch=1, length=128, threads=1),
        strategy=StrategyConfig(name="zero3", nodes=2, ranks_per_node=2),
        log=LogConfig(folder=str(folder)),
    )
    with joined() as job:
        training = begin(config, job)
        state = checkpoint.State(training.model, training.optimizer, training=training)
        # How many steps a save lasts must be one number: all ranks step together.
        return compare(
            state, lambda: training.step().seconds, folder, rounds, lambda done: all(job.groups.gather_objects(done))
        )


def compare(
    state: checkpoint.State,
    step: Callable[[], float],
    folder: Path,
    rounds: int,
    everywhere: Callable[[bool], bool] = bool,
) -> dict[str, Any]:
    step()
    seconds: dict[str, list[float]] = {}

    def note(**found: float) -> None:
        for name, value in found.items():
            seconds.setdefault(name, []).append(value)

    behind = checkpoint.Saver(folder / "background", state, keep_last=1)
    at_once = checkpoint.Saver(folder / "at-once", state, keep_last=1, background=False, lane="at once")
    behind.save(0).outcome()  # makes the memory that later ones reuse
    for number in range(1, rounds + 1):
        note(step=step())
        outcome = at_once.save(number).outcome()
        note(at_once_held=outcome.held_seconds)
        saving = behind.save(number)
        while not everywhere(saving.done):
            note(step_while_writing=step())
        outcome = saving.outcome()
        assert outcome.ok, outcome
        note(background_held=outcome.held_seconds, background_written=outcome.seconds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    size = checkpoint.read_manifest(folder / "background" / f"step-{rounds:06d}").bytes
    ratio = medians["background_held"] / medians["at_once_held"]
    return {"bytes": size, "seconds": medians, "background held / at once held": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all, unless named")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "checkpoints.json")
    arguments = parser.parse_args()
    for case in selected(CASES, arguments.cases):
        folder = Path(tempfile.mkdtemp(prefix="towpath-checkpoints-", dir=arguments.folder))
        try:
            if case.ranks == 1:
                found = measure(case, folder, arguments.rounds)
            else:
                with lab.Lab(towpath.Topology(2, 2), inter=None) as cluster:
                    found = cluster.call(train, case, folder, arguments.rounds, timeout_seconds=1800)[0]
        finally:
            shutil.rmtree(folder)
        keep(arguments.output, {"case": asdict(case), **found}, [c.name for c in CASES])
        for name, value in found["seconds"].items():
            print(f"{case.name:>12}  {name:<20} {value * 1000:9.1f} ms")
        print(f"{case.name:>12}  background held / at once held: {found['background held / at once held']:.1%}")


if __name__ == "__main__":
    main()
