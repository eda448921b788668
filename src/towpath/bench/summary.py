"""The speed-ups of our strategies over the best tuned lossless peer, by family and communication-to-computation ratio.

`comm_ratio` is the time that FSDP2's communication takes alone, over the time that the model computes. Every speed-up
is a ratio of medians of steps that took turns in one comparison.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from towpath.bench.environment import UNSHAPED
from towpath.bench.table import best_lossless_peer

Line = Mapping[str, Any]

COMM_RATIOS = ("8", "4", "2", "1", "0.5", UNSHAPED)
README_RATIOS = COMM_RATIOS[:4]
HEADINGS = ("micro-steps", "strategies", "lossless", *COMM_RATIOS)
# A case's name says everything that differs from the usual model (`environment.py`).
_USUAL = re.compile(r"\d+x\d+-(regime)?(?P<ratio>[\w.]+)-micro\d+(-waiting[\d.]*)?(-in-step)?")
# The first pattern that a candidate's name matches.
_FAMILIES = (
    (re.compile(r"gradients=low-rank"), "low-rank gradients"),
    (re.compile(r"gradients=int4"), "int4 gradients"),
    (re.compile(r"gradients=int8"), "int8 gradients"),
    (re.compile(r"^paro-"), "PaRO"),
    (re.compile(r"^mics\b"), "MiCS"),
    (re.compile(r"^zero\+\+"), "ZeRO++"),
    (re.compile(r"^hpz\b"), "ZeRO++, hpZ alone"),
    (re.compile(r"^(ddp|zero\d)\b"), "DDP, ZeRO"),
)


def comm_ratio_of(line: Line) -> str | None:
    """Return the column of a comparison, or None for another model, precision or a link rate given by hand."""
    found = _USUAL.fullmatch(line["case"]["name"])
    return found["ratio"] if found is not None and found["ratio"] in COMM_RATIOS else None


def family_of(candidate: str) -> str:
    """Return the name of a strategy's family, or the strategy's own name if it has none."""
    return next((family for pattern, family in _FAMILIES if pattern.search(candidate)), candidate)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The speed-up of each of our candidates in one run of one case.

    `measured_ratio` is the communication-to-computation ratio found during the run, if it was measured. With
    `blocks_wait`, blocks sleep instead of computing.
    """

    comm_ratio: str
    measured_ratio: float | None
    nodes: int
    ranks_per_node: int
    micro_steps: int
    blocks_wait: bool
    lossless: Mapping[str, float]
    codecs: Mapping[str, float]

    @staticmethod
    def of(line: Line) -> Comparison | None:
        """Return the comparison of a result line, or None if it failed or does not belong in the summary."""
        ratio = comm_ratio_of(line)
        if ratio is None or "failed" in line or (peer := best_lossless_peer(line)) is None:
            return None
        speedups: dict[bool, dict[str, float]] = {True: {}, False: {}}
        for name in line["communication_share"]:
            if (about := line["contestants"][name])["ours"]:
                speedups[about["lossless"]][name] = peer / line["median_seconds"][name]
        workload = line["case"]["workload"]
        return Comparison(
            ratio,
            line.get("regime", {}).get("found in the race"),
            workload["topology"]["nodes"],
            workload["topology"]["ranks_per_node"],
            workload["micro_steps"],
            bool(workload["wait_seconds"]),
            speedups[True],
            speedups[False],
        )

    def by_family(self) -> dict[tuple[bool, str], float]:
        """Return the fastest member of each family, by whether it uses codecs and the family's name."""
        found: dict[tuple[bool, str], float] = {}
        for codecs, speedups in ((False, self.lossless), (True, self.codecs)):
            for name, speedup in speedups.items():
                family = (codecs, family_of(name))
                found[family] = max(speedup, found.get(family, 0.0))
        return found


def comparisons(lines: Iterable[Line]) -> list[Comparison]:
    return [found for found in map(Comparison.of, lines) if found is not None]


def rows(lines: Iterable[Line]) -> list[Sequence[str]]:
    """Return the table below `HEADINGS`: a row per number of micro-steps and family of strategies."""
    found: dict[tuple[int, bool, str], dict[str, list[float]]] = {}
    for comparison in comparisons(lines):
        for (codecs, family), speedup in comparison.by_family().items():
            row = found.setdefault((comparison.micro_steps, codecs, family), {})
            row.setdefault(comparison.comm_ratio, []).append(speedup)
    return [
        (
            str(micro_steps),
            family,
            "no" if codecs else "yes",
            *(_with_count(row.get(ratio, ())) for ratio in COMM_RATIOS),
        )
        for (micro_steps, codecs, family), row in sorted(found.items())
    ]


def readme_rows(lines: Iterable[Line]) -> list[Sequence[str]]:
    """Return a row per ratio: our fastest lossless strategy and our fastest with codecs, over all comparisons."""
    found = comparisons(lines)
    by_ratio = {ratio: [each for each in found if each.comm_ratio == ratio] for ratio in README_RATIOS}
    return [
        (
            ratio,
            str(len(here)),
            _range([max(each.lossless.values()) for each in here if each.lossless]),
            _range([max(each.codecs.values()) for each in here if each.codecs]),
        )
        for ratio, here in by_ratio.items()
    ]


def _with_count(speedups: Sequence[float]) -> str:
    if not speedups:
        return ""
    spread = "" if len(speedups) == 1 else f" ({min(speedups):.2f}–{max(speedups):.2f})"
    return f"{median(speedups):.2f}{spread}, n = {len(speedups)}"


def _range(speedups: Sequence[float]) -> str:
    if not speedups:
        return "not measured"
    return f"{min(speedups):.2f}× to {max(speedups):.2f}×, median {median(speedups):.2f}×"
