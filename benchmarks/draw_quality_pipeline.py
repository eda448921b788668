"""What benchmarks/quality_pipeline.py found, judged and drawn: the last run of each variant and seed.

python benchmarks/draw_quality_pipeline.py [-o benchmarks/results/quality_pipeline.svg]
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draw_quality import plot
from quality_pipeline import COMPRESSIONS, SETTING
from towpath.bench.harness import results

# By which share of the baseline's perplexity each may be worse, beyond the spread of the control; what is naive is to
# be worse by so many spreads.
MOST = {"cb": 0.005, "cb+fe": 0.005, "cb+fe+sc": 0.025}
NAIVE_SPREADS = 3


@dataclass(frozen=True, slots=True)
class Judged:
    """`each`: by seed, the perplexity over the baseline's, less one."""

    variant: str
    each: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.each)

    def verdict(self, spread: float) -> str:
        if self.variant in MOST:
            most = MOST[self.variant] + spread
            return f"asked ≤ {most:.2%}: {'met' if self.mean <= most else 'MISSED'}"
        if self.variant == "naive":
            least = NAIVE_SPREADS * spread
            return f"expected ≥ {least:.2%}: {'as expected' if self.mean >= least else 'NOT SEEN'}"
        return "another order of the same sums"


def judged(runs: list[dict[str, Any]]) -> list[Judged]:
    final = {(r["case"]["variant"], r["case"]["seed"]): r["final"] for r in runs}
    rows: list[Judged] = []
    for variant in COMPRESSIONS:
        seeds = sorted(seed for name, seed in final if name == variant and ("baseline", seed) in final)
        shares = tuple(math.exp(final[variant, s] - final["baseline", s]) - 1 for s in seeds)
        if shares and variant != "baseline":
            rows.append(Judged(variant, shares))
    return rows


def spread_of(rows: list[Judged]) -> float:
    """The largest difference that the control made, either way."""
    return max((abs(share) for row in rows if row.variant == "control" for share in row.each), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=results.FOLDER / "quality_pipeline.svg")
    options = parser.parse_args()
    read = results.read(results.file_of("quality_pipeline"))
    runs = list(results.last([run for run in read if run.get("setting") == SETTING]).values())
    print(f"{len(runs)} runs of the setting that benchmarks/quality_pipeline.py has now, of {len(read)} in all")
    if not runs:
        raise SystemExit("None to draw: run benchmarks/quality_pipeline.py first.")
    rows = judged(runs)
    spread = spread_of(rows)
    for row in rows:
        each = ", ".join(f"{share:+.2%}" for share in row.each)
        print(f"{row.variant}: {row.mean:+.2%} of the baseline's perplexity ({row.verdict(spread)}); by seed {each}")
    plot(runs, list(COMPRESSIONS), options.output)


if __name__ == "__main__":
    main()
