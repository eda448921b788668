"""The results of benchmarks/quality_pipeline.py: the last run of each variant and seed.

`python benchmarks/draw_quality_pipeline.py` prints them. `python -m docs.generate` draws the picture.
"""

from __future__ import annotations

import math
from typing import Any

from draw_quality import Judged, curves, judged, spread_of
from quality_pipeline import COMPRESSIONS, SETTING
from towpath.bench.harness import results

# By which share of the baseline's perplexity each may be worse, beyond the spread of the control; what is naive is to
# be worse by so many spreads.
MOST = {"cb": 0.005, "cb+fe": 0.005, "cb+fe+sc": 0.025}
NAIVE_SPREADS = 3


def verdict(row: Judged, spread: float) -> str:
    if row.variant in MOST:
        most = MOST[row.variant] + spread
        return f"limit ≤ {most:.2%}: {'met' if row.mean <= most else 'exceeded'}"
    if row.variant == "naive":
        least = NAIVE_SPREADS * spread
        return f"expected ≥ {least:.2%}: {'as expected' if row.mean >= least else 'NOT SEEN'}"
    return "another order of the same sums"


def runs_of() -> list[dict[str, Any]]:
    """Return the last run of each variant and seed, in the setting that quality_pipeline.py has now."""
    read = results.read(results.file_of("quality_pipeline"))
    return list(results.last(run for run in read if run.get("setting") == SETTING).values())


def picture() -> str:
    return curves(runs_of(), list(COMPRESSIONS))


def main() -> None:
    runs = runs_of()
    print(f"{len(runs)} runs of the setting that benchmarks/quality_pipeline.py has now")
    rows = judged(runs, list(COMPRESSIONS), "baseline", math.exp)
    spread = spread_of(rows) or 0.0
    for row in rows:
        print(f"{row} of the baseline's perplexity ({verdict(row, spread)})")


if __name__ == "__main__":
    main()
