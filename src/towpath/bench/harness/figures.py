"""Medians of the rounds, their spread, and ratios with an interval and an optional limit."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a median lies with probability `coverage`, whatever the distribution of the rounds."""

    low: float
    high: float
    coverage: float


def interval_of_median(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The narrowest pair of ranks around the median that covers it as often as asked (that of the sign test).

    With fewer than six rounds no pair does at 95 %: then it is the smallest and the largest, and `coverage` says how
    often they do.
    """
    ordered, count = sorted(values), len(values)
    outside = 0.0  # the probability that the median is below the value of this rank
    chosen = Interval(ordered[0], ordered[-1], 1 - 2 * 0.5**count)
    for rank in range(count // 2):
        outside += comb(count, rank) * 0.5**count
        if 1 - 2 * outside < confidence:
            break
        chosen = Interval(ordered[rank], ordered[-1 - rank], 1 - 2 * outside)
    return chosen


@dataclass(frozen=True, slots=True)
class Check:
    """A figure with optional limits. `interval` is the interval of a ratio over the rounds."""

    what: str
    found: float
    at_most: float | None = None
    at_least: float | None = None
    interval: Interval | None = None

    @property
    def met(self) -> bool | None:
        """Whether the figure keeps its limits, or None without limits."""
        if self.at_most is None and self.at_least is None:
            return None
        return (self.at_most is None or self.found <= self.at_most) and (
            self.at_least is None or self.found >= self.at_least
        )

    def recorded(self) -> dict[str, Any]:
        limits = {"at_most": self.at_most, "at_least": self.at_least}
        line: dict[str, Any] = {"what": self.what, "found": self.found}
        line |= {name: limit for name, limit in limits.items() if limit is not None}
        if self.interval is not None:
            line |= {"low": self.interval.low, "high": self.interval.high, "coverage": self.interval.coverage}
        return line | {"met": self.met}


def ratio(seconds: Mapping[str, Sequence[float]], ours: str, theirs: str, at_most: float | None = None) -> Check:
    """`ours` over `theirs`: of their medians. The interval is of the ratio within a round, which both shared."""
    found = statistics.median(seconds[ours]) / statistics.median(seconds[theirs])
    rounds = [mine / other for mine, other in zip(seconds[ours], seconds[theirs], strict=True)]
    return Check(f"{ours} / {theirs}", found, at_most, interval=interval_of_median(rounds))


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {kind: statistics.median(values) for kind, values in seconds.items()}


def spreads(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The largest less the smallest, over the median."""
    return {kind: (max(values) - min(values)) / statistics.median(values) for kind, values in seconds.items()}


def verdict(check: Mapping[str, Any]) -> str:
    """A recorded check in one line."""
    parts = [f"{check['what']}: {check['found']:.4g}"]
    if "low" in check:
        parts.append(f"[{check['low']:.4g}, {check['high']:.4g} at {check['coverage']:.0%}]")
    if limit := against_limit(check):
        parts.append(f"(limit {limit})")
    return " ".join(parts)


def against_limit(check: Mapping[str, Any]) -> str:
    """Return the recorded limit and whether the figure keeps it, or nothing if there is no limit."""
    if not (limit := _limit(check)):
        return ""
    over = check.get("at_most") is not None and check["found"] > check["at_most"]
    return f"{limit}: {'met' if check['met'] else 'exceeded' if over else 'not reached'}"


def _limit(check: Mapping[str, Any]) -> str:
    signs = (("at_most", "≤"), ("at_least", "≥"))
    return " and ".join(f"{sign} {check[key]:.4g}" for key, sign in signs if check.get(key) is not None)
