"""The seconds from the moment that a lost node is noticed to the next step, by part. No torch."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

# What ends with each mark, in order.
_PARTS = {
    "started": "launcher",
    "called": "imports",
    "joined": "joining",
    "asked": "model and data",
    "restored": "state",
    "stepped": "first step",
}
_marks: dict[str, float] = {}
_noticed: float | None = None  # when a loss was noticed, if this process was started after one


def mark(name: str) -> None:
    """Note that this process has come to a point, the first time."""
    _marks.setdefault(name, time.time())


def begin(noticed: float | None) -> None:
    """Count from the time when a loss was noticed, in seconds since 1970."""
    global _noticed
    _noticed = noticed


def seconds() -> dict[str, float]:
    """Return the seconds of each part, or nothing if no loss was noticed."""
    if _noticed is None:
        return {}
    with suppress(OSError, ValueError, IndexError):
        _marks["started"] = _start_time()
    parts, before = dict[str, float](), _noticed
    for name, part in _PARTS.items():
        if name in _marks:
            parts[part], before = max(0.0, _marks[name] - before), max(before, _marks[name])
    return parts


def _start_time() -> float:
    """Return when this process began, in seconds since 1970. Only Linux tells."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
