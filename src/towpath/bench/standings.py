"""How our best stands beside the best lossless peer, in every environment that was raced: what a reader asks first.

A row for each cluster, number of micro-steps and kind of blocks; a column for each regime. Beside the ratio stands what
it would be if our best took what the simulator gives for perfect overlap: where that is near, nothing is left to win.
Unshaped cables are another regime on each cluster; which one stands there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from towpath.bench.environment import UNSHAPED
from towpath.bench.selection import OUR_LOSSLESS, OUR_LOSSY

Line = dict[str, Any]

# Columns: regimes, and cables as fast as the machine goes. The mean is of the regimes that targets are set for.
REGIMES, OF_THE_MEAN = (8.0, 4.0, 2.0, 1.0, 0.5), (8.0, 4.0, 2.0, 1.0)
COLUMNS = (*(f"{regime:g}" for regime in REGIMES), UNSHAPED)
MEAN = "mean of 8 to 1"
HEADINGS = ("nodes × ranks", "micro-steps", "a block", *COLUMNS, MEAN)
TITLES: Mapping[str, str] = {
    OUR_LOSSLESS: "Our best lossless strategy, times as fast as the best lossless peer",
    OUR_LOSSY: "Our best strategy with codecs, times as fast as the best lossless peer",
}
# Asked of our best lossless in the mean, by micro-steps of a step.
MEAN_TARGETS: Mapping[int, float] = {1: 1.25, 4: 1.15}
# What is not as usual is named in a case's name (`environment.py`).
_USUAL = re.compile(r"\d+x\d+-(regime)?(?P<column>[\w.]+)-micro\d+(-waiting[\d.]*)?")
_RACED = re.compile(r": .+ against (?P<theirs>.+), times as fast$")


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What a row's races share. `block`: computes, waits, or waits so many seconds in its forward pass."""

    nodes: int
    ranks: int
    micro_steps: int
    block: str

    @staticmethod
    def of(line: Line) -> Setting:
        workload = line["case"]["workload"]
        topology = workload["topology"]
        _, waits, seconds = line["case"]["name"].partition("-waiting")
        block = f"waits {seconds} s" if seconds else "waits" if waits else "computes"
        return Setting(topology["nodes"], topology["ranks_per_node"], workload["micro_steps"], block)

    def cells(self) -> tuple[str, str, str]:
        return f"{self.nodes} × {self.ranks}", str(self.micro_steps), self.block


@dataclass(frozen=True, slots=True)
class Standing:
    """Times as fast as the best lossless peer; `most`: with perfect overlap, where the race says what that takes."""

    found: float
    most: float | None
    missed: bool
    line: Line

    def __str__(self) -> str:
        regime = None if "regime" in self.line["case"]["name"] else self.line.get("regime", {}).get("found in the race")
        at = "" if regime is None else f" at {regime:.2g}"
        return _shown(self.found, self.most) + at + ", missed" * self.missed


def standings(lines: Iterable[Line], what: str) -> dict[Setting, dict[str, Standing]]:
    """Of the races of bf16 models of the usual size; `what`: OUR_LOSSLESS or OUR_LOSSY. Rows and columns in order."""
    found: dict[Setting, dict[str, Standing]] = {}
    for line in lines:
        column, standing = column_of(line), standing_of(line, what)
        if column is not None and standing is not None:
            found.setdefault(Setting.of(line), {})[column] = standing
    return {setting: found[setting] for setting in sorted(found)}


def column_of(line: Line) -> str | None:
    """None: raced at a rate that somebody named, in another precision or with a model of another size."""
    found = _USUAL.fullmatch(line["case"]["name"])
    return found["column"] if found is not None and found["column"] in COLUMNS else None


def standing_of(line: Line, what: str) -> Standing | None:
    """None where nobody of that kind took part."""
    for check in line["checks"]:
        if check["what"].startswith(f"{what}: ") and (raced := _RACED.search(check["what"])):
            least = _least_seconds(line, lossless=what == OUR_LOSSLESS)
            most = None if least is None else line["median_seconds"][raced["theirs"]] / least
            return Standing(check["found"], most, check.get("met") is False, line)
    return None


def _least_seconds(line: Line, lossless: bool) -> float | None:
    """Of a step of ours with perfect overlap, and then the optimizer."""
    floors, optimizer = line.get("floor_seconds", {}), line.get("optimizer_seconds", {})
    kinds = line["contestants"]
    ours = [name for name in floors if name in optimizer and kinds[name]["lossless"] is lossless]
    return min((floors[name] + optimizer[name] for name in ours), default=None)


def mean_of(row: Mapping[str, Standing], asked: float | None, mark: Callable[[Line], str]) -> str:
    """The geometric one, where all it is of were raced."""
    each = [row[f"{regime:g}"] for regime in OF_THE_MEAN if f"{regime:g}" in row]
    if len(each) < len(OF_THE_MEAN):
        return ""
    most = [one.most for one in each if one.most is not None]
    found = geometric_mean([one.found for one in each])
    shown = _shown(found, geometric_mean(most) if len(most) == len(each) else None)
    missed = asked is not None and found < asked
    return shown + ", missed" * missed + max(mark(one.line) for one in each)


def _shown(found: float, most: float | None) -> str:
    return f"{found:.2f}" if most is None else f"{found:.2f} of {most:.2f}"


def rows(lines: Iterable[Line], what: str, mark: Callable[[Line], str] = lambda line: "") -> list[Sequence[str]]:
    """Under HEADINGS; `mark`: what is said beside a figure of that race."""
    return [
        (
            *setting.cells(),
            *(f"{row[column]}{mark(row[column].line)}" if column in row else "" for column in COLUMNS),
            mean_of(row, MEAN_TARGETS.get(setting.micro_steps) if what == OUR_LOSSLESS else None, mark),
        )
        for setting, row in standings(lines, what).items()
    ]


def headline(lines: Sequence[Line]) -> str:
    """One sentence: from the race that won us least to the one that won us most."""

    def span(what: str, *columns: str) -> str:
        found = [row[column].found for row in standings(lines, what).values() for column in columns if column in row]
        return f"{min(found):.2f} to {max(found):.2f}" if found else "?"

    return (
        "Raced against DDP, FSDP2 and HSDP, each as its experts tune it, on clusters of two to four nodes: where FSDP2 "
        "communicates four to eight times as long as it computes, our best lossless strategy was "
        f"**{span(OUR_LOSSLESS, '8', '4')} times** as fast as the best of them and our best with codecs "
        f"**{span(OUR_LOSSY, '8', '4')} times**; where it communicates as long as it computes, "
        f"{span(OUR_LOSSLESS, '1')} and {span(OUR_LOSSY, '1')} times."
    )
