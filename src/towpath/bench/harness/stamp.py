"""What a figure depends on besides what it measures: the code, the machine, and who else was using it."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

# Above this somebody else is at work: a figure is then theirs as much as ours.
IDLE = 0.2  # processors
_PROCESSORS = Path("/proc/stat")
# What a checkout of Towpath has, and an installed package has not.
_RESULTS = Path("benchmarks", "results")

# Where this package lies in a checkout: <ROOT>/src/towpath/bench/harness/stamp.py.
ROOT = Path(__file__).parents[4]


def stamp() -> dict[str, Any]:
    """Before a measurement."""
    return {"date": now(), **code(ROOT), "host": host(), "versions": versions()}


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def checkout() -> Path | None:
    """The checkout that this package runs from; None where it was installed."""
    return ROOT if (ROOT / _RESULTS).is_dir() else None


def code(root: Path) -> dict[str, Any]:
    """The commit, and whether the tree was as committed; results do not count, each run adds to them.

    None where `root` is no git checkout itself: a package may be installed inside somebody else's. Its version, which
    every stamp has, then says which code it was.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return {"commit": None, "clean": None}
    changed = _git(root, "status", "--porcelain", "--", ".", f":(exclude){_RESULTS}")
    return {"commit": _git(root, "rev-parse", "HEAD"), "clean": None if changed is None else changed == ""}


def same_code(line: Mapping[str, Any], now: Mapping[str, Any], version: str) -> bool:
    """Whether a result is of the code that runs now: of its commit with nothing changed; without git, its version."""
    if now["commit"] is not None:
        return bool(line.get("commit") == now["commit"] and line.get("clean") and now["clean"])
    return line.get("commit") is None and line.get("versions", {}).get("towpath") == version


def host() -> dict[str, Any]:
    import torch

    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found: dict[str, Any] = {
        "cpu": processor(cpu) or platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def processor(cpuinfo: str) -> str | None:
    names = (line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name"))
    return next(names, None)


def versions() -> dict[str, str]:
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "towpath": version()}


def version() -> str:
    return metadata.version("towpath")


def load() -> float:
    """How many processes ran or wanted to, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def wait_for_quiet(at_most_seconds: float) -> float:
    """How many processors are busy, once next to none is, or when that much time has passed."""
    until = time.monotonic() + at_most_seconds
    while (busy := busy_processors()) > IDLE and time.monotonic() < until:
        pass
    return busy


def busy_processors(seconds: float = 2.0) -> float:
    """How many are, on average over the next seconds; the load's average of a minute still has our own last case. Where
    the kernel does not tell (/proc/stat), that average."""
    if not _PROCESSORS.exists():
        return load()
    before = _busy_seconds(_PROCESSORS.read_text())
    began = time.monotonic()
    time.sleep(seconds)
    return round((_busy_seconds(_PROCESSORS.read_text()) - before) / (time.monotonic() - began), 2)


def _busy_seconds(text: str) -> float:
    """Of all processors: user, nice, system, irq, softirq and steal, of the first line."""
    user, nice, system, _, _, irq, softirq, steal = map(int, text.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def warnings(busy_before: float, clean: bool | None) -> list[str]:
    """What a reader of the figure has to know. `clean` is None where there is no git: a version is as good then."""
    found: list[str] = []
    if busy_before > IDLE:
        found.append(f"{busy_before:.2f} processors were busy before: something else was using the machine")
    if clean is False:
        found.append("the tree was not as committed")
    return found


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
