"""What benchmarks/quality.py found, judged and drawn: the last run of each variant and seed.

python benchmarks/draw_quality.py [-o benchmarks/results/quality.svg]
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quality import SETTING, STEPS, VARIANTS, Variant
from towpath.bench.harness import results

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


def plot(
    runs: list[dict[str, Any]], variants: Sequence[str], file: Path, band: tuple[float, float] | None = None
) -> None:
    """`band`: of last losses, within which runs differ by chance."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (whole, end) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for variant in variants:
        curves = [r["curve"] for r in runs if r["case"]["variant"] == variant]
        if not curves:
            continue
        steps = [step for step, _ in curves[0]]
        means = [statistics.mean(curve[i][1] for curve in curves) for i in range(len(steps))]
        for axes, first in ((whole, 0), (end, len(steps) // 2)):
            axes.plot(steps[first:], means[first:], label=variant, linewidth=1.4)
    for axes in (whole, end):
        axes.set_xlabel("optimizer steps")
        axes.spines[["top", "right"]].set_visible(False)
    whole.set_ylabel("validation loss (nats a byte), mean of the seeds")
    whole.legend(frameon=False)
    if band is not None:
        end.axhspan(*band, color="0.9", label="by chance", zorder=0)
    end.set_title("the second half, enlarged", fontsize=10)
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "towpath"
    figure.savefig(file, metadata={"Date": None})


def runs_of(folder: Path = results.FOLDER) -> list[dict[str, Any]]:
    """The last of each variant and seed, in the setting that quality.py has now."""
    read = results.read(folder / "quality.jsonl")
    here = [run for run in read if run.get("setting") == SETTING and run["steps"] == STEPS]
    return list(results.last(here).values())


def asked(variant: Variant) -> str:
    if variant.worse:
        return "worse is expected"
    return "nothing is asked" if variant.most is None else f"asked ≤ {variant.most:.1%}"


def _by_chance(runs: list[dict[str, Any]], spread: float | None) -> tuple[float, float] | None:
    """Around zero3's last loss."""
    if spread is None:
        return None
    last = statistics.mean(r["curve"][-1][1] for r in runs if r["case"]["variant"] == "zero3")
    return last * (1 - spread), last * (1 + spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=results.FOLDER / "quality.svg")
    options = parser.parse_args()
    runs = runs_of()
    print(f"{len(runs)} runs of the setting that benchmarks/quality.py has now")
    variants = {variant.name: variant for variant in VARIANTS}
    rows = judged(runs, list(variants), "zero3", float)
    for row in rows:
        print(f"{row} of zero3's loss ({asked(variants[row.variant])})")
    plot(runs, list(variants), options.output, _by_chance(runs, spread_of(rows)))


if __name__ == "__main__":
    main()
