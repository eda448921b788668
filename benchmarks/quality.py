"""What codecs cost in quality: a small GPT, trained by each strategy on the same data.

    python benchmarks/quality.py [RUN …] [--steps 300] [--seeds 5] [--quick] [--resume]
    python benchmarks/draw_quality.py

Four ranks on two nodes read the bytes of the Python standard library's sources; the last tenth is held out. A variant
and a seed are one run; what is judged (draw_quality.py) is its final validation loss against that of `zero3` with the
same seed, in the mean over the seeds. `control` differs from `zero3` only in which rank reads which part of the data,
and so in the order of sums: what it differs by is no codec's doing. Every run is added to
benchmarks/results/quality.jsonl.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import towpath
from towpath import lab
from towpath.bench import gpt
from towpath.bench.harness.figures import Check
from towpath.bench.harness.suite import Settings, Suite

SHAPE = towpath.Topology(2, 2)
LENGTH, BATCH = 128, 1
WIDTH, DEPTH, HEADS = 192, 4, 3  # two million parameters: five seeds of nine variants take 45 minutes on two cores
STEPS = 300
# Runs that differ by a rounding drift apart, the more the larger their last steps are. What codecs do is only seen
# beside that with a small rate that ends at 0, and on many windows.
PEAK = 3e-4
EVERY, WINDOWS = 30, 16  # steps between validations for the curve; windows of each rank, the same ones every time
WINDOWS_AT_THE_END = 128  # for what is judged
QUICK_STEPS = 2

# Stands in every result: only runs of one setting are compared (draw_quality.py).
SETTING = {"width": WIDTH, "depth": DEPTH, "length": LENGTH, "batch": BATCH, "peak": PEAK}


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy with its options, and by which share its final loss may exceed zero3's (None: nothing is asked).

    `worse`: it is to be. `half`: gradients are encoded in the first half of the run only. `shift`: each rank reads the
    data of the rank so many places behind it."""

    name: str
    strategy: str
    options: dict[str, Any]
    most: float | None = None
    worse: bool = False
    half: bool = False
    shift: int = 0

    def make(self, steps: int) -> towpath.Strategy:
        until = {"gradients_until": max(1, steps // 2)} if self.half else {}
        return towpath.strategy(self.strategy, SHAPE, **self.options, **until)


VARIANTS = [
    Variant("zero3", "zero3", {}, 0.0),
    Variant("control", "zero3", {}, shift=1),
    Variant("zero++", "zero++", {}, 0.01),
    Variant(
        "zero++, hadamard, feedback",
        "zero++",
        {"weights": "int8+hadamard", "gradients": "int4+hadamard", "feedback": "both"},
        0.003,
    ),
    Variant("hpz + qwZ", "hpz", {"weights": "int8"}, 0.002),
    Variant("qgz, first half", "qgz", {}, half=True),
    Variant("mics, int4 gradients", "mics", {"gradients": "int4:64"}),
    Variant("ddp, low rank", "ddp", {"gradients": "low-rank:16"}),
    Variant("zero++, whole-tensor blocks", "zero++", {"weights": "int8:whole", "gradients": "int4:whole"}, worse=True),
]


@dataclass(frozen=True, slots=True)
class Run:
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        steps = QUICK_STEPS if settings.quick else settings.options.steps
        variant = next(v for v in VARIANTS if v.name == self.variant)
        with lab.Lab(SHAPE, inter=None) as cluster:
            found: Result = cluster.call(train, variant, self.seed, steps, timeout_seconds=3600)[0]
        checks = [Check("final loss, nats a byte", found.final)]
        told = {"steps": steps, "setting": SETTING, "strategy": str(variant.make(steps))}
        return {"checks": checks, **told, **asdict(found)}


RUNS = [Run(variant.name, seed) for seed in range(5) for variant in VARIANTS]


@dataclass(frozen=True, slots=True)
class Result:
    """The held-out loss again and again, by step; and in the end, on more of it."""

    curve: list[tuple[int, float]]
    final: float


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return gpt.GPT(width=WIDTH, depth=DEPTH, heads=HEADS, context=LENGTH)


def windows(text: Tensor, starts: Tensor, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    rows = torch.stack([text[s : s + length + 1] for s in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def training(text: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield windows(text, torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator))


def train(rank: int, world: int, variant: Variant, seed: int, steps: int) -> Result:
    torch.set_num_threads(1)
    text = gpt.corpus()
    split = len(text) // 10 * 9
    data, held_out = training(text[:split], 1000 * seed + (rank + variant.shift) % world), text[split:]
    made: Any = towpath.shard(model(seed), variant.make(steps))
    optimizer = torch.optim.AdamW(made.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    curve: list[tuple[int, float]] = []
    for step in range(steps):
        if step % EVERY == 0:
            curve.append((step, validation(made, held_out, WINDOWS)))
        warm = min((step + 1) / 40, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = PEAK * warm * (1 + math.cos(math.pi * step / steps)) / 2
        made(*next(data)).backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    curve.append((steps, validation(made, held_out, WINDOWS)))
    return Result(curve, validation(made, held_out, WINDOWS_AT_THE_END))


@torch.no_grad()
def validation(made: Any, text: Tensor, of_rank: int) -> float:
    """The mean loss on windows of the held-out text, `of_rank` on each rank."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    starts = torch.linspace(0, len(text) - LENGTH - 2, of_rank * world).long()[rank::world]
    total = torch.stack([made(*windows(text, part)) for part in starts.split(4)]).mean()
    torch.distributed.all_reduce(total)
    return total.item() / torch.distributed.get_world_size()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=5, help="at most 5")


def of_seeds(runs: Sequence[Any], options: argparse.Namespace) -> Sequence[Any]:
    return [run for run in runs if run.seed < options.seeds]


SUITE = Suite("quality", __doc__ or "", RUNS, options=add_options, chosen=of_seeds)

if __name__ == "__main__":
    SUITE.main()
