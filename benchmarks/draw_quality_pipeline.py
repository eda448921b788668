"""What benchmarks/quality_pipeline.py found, judged and drawn: the last run of each variant and seed.

python benchmarks/draw_quality_pipeline.py [-o benchmarks/results/quality_pipeline.svg]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from draw_quality import Judged, judged, plot, spread_of
from quality_pipeline import COMPRESSIONS, SETTING
from towpath.bench.harness import results

# By which share of the baseline's perplexity each may be worse, beyond the spread of the control; what is naive is to
# be worse by so many spreads.
MOST = {"cb": 0.005, "cb+fe": 0.005, "cb+fe+sc": 0.025}
NAIVE_SPREADS = 3


def verdict(row: Judged, spread: float) -> str:
    if row.variant in MOST:
        most = MOST[row.variant] + spread
        return f"asked ≤ {most:.2%}: {'met' if row.mean <= most else 'MISSED'}"
    if row.variant == "naive":
        least = NAIVE_SPREADS * spread
        return f"expected ≥ {least:.2%}: {'as expected' if row.mean >= least else 'NOT SEEN'}"
    return "another order of the same sums"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=results.FOLDER / "quality_pipeline.svg")
    options = parser.parse_args()
    read = results.read(results.file_of("quality_pipeline"))
    runs = list(results.last([run for run in read if run.get("setting") == SETTING]).values())
    print(f"{len(runs)} runs of the setting that benchmarks/quality_pipeline.py has now, of {len(read)} in all")
    if not runs:
        raise SystemExit("None to draw: run benchmarks/quality_pipeline.py first.")
    rows = judged(runs, list(COMPRESSIONS), "baseline", math.exp)
    spread = spread_of(rows) or 0.0
    for row in rows:
        print(f"{row} of the baseline's perplexity ({verdict(row, spread)})")
    plot(runs, list(COMPRESSIONS), options.output)


if __name__ == "__main__":
    main()
