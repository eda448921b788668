"""Draw the results of the suite `planner`: a table of docs/concepts/planner-accuracy.md, and timelines.svg."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import pricing
from benchmarks.harness import results
from towpath.cli.plan_report import TimelineRow
from towpath.observing import Interval
from towpath.train.report import draw_timelines, standalone_svg

PICTURE = Path(__file__).parent / "pictures" / "timelines.svg"
DRAWN = "200mbit, 2 × 2, small, 1 micro-steps"


def last_runs() -> list[dict[str, Any]]:
    """Return the last run of each environment whose timelines were kept, priced by messages as is the default there."""
    lines = results.read(results.file_of("planner"))
    found = results.last(line for line in lines if "timelines" in line).values()
    return [line | line.get("by_messages", {}) for line in found]


def table() -> str:
    lines = ["| case | mean error | rank correlation | regret, lossless | regret, with codecs | starts | commit |"]
    lines.append("|---|---|---|---|---|---|---|")
    # Cases with exact transports have none with codecs, and a mean of their own.
    for exact in (False, True):
        runs = [run for run in last_runs() if run["case"].get("exact", False) == exact]
        kinds = ("lossless",) if exact else ("lossless", "with codecs")
        for run in runs:
            starts = [found["start_error"] for found in run["timelines"].values()]
            alike = all(found["same_order"] for found in run["timelines"].values())
            lines.append(
                f"| {run['case']['name']} | {run['mean_error']:.1%} | {run['rank_correlation']:.2f} | "
                f"{_regrets(run['regret'][kind] for kind in kinds)} | "
                f"{statistics.fmean(starts):.1%}{'' if alike else ', in another order'} | {results.measured_at(run)} |"
            )
        if runs:
            mean = [statistics.fmean(run[key] for run in runs) for key in ("mean_error", "rank_correlation")]
            regrets = _regrets(statistics.fmean(run["regret"][kind] for run in runs) for kind in kinds)
            name = f"mean of {len(runs)}{', exact' if exact else ''}"
            lines.append(f"| {name} | {mean[0]:.1%} | {mean[1]:.2f} | {regrets} | | |")
    return "\n".join(lines)


def _regrets(found: Iterable[float]) -> str:
    """Return the cells of the regrets, lossless and with codecs."""
    lossless, *codecs = (f"{regret:.1%}" for regret in found)
    return f"{lossless} | {codecs[0] if codecs else '–'}"


def picture() -> str:
    drawn = next(run for run in last_runs() if run["case"]["name"] == DRAWN)["drawn"]
    steps = [
        TimelineRow(f"{name}, {who}", [Interval(**interval, args={}) for interval in drawn[name][kept]])
        for name in drawn
        for who, kept in (("traced", "engine"), ("simulated", "simulated"))
    ]
    return standalone_svg(draw_timelines, steps, (10, 0.8 + 0.8 * len(steps)))


TABLES = {"predictions": table, "pricings": pricing.table}
PICTURES = {PICTURE: picture}
