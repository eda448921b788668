"""Draw the results of the suite `planner`: the tables of docs/concepts/planner-accuracy.md, and timelines.svg.

`python -m tools.docs.draw_predictions` prints how much slower the planner's choice was than the fastest strategy.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness import results
from tools.docs import figures
from towpath.cli.plots import draw_timelines, standalone_svg
from towpath.observe.trace import Interval

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "timelines.svg"
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


def regret_rows() -> list[tuple[str, list[float]]]:
    """Return what the planner may choose, and the regret of its choice in the last run of each environment.

    Runs of one kind compare lossless strategies, and then strategies with codecs. Runs of the other kind compare
    lossless strategies with exact transports and without them, and then without them only.
    """
    runs = last_runs()
    exact = [run["regret"] for run in runs if run["case"].get("exact", False)]
    others = [run["regret"] for run in runs if not run["case"].get("exact", False)]
    lossless = [found["lossless"] for found in others]
    return [
        ("lossless strategies", lossless + [found["lossless"] for found in exact]),
        ("of these, where exact transports take part", [found["lossless"] for found in exact]),
        ("lossless strategies, without exact transports", lossless + [found["without exact"] for found in exact]),
        ("lossless strategies and codecs", [found["with codecs"] for found in others]),
    ]


def regret_table() -> str:
    return figures.table(
        ("choice among", "environments", "mean regret", "worst regret"),
        [
            (what, str(len(found)), f"{statistics.fmean(found):.1%}", f"{max(found):.1%}")
            for what, found in regret_rows()
        ],
    )


def regret_sentence() -> str:
    """Return the regret of lossless choices in one sentence, for README.md."""
    found = regret_rows()[0][1]
    said = (
        f'In {len(found)} environments on the same test bed, the lossless strategy that the planner behind `"auto"` '
        f"chose was {statistics.fmean(found):.1%} slower on average than the fastest one measured, and at worst "
        f"{max(found):.1%} ([prediction errors](docs/concepts/planner-accuracy.md))."
    )
    return textwrap.fill(said, 120, break_on_hyphens=False, break_long_words=False)


def picture() -> str:
    drawn = next(run for run in last_runs() if run["case"]["name"] == DRAWN)["drawn"]
    steps = [
        (f"{name}, {who}", [Interval(**interval, args={}) for interval in drawn[name][kept]])
        for name in drawn
        for who, kept in (("traced", "engine"), ("simulated", "simulated"))
    ]
    return standalone_svg(draw_timelines, steps, (10, 0.8 + 0.8 * len(steps)))


TABLES = {"predictions": table, "regrets": regret_table, "regret-sentence": regret_sentence}
PICTURES = {PICTURE: picture}

if __name__ == "__main__":
    print(regret_table(), regret_sentence(), sep="\n")
