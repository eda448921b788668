"""Generated tables that need no simulation: how many rows match, and the rules of each program."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.docs.papers.lines import TICK, cells_of
from tools.docs.papers.peers import PROGRAMS

PAGE = Path(__file__).parents[3] / "benchmarks" / "comparisons" / "papers.md"
_NUMBER = re.compile(r"\d+\.\d\d")


def counts() -> str:
    """Return how many gains of the reference page match. A gain counts if one figure is printed for it."""
    found = re.search(r"<!-- figures: papers -->\n(.*?)<!-- end", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    totals: dict[str, list[int]] = {}
    for place, what, printed, *cells in cells_of(found[1]):
        if " / " in what and _NUMBER.fullmatch(printed) and cells[0] != "–" and "Optimus" not in place:
            total = totals.setdefault(place.split(",")[0], [0, 0, 0])
            for i, number in enumerate((1, *(cell.endswith(TICK) for cell in cells))):
                total[i] += number
    totals["all"] = [sum(column) for column in zip(*totals.values(), strict=True)]
    lines = ["| paper | gains that count | match as it ran | match overlapped |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {paper} | {' | '.join(map(str, total))} |" for paper, total in totals.items())])


def programs() -> str:
    """Return the rules of each program, and where they are written."""
    lines = ["| program | in which order it communicates | source |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {each} | {each.source} |" for name, each in PROGRAMS.items())])


TABLES: Mapping[str, Callable[[], str]] = {"papers-counts": counts, "papers-programs": programs}
