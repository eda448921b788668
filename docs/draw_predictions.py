"""What benchmarks/planner.py found: the table of docs/planner.md, and docs/timelines.svg, a step traced and simulated.

python -m docs.draw_predictions          # prints the table
python -m docs.draw_predictions --write  # puts it into docs/planner.md, and draws the picture
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from docs.papers import written

from towpath.bench.harness.age import BEFORE, is_old
from towpath.cli.plan_report import Step
from towpath.observing import Interval
from towpath.train.observe.plots import draw_timelines, standalone_svg

DOCS = Path(__file__).parent
PAGE, PICTURE = DOCS / "planner.md", DOCS / "timelines.svg"
RESULTS = DOCS.parent / "benchmarks" / "results" / "planner.jsonl"
NAME = "predictions"  # of the table in the page
DRAWN = "200mbit, 2 × 2, small, 1 micro-steps"


def last_runs() -> list[dict[str, Any]]:
    """Of each environment, as far as timelines were kept."""
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return list({line["case"]["name"]: line for line in lines if "timelines" in line}.values())


def measured(run: dict[str, Any]) -> str:
    return run["commit"][:7] + BEFORE * is_old(run, "planner")


def table() -> str:
    lines = ["| environment | mean error | rank correlation | regret, lossless | with codecs | starts | commit |"]
    lines.append("|---|---|---|---|---|---|---|")
    runs = last_runs()
    for run in runs:
        starts = [found["start_error"] for found in run["timelines"].values()]
        alike = all(found["same_order"] for found in run["timelines"].values())
        regret = run["regret"]
        lines.append(
            f"| {run['case']['name']} | {run['mean_error']:.1%} | {run['rank_correlation']:.2f} | "
            f"{regret['lossless']:.1%} | {regret['with codecs']:.1%} | "
            f"{statistics.fmean(starts):.1%}{'' if alike else ', in another order'} | {measured(run)} |"
        )
    mean = [statistics.fmean(run[key] for run in runs) for key in ("mean_error", "rank_correlation")]
    regrets = [statistics.fmean(run["regret"][kind] for run in runs) for kind in ("lossless", "with codecs")]
    lines.append(f"| mean of {len(runs)} | {mean[0]:.1%} | {mean[1]:.2f} | {regrets[0]:.1%} | {regrets[1]:.1%} | | |")
    return "\n".join(lines)


def picture() -> str:
    drawn = next(run for run in last_runs() if run["case"]["name"] == DRAWN)["drawn"]
    steps = [
        Step(f"{name}, {who}", [Interval(**interval, args={}) for interval in drawn[name][kept]])
        for name in drawn
        for who, kept in (("traced", "engine"), ("simulated", "simulated"))
    ]
    return standalone_svg(draw_timelines, steps, (10, 0.8 + 0.8 * len(steps)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/planner.md, and draw the picture")
    print(table())
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), NAME, table()), encoding="utf-8")
        PICTURE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
