"""A finding: what is wrong, where, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """What a finding does to training."""

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
        evidence: What was measured.
        remedy: Commands and settings, or a sentence each.
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
    evidence: tuple[str, ...] = ()
    remedy: tuple[str, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    rate: float | None = None
    repaired: float | None = None
    flops: float | None = None
    seconds: tuple[float | None, float] | None = None
