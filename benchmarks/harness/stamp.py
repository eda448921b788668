"""What a figure depends on besides what it measures: the code, the machine, and who else was using it."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Above this somebody else is at work: a figure is then theirs as much as ours.
IDLE_LOAD = 0.5


def stamp() -> dict[str, Any]:
    """Before a measurement."""
    return {"date": now(), **code(ROOT), "host": host(), "versions": versions()}


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def code(root: Path) -> dict[str, Any]:
    """The commit, and whether the tree was as committed; results do not count, each run adds to them. None: no git."""
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return {"commit": commit, "clean": None if changed is None else changed == ""}


def host() -> dict[str, Any]:
    import torch

    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return {
        "cpu": processor(cpu) or platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }


def processor(cpuinfo: str) -> str | None:
    names = (line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name"))
    return next(names, None)


def versions() -> dict[str, str]:
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "towpath": metadata.version("towpath")}


def load() -> float:
    """How many processes ran or wanted to, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def wait_for_quiet(at_most_seconds: float) -> float:
    """The load, once our own last case has left it, or when that much time has passed."""
    until = time.monotonic() + at_most_seconds
    while load() > IDLE_LOAD and time.monotonic() < until:
        time.sleep(1.0)
    return load()


def warnings(load_before: float, clean: bool | None) -> list[str]:
    """What a reader of the figure has to know."""
    found: list[str] = []
    if load_before > IDLE_LOAD:
        found.append(f"the load before was {load_before:.2f}: something else was using the machine")
    if not clean:
        found.append("the tree was not as committed" if clean is not None else "no commit: this is no git checkout")
    return found


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
