"""Generated tables that need no simulation: how many rows match, why others do not, and the rules of each program."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.docs.papers.lines import TICK, cells_of
from tools.docs.papers.peers import PROGRAMS

PAGE = Path(__file__).parents[3] / "benchmarks" / "comparisons" / "papers.md"
# By row, why its gain does not match as it ran.
REASONS = Path(__file__).with_name("reasons.toml")
_NUMBER = re.compile(r"\d+\.\d\d")


class Gain(NamedTuple):
    """A row that counts: a gain for which the paper prints one figure."""

    place: str
    what: str
    printed: str
    as_it_ran: str
    overlapped: str

    @property
    def name(self) -> str:
        return f"{self.place} | {self.what}"


def gains() -> list[Gain]:
    """Return the rows of the reference page that count."""
    found = re.search(r"<!-- figures: papers -->\n(.*?)<!-- end", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    rows = (Gain(*cells) for cells in cells_of(found[1]))
    return [row for row in rows if " / " in row.what and _NUMBER.fullmatch(row.printed) and row.as_it_ran != "–"]


def counts() -> str:
    """Return how many gains of the reference page match."""
    totals: dict[str, list[int]] = {}
    for gain in gains():
        total = totals.setdefault(gain.place.split(",")[0], [0, 0, 0])
        for i, number in enumerate((1, gain.as_it_ran.endswith(TICK), gain.overlapped.endswith(TICK))):
            total[i] += number
    totals["all"] = [sum(column) for column in zip(*totals.values(), strict=True)]
    lines = ["| paper | gains that count | match as it ran | match overlapped |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {paper} | {' | '.join(map(str, total))} |" for paper, total in totals.items())])


def reasons() -> str:
    """Return the gains that do not match as it ran, and why."""
    return reasons_of(gains(), tomllib.loads(REASONS.read_text(encoding="utf-8")))


def reasons_of(rows: Sequence[Gain], why: Mapping[str, str]) -> str:
    """Return a line for each row that does not match as it ran.

    Raises:
        ValueError: If such a row has no reason, or another row has one.
    """
    missed = [row for row in rows if not row.as_it_ran.endswith(TICK)]
    names, given = {row.name for row in missed}, set(why)
    if names != given:
        raise ValueError(
            f"{REASONS.name} lacks {sorted(names - given)}, and has rows that match, do not count or do not exist: "
            f"{sorted(given - names)}. Every gain that counts and does not match needs a reason."
        )
    lines = ["| paper | what | printed | as it ran | why |", "|---|---|---|---|---|"]
    shown = (f"| {row.place} | {row.what} | {row.printed} | {row.as_it_ran} | {why[row.name]} |" for row in missed)
    return "\n".join([*lines, *shown])


def programs() -> str:
    """Return the rules of each program, and where they are written."""
    lines = ["| program | in which order it communicates | source |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {each} | {each.source} |" for name, each in PROGRAMS.items())])


TABLES: Mapping[str, Callable[[], str]] = {
    "papers-counts": counts,
    "papers-reasons": reasons,
    "papers-programs": programs,
}
