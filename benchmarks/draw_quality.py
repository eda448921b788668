"""The results of benchmarks/quality.py: the last run of each variant and seed.

`python benchmarks/draw_quality.py` prints them. `python -m docs.generate` draws benchmarks/results/quality.svg.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quality import SETTING, STEPS, VARIANTS, Variant
from towpath.bench.harness import results
from towpath.train.report import COLORS, color, standalone_svg

# Student's, for a two-sided interval of 95 %, by degrees of freedom.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}


@dataclass(frozen=True, slots=True)
class Judged:
    """`each`: by seed, of a variant, what is judged over the baseline's, less one."""

    variant: str
    each: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.each)

    @property
    def around(self) -> float:
        """So far the 95 % interval of the mean reaches to either side; infinite for one seed."""
        if len(self.each) < 2:
            return math.inf
        return _T[len(self.each) - 1] * statistics.stdev(self.each) / math.sqrt(len(self.each))

    def __str__(self) -> str:
        each = ", ".join(f"{share:+.2%}" for share in self.each)
        return f"{self.variant}: {self.mean:+.2%} ± {self.around:.2%}; by seed {each}"


def judged(
    runs: list[dict[str, Any]], variants: Sequence[str], baseline: str, value: Callable[[float], float]
) -> list[Judged]:
    """`value`: what is judged, of the final loss of a run."""
    final = {(r["case"]["variant"], r["case"]["seed"]): value(r["final"]) for r in runs}
    rows: list[Judged] = []
    for variant in variants:
        seeds = sorted(seed for name, seed in final if name == variant and (baseline, seed) in final)
        shares = tuple(final[variant, s] / final[baseline, s] - 1 for s in seeds)
        if shares and variant != baseline:
            rows.append(Judged(variant, shares))
    return rows


def spread_of(rows: list[Judged]) -> float | None:
    """The largest difference that the control made, either way, if it has run."""
    return max((abs(share) for row in rows if row.variant == "control" for share in row.each), default=None)


def curves(runs: list[dict[str, Any]], variants: Sequence[str], spread: float | None = None) -> str:
    """Return a picture of the validation losses, and of their difference from those of the first variant.

    `spread` is the share of the last loss by which runs differ by chance.
    """

    def draw(figure: Any, shown: Sequence[str]) -> None:
        whole, apart = figure.subplots(1, 2)
        means = {variant: _mean_curve(runs, variant) for variant in shown}
        baseline = means[shown[0]]
        worst: dict[str, float] = {}
        least = 0.0
        for number, (variant, curve) in enumerate(means.items()):
            look = {"color": color(number), "linestyle": "-" if number < len(COLORS) else "--", "linewidth": 1.4}
            whole.plot(*zip(*curve, strict=True), label=variant, **look)
            shares = [(step, 100 * (loss / base - 1)) for (step, loss), (_, base) in zip(curve, baseline, strict=True)]
            ending = shares[len(shares) // 2 :]
            apart.plot(*zip(*ending, strict=True), **look)
            worst[variant] = max(share for _, share in ending)
            least = min(least, *(share for _, share in ending))
        for axes in (whole, apart):
            axes.set_xlabel("optimizer steps")
            axes.spines[["top", "right"]].set_visible(False)
        whole.set_ylabel("validation loss (nats a byte), mean of the seeds")
        whole.legend(frameon=False)
        # One variant is much worse on purpose: with it on the sheet, nobody would see the others.
        outside, most = sorted(worst, key=lambda variant: worst[variant])[-1], sorted(worst.values())[-2]
        apart.set_ylim(least - 0.1 * most, 1.1 * most)
        apart.set_ylabel(f"percent over the loss of {shown[0]}")
        if spread is not None:
            apart.axhspan(-100 * spread, 100 * spread, color="#868e96", alpha=0.2, linewidth=0, zorder=0)
            apart.text(0.01, 100 * spread, "by chance", transform=apart.get_yaxis_transform(), fontsize=8, va="bottom")
        apart.set_title(f"the second half; {outside} is above the sheet", fontsize=10)

    drawn = [variant for variant in variants if any(run["case"]["variant"] == variant for run in runs)]
    return standalone_svg(draw, drawn, (11, 4.2))


def _mean_curve(runs: list[dict[str, Any]], variant: str) -> list[tuple[int, float]]:
    """Return the mean over the seeds, by step."""
    curves = [run["curve"] for run in runs if run["case"]["variant"] == variant]
    return [(points[0][0], statistics.mean(loss for _, loss in points)) for points in zip(*curves, strict=True)]


def runs_of() -> list[dict[str, Any]]:
    """Return the last run of each variant and seed, in the setting that quality.py has now."""
    read = results.read(results.file_of("quality"))
    here = [run for run in read if run.get("setting") == SETTING and run["steps"] == STEPS]
    return list(results.last(here).values())


def limit(variant: Variant) -> str:
    if variant.worse:
        return "expected to be worse"
    return "no limit" if variant.most is None else f"limit ≤ {variant.most:.1%}"


def rows_of(runs: list[dict[str, Any]]) -> list[Judged]:
    return judged(runs, [variant.name for variant in VARIANTS], "zero3", float)


def picture() -> str:
    runs = runs_of()
    return curves(runs, [variant.name for variant in VARIANTS], spread_of(rows_of(runs)))


def main() -> None:
    runs = runs_of()
    print(f"{len(runs)} runs of the setting that benchmarks/quality.py has now")
    variants = {variant.name: variant for variant in VARIANTS}
    for row in rows_of(runs):
        print(f"{row} of zero3's loss ({limit(variants[row.variant])})")


if __name__ == "__main__":
    main()
