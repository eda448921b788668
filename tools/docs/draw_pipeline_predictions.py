"""The results of the suite `pipeline_planner`: a table in docs/concepts/planner-accuracy.md."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.harness import results
from towpath.core.passes import SCHEDULES


def last_runs() -> list[dict[str, Any]]:
    """Return the last run of each case that has predictions."""
    lines = results.read(results.file_of("pipeline_planner"))
    return list(results.last(line for line in lines if "errors" in line).values())


def table() -> str:
    lines = [
        "| links | schedule, strategy | predicted | measured | error | spread | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    errors: list[float] = []
    for run in last_runs():
        cables = run["case"]["inter"] or "no limit"
        how = "computing" if run["case"]["sizes"]["computes"] else "waiting"
        for name, error in run["errors"].items():
            if name.partition(",")[0] not in SCHEDULES:  # recorded before its schedule was removed
                continue
            predicted = run["predicted_seconds"][name]
            errors.append(abs(error))
            lines.append(
                f"| {cables}, {how} | {name} | {predicted:.3g} s | {predicted / (1 + error):.3g} s | {error:+.1%} | "
                f"{run['spread'][name]:.1%} | {results.measured_at(run)} |"
            )
    lines.append(f"| mean of {len(errors)} | | | | {statistics.fmean(errors):.1%} | | |")
    return "\n".join(lines)


TABLES = {"pipeline-predictions": table}
