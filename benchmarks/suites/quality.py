"""Measure what codecs cost in quality: a small GPT trained in several variants.

All ranks read the bytes of the sources of the Python standard library, of which the last tenth is held out. A run is
one variant with one seed. A variant is judged by its final loss against the baseline with the same seed, in the mean
over the seeds. The variant `control` differs from the baseline only in the order of sums. Its difference is due to
chance.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lab
import towpath
from benchmarks import gpt
from benchmarks.harness import results
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.islands import conclude, synchronize
from towpath.cli.plots import COLORS, color, standalone_svg

SHAPE = towpath.Topology(2, 2)
LENGTH, BATCH = 128, 1
WIDTH, DEPTH, HEADS = 192, 4, 3  # two million parameters: all runs take 45 minutes on two cores
STEPS = 300
# Runs that differ by a rounding drift apart, by more if their last steps are large. The effect of codecs is only
# visible with a small learning rate that ends at 0, and on many windows.
PEAK = 3e-4
EVERY, WINDOWS = 30, 16  # steps between validations for the curve, and windows per rank, always the same
WINDOWS_AT_THE_END = 128  # for the final loss
QUICK_STEPS = 2

# Every result has its setting, and only runs of the same setting are compared.
SETTING = {"width": WIDTH, "depth": DEPTH, "length": LENGTH, "batch": BATCH, "peak": PEAK}


@dataclass(frozen=True, slots=True)
class Variant:
    """A strategy with its options, and the limit of its final loss over that of zero3, less one.

    A variant with `worse` is expected to be worse. With `half`, gradients are encoded only in the first half of the
    run. With `shift`, each rank reads the data of the rank so many places after it.
    """

    name: str
    strategy: str
    options: dict[str, Any]
    most: float | None = None
    worse: bool = False
    half: bool = False
    shift: int = 0

    def make(self, steps: int) -> towpath.Strategy:
        """Return the strategy for a run of so many steps."""
        half = {"gradients_until": steps // 2} if self.half else {}
        return towpath.strategy(self.strategy, SHAPE, **self.options, **half)


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
    Variant("zero++ interleaved", "zero++", {}, 0.01, half=True),
    Variant("mics, int4 gradients", "mics", {"gradients": "int4:64"}),
    Variant("ddp, low rank", "ddp", {"gradients": "low-rank:16"}),
    Variant("zero++, whole-tensor blocks", "zero++", {"weights": "int8:whole", "gradients": "int4:whole"}, worse=True),
]


@dataclass(frozen=True, slots=True)
class VariantRun:
    """A variant with a seed. A suite says how it is trained."""

    variant: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the case."""
        return f"{self.variant}, seed {self.seed}"


class QualityRun(VariantRun):
    """A variant with a seed, trained on ranks of the lab."""

    __slots__ = ()

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Train in the lab."""
        steps = QUICK_STEPS if settings.quick else settings.options.steps
        variant = next(v for v in VARIANTS if v.name == self.variant)
        with lab.Lab(SHAPE, inter=None) as cluster:
            found: Result = cluster.call(train, variant, self.seed, steps, timeout_seconds=3600)[0]
        return recorded(found, steps, variant.make(steps))


RUNS = [QualityRun(variant.name, seed) for seed in range(5) for variant in VARIANTS]


@dataclass(frozen=True, slots=True)
class Result:
    """The held-out loss by step, and the final loss on more windows."""

    curve: list[tuple[int, float]]
    final: float


def recorded(found: Result, steps: int, strategy: towpath.Strategy) -> dict[str, Any]:
    """Return what a result line keeps of a run."""
    checks = [Check("final loss, nats a byte", found.final)]
    return {"checks": checks, "steps": steps, "setting": SETTING, "strategy": str(strategy), **asdict(found)}


def windows(text: Tensor, starts: Tensor, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of the windows that start at `starts`."""
    rows = torch.stack([text[s : s + length + 1] for s in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def training(text: Tensor, seed: int, batch: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random batches without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield windows(text, torch.randint(len(text) - LENGTH - 1, (batch,), generator=generator))


def split_text() -> tuple[Tensor, Tensor]:
    """Return the text to train on, and the held-out last tenth."""
    text = gpt.corpus()
    split = len(text) // 10 * 9
    return text[:split], text[split:]


def train(rank: int, world: int, variant: Variant, seed: int, steps: int) -> Result:
    """Train a variant on one rank."""
    return train_under(variant.make(steps), seed, steps, variant.shift)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of all variants."""
    return torch.optim.AdamW(parameters, lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def train_under(
    strategy: towpath.Strategy,
    seed: int,
    steps: int,
    shift: int = 0,
    optimizer_of: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw,
    every: int = EVERY,
) -> Result:
    """Train the small GPT under a strategy, and validate every so many steps."""
    torch.set_num_threads(1)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    text, held_out = split_text()
    data = training(text, 1000 * seed + (rank + shift) % world)
    torch.manual_seed(seed)
    made: Any = towpath.shard(gpt.GPT(width=WIDTH, depth=DEPTH, heads=HEADS, context=LENGTH), strategy)
    optimizer = optimizer_of(list(made.parameters()))
    return train_and_validate(
        made, optimizer, data, held_out, steps, lambda step: set_learning_rate(optimizer, PEAK, step, steps), every
    )


def train_and_validate(
    made: Any,
    optimizer: torch.optim.Optimizer,
    data: Iterator[tuple[Tensor, Tensor]],
    held_out: Tensor,
    steps: int,
    set_rate: Callable[[int], None],
    every: int,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Result:
    """Train a model, and validate it every so many steps. `context` is that of a forward and backward pass."""

    def validated(of_rank: int) -> float:
        synchronize(made)
        with context():
            return validation(made, held_out, of_rank)

    curve: list[tuple[int, float]] = []
    for step in range(steps):
        if step % every == 0:
            curve.append((step, validated(WINDOWS)))
        set_rate(step)
        with context():
            made(*next(data)).backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    conclude(made)
    curve.append((steps, validated(WINDOWS)))
    return Result(curve, validated(WINDOWS_AT_THE_END))


def set_learning_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int) -> None:
    """Set the learning rate of a step: a warm-up of 40 steps, and a cosine that ends at 0."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min((step + 1) / 40, 1.0) * (1 + math.cos(math.pi * step / steps)) / 2


@torch.no_grad()
def validation(made: Any, text: Tensor, of_rank: int) -> float:
    """Return the mean loss on windows of the held-out text, `of_rank` on each rank."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    starts = torch.linspace(0, len(text) - LENGTH - 2, of_rank * world).long()[rank::world]
    total = torch.stack([made(*windows(text, part)) for part in starts.split(4)]).mean()
    torch.distributed.all_reduce(total)
    return total.item() / torch.distributed.get_world_size()


# Judgment -------------------------------------------------------------------------------------------------------------

# A variant is left out of a picture if its difference is so many times that of the next one.
_OUTSIDE = 2
# Quantiles of Student's t for a two-sided interval of 95 %, by degrees of freedom.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}


@dataclass(frozen=True, slots=True)
class Judged:
    """A variant and, by seed, its value over that of the baseline, less one."""

    variant: str
    each: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.mean(self.each)

    @property
    def around(self) -> float:
        """Half the width of the 95 % interval of the mean. It is infinite for one seed."""
        if len(self.each) < 2:
            return math.inf
        return _T[len(self.each) - 1] * statistics.stdev(self.each) / math.sqrt(len(self.each))

    @property
    def interval(self) -> str:
        """The 95 % interval as text."""
        return "one seed" if len(self.each) < 2 else f"± {self.around:.2%}"

    @property
    def by_seed(self) -> str:
        """The shares as text."""
        return ", ".join(f"{share:+.2%}" for share in self.each)

    def __str__(self) -> str:
        return f"{self.variant}: {self.mean:+.2%} ({self.interval}); by seed {self.by_seed}"


def judged(
    runs: list[dict[str, Any]], variants: Sequence[str], baseline: str, value: Callable[[float], float]
) -> list[Judged]:
    """Return the variants but the baseline. `value` maps the final loss of a run to what is judged."""
    final = {(r["case"]["variant"], r["case"]["seed"]): value(r["final"]) for r in runs}
    rows: list[Judged] = []
    for variant in variants:
        seeds = sorted(seed for name, seed in final if name == variant and (baseline, seed) in final)
        shares = tuple(final[variant, s] / final[baseline, s] - 1 for s in seeds)
        if shares and variant != baseline:
            rows.append(Judged(variant, shares))
    return rows


def spread_of(rows: list[Judged]) -> float | None:
    """Return the largest difference of the control in either direction, if it has run."""
    return max((abs(share) for row in rows if row.variant == "control" for share in row.each), default=None)


def curves(
    runs: list[dict[str, Any]],
    variants: Sequence[str],
    spread: float | None = None,
    baselines: Mapping[str, str] | None = None,
) -> str:
    """Return a picture of the validation losses, and of their difference from those of the baselines.

    Args:
        runs: The result lines.
        variants: The variants to draw.
        spread: The share of the last loss by which runs differ by chance.
        baselines: The baseline of each variant. By default, it is the first variant that was measured.
    """

    def draw(figure: Any, shown: Sequence[str]) -> None:
        whole, apart = figure.subplots(1, 2)
        means = {variant: _mean_curve(runs, variant) for variant in shown}
        worst: dict[str, float] = {}
        least = 0.0
        for number, (variant, curve) in enumerate(means.items()):
            look = {"color": color(number), "linestyle": "-" if number < len(COLORS) else "--", "linewidth": 1.4}
            whole.plot(*zip(*curve, strict=True), label=variant, **look)
            base = means[(baselines or {}).get(variant, shown[0])]
            shares = [(step, 100 * (loss / other - 1)) for (step, loss), (_, other) in zip(curve, base, strict=True)]
            ending = shares[len(shares) // 2 :]
            apart.plot(*zip(*ending, strict=True), **look)
            worst[variant] = max(share for _, share in ending)
            least = min(least, *(share for _, share in ending))
        for axes in (whole, apart):
            axes.set_xlabel("optimizer steps")
            axes.spines[["top", "right"]].set_visible(False)
        whole.set_ylabel("validation loss (nats a byte), mean of the seeds")
        whole.legend(frameon=False)
        # One variant may be much worse than all others, which would be invisible with it inside the axes.
        outside, (most, worst_of_all) = max(worst, key=worst.__getitem__), sorted(worst.values())[-2:]
        is_outside = worst_of_all > _OUTSIDE * most
        most = most if is_outside else worst_of_all
        apart.set_ylim(least - 0.1 * most, 1.1 * most)
        apart.set_ylabel(f"percent over the loss of {'the baseline' if baselines else shown[0]}")
        if spread is not None:
            apart.axhspan(-100 * spread, 100 * spread, color="#868e96", alpha=0.2, linewidth=0, zorder=0)
            apart.text(0.01, 100 * spread, "by chance", transform=apart.get_yaxis_transform(), fontsize=8, va="bottom")
        title = f"the second half; {outside} is above the sheet" if is_outside else "the second half"
        apart.set_title(title, fontsize=10)

    drawn = [variant for variant in variants if any(run["case"]["variant"] == variant for run in runs)]
    return standalone_svg(draw, drawn, (11, 4.2))


def _mean_curve(runs: list[dict[str, Any]], variant: str) -> list[tuple[int, float]]:
    """Return the mean over the seeds, by step."""
    curves = [run["curve"] for run in runs if run["case"]["variant"] == variant]
    return [(points[0][0], statistics.mean(loss for _, loss in points)) for points in zip(*curves, strict=True)]


def runs_of(suite: str = "quality", steps: int = STEPS) -> list[dict[str, Any]]:
    """Return the last run of each variant and seed of a suite, in the setting that it has now."""
    read = results.read(results.file_of(suite))
    here = [run for run in read if run.get("setting") == SETTING and run["steps"] == steps]
    return list(results.last(here).values())


def rows_of(runs: list[dict[str, Any]]) -> list[Judged]:
    """Return the variants of the suite `quality`, judged by their loss."""
    return judged(runs, [variant.name for variant in VARIANTS], "zero3", float)


def picture() -> str:
    """Return the picture of the suite `quality`."""
    runs = runs_of()
    return curves(runs, [variant.name for variant in VARIANTS], spread_of(rows_of(runs)))


def summary() -> str:
    """Return each variant's loss over that of zero3."""

    def limit(variant: Variant) -> str:
        if variant.worse:
            return "expected to be worse"
        return "no limit" if variant.most is None else f"limit ≤ {variant.most:.1%}"

    runs, variants = runs_of(), {variant.name: variant for variant in VARIANTS}
    rows = [f"{row} of zero3's loss ({limit(variants[row.variant])})" for row in rows_of(runs)]
    return "\n".join([f"{len(runs)} runs of the current setting", *rows])


# Suites ---------------------------------------------------------------------------------------------------------------

QUALITY = """Measure what codecs cost in validation loss, on four ranks of two nodes.

    quality [RUN …] [--steps 300] [--seeds 5] [--quick] [--resume]

The baseline is `zero3`. The control reads the data in another order of ranks. `python -m benchmarks report quality`
judges the variants.
"""


def add_options(parser: argparse.ArgumentParser, steps: int = STEPS, seeds: int = 5) -> None:
    """Add the options of a suite of runs with seeds."""
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seeds", type=int, default=seeds, help=f"at most {seeds}")


def of_seeds(runs: Sequence[Any], options: argparse.Namespace) -> Sequence[Any]:
    """Return the runs with the seeds of the options, and the cases without a seed."""
    return [run for run in runs if getattr(run, "seed", 0) < options.seeds]


SUITES = (Suite("quality", QUALITY, RUNS, options=add_options, chosen=of_seeds, summary=summary),)
