"""What codecs cost in quality: a GPT of ten million parameters, trained by each strategy on the same data.

    python benchmarks/quality.py [VARIANT …] [--steps 400] [--seeds 2] [-o benchmarks/results/quality.json]
    python benchmarks/quality.py --plot benchmarks/results/quality.svg -o benchmarks/results/quality.json

Four ranks on two nodes read the bytes of the Python standard library's sources; the last tenth is held out. A variant
and a seed are one run; what is judged is its final validation loss against that of `zero3` with the same seed, in the
mean over the seeds. Results go into the file run by run: those not run stay.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gpt
import towpath
from results_file import keep, selected
from towpath import lab

SHAPE = towpath.Topology(2, 2)
LENGTH, BATCH = 128, 1
# Runs that differ by a rounding drift apart, the more the larger their last steps are. What codecs do is only seen
# beside that with a small rate that ends at 0, and on many windows.
PEAK = 3e-4
EVERY, WINDOWS = 40, 16  # steps between validations for the curve; windows of each rank, the same ones every time
WINDOWS_AT_THE_END = 128  # for what is judged


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy with its options, and by which share its final loss may exceed zero3's (None: it is to be worse)."""

    name: str
    strategy: str
    options: dict[str, Any]
    most: float | None

    def make(self) -> towpath.Strategy:
        return towpath.strategy(self.strategy, SHAPE, **self.options)


VARIANTS = [
    Variant("zero3", "zero3", {}, 0.0),
    Variant("zero++", "zero++", {}, 0.01),
    Variant(
        "zero++, hadamard, feedback",
        "zero++",
        {"weights": "int8+hadamard", "gradients": "int4+hadamard", "feedback": "both"},
        0.003,
    ),
    Variant("hpz + qwZ", "hpz", {"weights": "int8"}, 0.002),
    Variant("zero++, whole-tensor blocks", "zero++", {"weights": "int8:whole", "gradients": "int4:whole"}, None),
]


@dataclass(frozen=True, slots=True)
class Result:
    """The held-out loss again and again, by step; and in the end, on more of it."""

    curve: list[tuple[int, float]]
    final: float


def model(seed: int) -> torch.nn.Module:
    """About ten million parameters."""
    torch.manual_seed(seed)
    return gpt.GPT(width=320, depth=8, heads=5, context=LENGTH)


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.stack([text[s : s + LENGTH + 1] for s in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def training(text: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield windows(text, torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator))


def train(rank: int, world: int, variant: Variant, seed: int, steps: int) -> Result:
    torch.set_num_threads(1)
    text = gpt.corpus()
    split = len(text) // 10 * 9
    data, held_out = training(text[:split], 1000 * seed + rank), text[split:]
    made: Any = towpath.shard(model(seed), variant.make())
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


def judged(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By variant: its final loss over zero3's with the same seed, less one; in the mean, and by seed."""
    final = {(r["case"]["variant"], r["case"]["seed"]): r["final"] for r in results}
    rows: list[dict[str, Any]] = []
    for variant in VARIANTS:
        shares = [f / final["zero3", s] - 1 for (name, s), f in final.items() if name == variant.name]
        if shares and variant.name != "zero3":
            rows.append(
                {"variant": variant.name, "mean": statistics.mean(shares), "each": shares, "most": variant.most}
            )
    return rows


def plot(results: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (whole, end) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for variant in VARIANTS:
        curves = [r["curve"] for r in results if r["case"]["variant"] == variant.name]
        if not curves:
            continue
        steps = [step for step, _ in curves[0]]
        means = [statistics.mean(curve[i][1] for curve in curves) for i in range(len(steps))]
        for axes, first in ((whole, 0), (end, len(steps) // 2)):
            axes.plot(steps[first:], means[first:], label=variant.name, linewidth=1.4)
    for axes in (whole, end):
        axes.set_xlabel("optimizer steps")
        axes.spines[["top", "right"]].set_visible(False)
    whole.set_ylabel("validation loss (nats a byte), mean of the seeds")
    whole.legend(frameon=False)
    end.set_title("the second half, enlarged", fontsize=10)
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "towpath"
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", help=f"which of {', '.join(repr(v.name) for v in VARIANTS)}")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--plot", type=Path, help="draw what the results file has, and run nothing")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/quality.json"))
    options = parser.parse_args()
    if options.plot is None:
        names = [f"{v.name}, seed {s}" for s in range(options.seeds) for v in VARIANTS]
        for seed in range(options.seeds):
            for variant in selected(VARIANTS, options.variants):
                with lab.Lab(SHAPE, inter=None) as cluster:
                    found: Result = cluster.call(train, variant, seed, options.steps, timeout_seconds=3600)[0]
                name = f"{variant.name}, seed {seed}"
                print(f"{name}: {found.final:.4f}", [(step, round(loss, 3)) for step, loss in found.curve], flush=True)
                case = {"name": name, "variant": variant.name, "seed": seed, "steps": options.steps}
                keep(options.output, {"case": case, "strategy": str(variant.make()), **asdict(found)}, names)
    results = json.loads(options.output.read_text())["results"]
    for row in judged(results):
        asked = "worse is expected" if row["most"] is None else f"asked ≤ {row['most']:.1%}"
        each = ", ".join(f"{share:+.2%}" for share in row["each"])
        print(f"{row['variant']}: {row['mean']:+.2%} of zero3's loss ({asked}); by seed {each}")
    if options.plot is not None:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
