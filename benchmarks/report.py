"""The last run of every case, and the history of one.

    python benchmarks/report.py                      what there is
    python benchmarks/report.py engine               the last run of each case of benchmarks/results/engine.jsonl
    python benchmarks/report.py engine zero3-fsdp2   every run of that case, oldest first

The interval is of the ratio within a round; `!` marks a run with a warning (the machine was busy, or the tree was not
as committed), `old` one from before the harness.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from towpath.bench.harness import results
from towpath.bench.harness.figures import against_limit

WIDTH = 100
COLUMNS = (28, 24, 7, 15, 22)  # case or date, what, found, interval, limit


def rows(label: str, line: dict[str, Any]) -> Iterable[tuple[str, ...]]:
    """One for each check; the first has the label."""
    checks: list[dict[str, Any]] = line["checks"] or [
        {"what": "FAILED" if "failed" in line else "(no figure)", "found": float("nan")}
    ]
    mark = "old" if line["harness"] < results.HARNESS else "!" * bool(line.get("warnings"))
    for number, check in enumerate(checks):
        interval = f"[{check['low']:.3g}, {check['high']:.3g}]" if "low" in check else ""
        found = f"{check['found']:.4g}"
        yield (
            f"{label} {mark}".strip() if number == 0 else "",
            check["what"],
            found,
            interval,
            against_limit(check),
        )


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    every = [head, *lines]
    return "\n".join(
        " ".join(_cell(text, width) for text, width in zip(row, COLUMNS, strict=True)).rstrip()[:WIDTH] for row in every
    )


def last_runs(path: Path) -> str:
    found = results.last(results.read(path), failed=True)
    body = [row for name, line in found.items() for row in rows(name, line)]
    return table(("case", "figure", "found", "interval", "limit"), body)


def history_of(path: Path, case: str) -> str:
    found = results.history(results.read(path), case)
    if not found:
        raise SystemExit(f"no run of {case} in {path}; there are {', '.join(results.last(results.read(path)))}")
    body = [
        row
        for line in found
        for row in rows(f"{line['date'][:16].replace('T', ' ')} {(line.get('commit') or '')[:7]}", line)
    ]
    return f"{case}\n" + table(("run", "figure", "found", "interval", "limit"), body)


def _cell(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", help="a name, or a file of results")
    parser.add_argument("case", nargs="?")
    options = parser.parse_args(arguments)
    if options.suite is None:
        for path in sorted(results.FOLDER.glob("*.jsonl")):
            lines = results.read(path)
            print(
                f"{path.stem:<20} {len(results.last(lines)):>3} cases, {len(lines):>4} runs, "
                f"the last {lines[-1]['date']}"
            )
        return
    path = Path(options.suite) if options.suite.endswith(".jsonl") else results.file_of(options.suite)
    if not path.exists():
        there = ", ".join(p.stem for p in sorted(results.FOLDER.glob("*.jsonl")))
        raise SystemExit(f"no results of {options.suite!r}; there are {there}")
    print(history_of(path, options.case) if options.case else last_runs(path))


if __name__ == "__main__":
    main()
