"""Medians of the rounds, their spread, and ratios with an interval and an optional limit."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from towpath.comparison import ConfidenceInterval, interval_of_median


@dataclass(frozen=True, slots=True)
class Check:
    """A figure with optional limits. `interval` is the interval of a ratio over the rounds."""

    what: str
    found: float
    at_most: float | None = None
    at_least: float | None = None
    interval: ConfidenceInterval | None = None

    @property
    def met(self) -> bool | None:
        """Whether the figure keeps its limits, or None without limits."""
        if self.at_most is None and self.at_least is None:
            return None
        return (self.at_most is None or self.found <= self.at_most) and (
            self.at_least is None or self.found >= self.at_least
        )

    def recorded(self) -> dict[str, Any]:
        """Return the figure as a result line keeps it."""
        limits = {"at_most": self.at_most, "at_least": self.at_least}
        line: dict[str, Any] = {"what": self.what, "found": self.found}
        line |= {name: limit for name, limit in limits.items() if limit is not None}
        if self.interval is not None:
            line |= {"low": self.interval.low, "high": self.interval.high, "coverage": self.interval.coverage}
        return line | {"met": self.met}


def ratio(seconds: Mapping[str, Sequence[float]], ours: str, theirs: str, at_most: float | None = None) -> Check:
    """Return the ratio of two medians, `ours` over `theirs`, with the interval of the ratio within a round."""
    found = statistics.median(seconds[ours]) / statistics.median(seconds[theirs])
    rounds = [mine / other for mine, other in zip(seconds[ours], seconds[theirs], strict=True)]
    return Check(f"{ours} / {theirs}", found, at_most, interval=interval_of_median(rounds))


def speedup(
    seconds: Mapping[str, Sequence[float]], what: str, ours: str, theirs: str, at_least: float | None = None
) -> Check:
    """Return how many times as fast `ours` is as `theirs`, with the interval within a round."""
    found = ratio(seconds, theirs, ours)
    return Check(what, found.found, at_least=at_least, interval=found.interval)


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each list."""
    return {kind: statistics.median(values) for kind, values in seconds.items()}


def spreads(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the difference between the largest and the smallest value, over the median, of each list."""
    return {kind: (max(values) - min(values)) / statistics.median(values) for kind, values in seconds.items()}


def verdict(check: Mapping[str, Any]) -> str:
    """Return a recorded figure in one line."""
    parts = [f"{check['what']}: {check['found']:.4g}"]
    if "low" in check:
        parts.append(f"[{check['low']:.4g}, {check['high']:.4g} at {check['coverage']:.0%}]")
    if limit := against_limit(check):
        parts.append(f"(limit {limit})")
    return " ".join(parts)


def against_limit(check: Mapping[str, Any]) -> str:
    """Return the recorded limit and whether the figure keeps it, or nothing if there is no limit."""
    signs = (("at_most", "≤"), ("at_least", "≥"))
    limit = " and ".join(f"{sign} {check[key]:.4g}" for key, sign in signs if check.get(key) is not None)
    if not limit:
        return ""
    over = check.get("at_most") is not None and check["found"] > check["at_most"]
    return f"{limit}: {'met' if check['met'] else 'exceeded' if over else 'not reached'}"
