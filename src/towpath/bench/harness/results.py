"""The files of results: a line of JSON for each run of a case, oldest first. Lines are added, never changed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from towpath.bench.harness import stamp

_CHECKOUT = stamp.checkout()
# In a checkout, with what is committed; else where one is.
FOLDER = _CHECKOUT / "benchmarks" / "results" if _CHECKOUT is not None else Path("bench-results")
# Which form a line has. 1: from before the harness.
HARNESS = 2

Line = dict[str, Any]


# Committed results are never rewritten. Their reader gives a candidate its name of today.
_RENAMED = '"whole_matrices', '"owner_stepped'


def file_of(suite: str) -> Path:
    return FOLDER / f"{suite}.jsonl"


def append(path: Path, line: Line) -> None:
    """Add a run. A line that an earlier run left unfinished is refused: somebody has to look at it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(line, ensure_ascii=False)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                raise ValueError(f"{path} ends in the middle of a line: mend or remove that line, then run again.")
        file.write(text.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Line]:
    """Every run, oldest first; none where there is no file."""
    if not path.exists():
        return []
    lines: list[Line] = []
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no file of results: it is not text.") from None
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(json.loads(text.replace(*_RENAMED)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not a line of JSON ({error}): mend or remove it.") from None
    return lines


def last(lines: Iterable[Line], failed: bool = False) -> dict[str, Line]:
    """The last run of each case, in the order in which cases came first; `failed`: also of one that has no figures."""
    found: dict[str, Line] = {}
    for line in lines:
        if failed or "failed" not in line:
            found[line["case"]["name"]] = line
    return found


def history(lines: Iterable[Line], case: str) -> list[Line]:
    return [line for line in lines if line["case"]["name"] == case]


def measured_at(line: Line) -> str:
    """Return the short hash of the commit that was measured, or else the package's version or the date."""
    if commit := line.get("commit") or line.get("environment", {}).get("commit"):
        return str(commit)[:10]
    version = line.get("versions", {}).get("towpath")
    return f"version {version}" if version else str(line.get("date"))[:10]


def interval(check: Line) -> str:
    """Return the 95 % interval of a recorded figure as text, or nothing if it has none."""
    return f"{check['low']:.3g} – {check['high']:.3g}" if "low" in check else ""
