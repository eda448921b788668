"""What benchmarks/pipeline_planner.py found: the table of docs/planner.md.

python -m docs.draw_pipeline_predictions          # prints the table
python -m docs.draw_pipeline_predictions --write  # puts it into docs/planner.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from docs.papers import written

from towpath.bench.harness.age import BEFORE, is_old

DOCS = Path(__file__).parent
PAGE = DOCS / "planner.md"
RESULTS = DOCS.parent / "benchmarks" / "results" / "pipeline_planner.jsonl"
NAME = "predicted pipelines"  # of the table in the page


def last_runs() -> list[dict[str, Any]]:
    """Of each case."""
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return list({line["case"]["name"]: line for line in lines if "errors" in line}.values())


def measured(run: dict[str, Any]) -> str:
    return run["commit"][:7] + BEFORE * is_old(run, "pipeline planner")


def table() -> str:
    lines = [
        "| cables | schedule, strategy | foretold | measured | error | spread | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    errors: list[float] = []
    for run in last_runs():
        cables = run["case"]["inter"] or "no limit"
        how = "computing" if run["case"]["sizes"]["computes"] else "waiting"
        for name, error in run["errors"].items():
            predicted = run["predicted_seconds"][name]
            errors.append(abs(error))
            lines.append(
                f"| {cables}, {how} | {name} | {predicted:.3g} s | {predicted / (1 + error):.3g} s | {error:+.1%} | "
                f"{run['spread'][name]:.1%} | {measured(run)} |"
            )
    lines.append(f"| mean of {len(errors)} | | | | {statistics.fmean(errors):.1%} | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/planner.md")
    print(table())
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), NAME, table()), encoding="utf-8")


if __name__ == "__main__":
    main()
