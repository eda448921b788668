"""A finding: what is wrong, where, and what to do about it. The words are in causes.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any


class Severity(StrEnum):
    """The effect of a finding on training."""

    BLOCKS = "blocks"  # training does not start, hangs or fails
    SLOWS = "slows"  # training runs, and each step takes longer
    RISK = "risk"  # it does nothing to the paths that were measured, and may to others


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause, as `--json` prints it.

    Attributes:
        cause: A word that stays the same between versions, for programs.
        severity: What it does to training.
        machines: The machines on which to look, the likeliest first.
        where: The cable, interface or rank.
        summary: One sentence.
        remedy: Commands and settings, or a sentence each.
        evidence: What was measured.
        pairs: The pairs of machines, by number, whose measurements show it.
        rate: The bytes per second that a cable carries because of it, and `repaired` without it.
        flops: The FLOP/s of the slowest rank because of it.
        seconds: The step with this finding alone, and without any, if the planner was asked. The first is None if there
            are no steps.
    """

    cause: str
    severity: Severity
    machines: tuple[str, ...]
    where: str
    summary: str
    remedy: tuple[str, ...]
    evidence: tuple[str, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    rate: float | None = None
    repaired: float | None = None
    flops: float | None = None
    seconds: tuple[float | None, float] | None = None


def finding(
    key: str, machines: Iterable[str], where: str, evidence: Iterable[str] = (), *, facts: Any = None, **words: Any
) -> Finding:
    """Return the finding of a cause in causes.toml.

    Args:
        key: Its name there.
        machines: The machines on which to look.
        where: The cable, interface or rank.
        evidence: What was measured.
        facts: Further attributes of the finding.
        **words: What its text needs.
    """
    told, names = _causes()[key], tuple(machines)
    words |= {"where": where, "machine": names[0], "machines": " and ".join(names)}
    remedy = (line.format_map(words) for line in told["remedy"])
    return Finding(
        cause=key.partition(",")[0],
        severity=Severity(told["severity"]),
        machines=names,
        where=where,
        summary=told["summary"].format_map(words),
        remedy=tuple(line for text in remedy for line in text.splitlines()),
        evidence=tuple(evidence),
        **(facts or {}),
    )


@cache
def _causes() -> dict[str, Any]:
    return tomllib.loads(files("towpath.doctor").joinpath("causes.toml").read_text(encoding="utf-8"))
