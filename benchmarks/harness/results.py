"""Files of results, one line of JSON per run of a case, and the stamp of what a figure depends on.

Lines are added, never changed. Results that are older than a word or a name keep their text. Their reader, `read`,
gives them today's.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"
# The form of a line. 1 is from before the harness.
HARNESS = 2
# A machine with more busy processors than this runs something else, and a figure depends on it.
IDLE = 0.2
_PROCESSORS = Path("/proc/stat")

Line = dict[str, Any]


# Files ----------------------------------------------------------------------------------------------------------------

# Words of recorded lines, and those of today. A word that is a key or a name is in quotes.
_RENAMED = {
    '"contestants":': '"candidates":',
    '"regime": {"asked":': '"comm_ratio": {"requested":',
    '"regime":': '"comm_ratio":',
    '"found in the race":': '"found":',
    '"floor_seconds":': '"lower_bound_seconds":',
    ": step / floor of perfect overlap": ": step / lower bound with perfect overlap",
    "the regime was ": "the communication-to-computation ratio was ",
    " in the race; asked ": "; requested ",
    "contestant '": "candidate '",
    '"oracle encodes"': '"reference encodes"',
    '"oracle decodes"': '"reference decodes"',
    "code/oracle": "code/reference",
    '"whole_matrices': '"owner_stepped',
    r"\n[sync]\n": r"\n[grad_sync]\n",  # of strategies
    r"\n[publish]\n": r"\n[param_sync]\n",
    '"halves": false, ': "",  # of the schedules that split a backward pass, which are gone
    ', "at_once": false': "",
}
# `2x2-regime8-micro1` is `2x2-ratio8-micro1` today.
_CASE_NAME = re.compile(r"(\d+x\d+)-regime([\d.]+)-")


def file_of(suite: str) -> Path:
    """Return the file of a suite's committed results."""
    return FOLDER / f"{suite}.jsonl"


def append(path: Path, line: Line) -> None:
    """Add a run. Raise `ValueError` if an earlier run left an unfinished line, which a person has to look at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(line, ensure_ascii=False)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                raise ValueError(f"{path} ends in the middle of a line: mend or remove that line, then run again.")
        file.write(text.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Line]:
    """Return every run, oldest first, in today's words. A file that does not exist has no runs."""
    if not path.exists():
        return []
    lines: list[Line] = []
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no file of results: it is not text.") from None
    for number, text in enumerate(texts, start=1):
        for recorded, today in _RENAMED.items():
            text = text.replace(recorded, today)
        try:
            lines.append(json.loads(_CASE_NAME.sub(r"\1-ratio\2-", text)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not a line of JSON ({error}): mend or remove it.") from None
    return lines


def last(lines: Iterable[Line], failed: bool = False) -> dict[str, Line]:
    """Return the last run of each case, in the order of their first runs. With `failed`, runs without figures count."""
    found: dict[str, Line] = {}
    for line in lines:
        if failed or "failed" not in line:
            found[line["case"]["name"]] = line
    return found


def measured_at(line: Line) -> str:
    """Return the short hash of the commit that was measured, or else the package's version or the date."""
    if commit := line.get("commit") or line.get("environment", {}).get("commit"):
        return str(commit)[:10]
    version = line.get("versions", {}).get("towpath")
    return f"version {version}" if version else str(line.get("date"))[:10]


def interval(check: Line) -> str:
    """Return the 95 % interval of a recorded figure as text, or nothing if it has none."""
    return f"{check['low']:.3g} – {check['high']:.3g}" if "low" in check else ""


# The stamp ------------------------------------------------------------------------------------------------------------


def stamp() -> dict[str, Any]:
    """Return the date, the commit, the machine and the versions, before a measurement."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"date": now, **code(ROOT), "host": host(), "versions": versions()}


def code(root: Path) -> dict[str, Any]:
    """Return the commit, and whether the tree equals it. Results do not count, because each run adds to them.

    Both are None if `root` is not the top of a git checkout.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return {"commit": None, "clean": None}
    changed = _git(root, "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return {"commit": _git(root, "rev-parse", "HEAD"), "clean": None if changed is None else changed == ""}


def same_code(line: Mapping[str, Any], now: Mapping[str, Any], version: str) -> bool:
    """Return whether a result is of the code that runs now: the same clean code, or without git, the same version."""
    if now["commit"] is None:
        return line.get("commit") is None and line.get("versions", {}).get("towpath") == version
    if not (line.get("clean") and now["clean"] and line.get("commit")):
        return False
    return line["commit"] == now["commit"] or _same_tree(line["commit"], now["commit"])


@cache
def _same_tree(before: str, after: str) -> bool:
    """Return whether two commits differ at most in results and in prose, as where results were committed."""
    paths = (".", ":(exclude)benchmarks/results", ":(exclude)docs", ":(exclude)tests", ":(exclude,glob)**/*.md")
    return _git(ROOT, "diff", "--quiet", before, after, "--", *paths) is not None


def host() -> dict[str, Any]:
    """Return what the machine is."""
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
    """Return the name of the first processor in the text of /proc/cpuinfo."""
    names = (line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name"))
    return next(names, None)


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and Towpath."""
    import torch

    import towpath

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "towpath": towpath.__version__,
    }


def load() -> float:
    """Return how many processes ran or wanted to run, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def wait_for_quiet(at_most_seconds: float) -> float:
    """Wait until almost no processor is busy, or the time is over. Return how many processors are busy then."""
    until = time.monotonic() + at_most_seconds
    while (busy := busy_processors()) > IDLE and time.monotonic() < until:
        pass
    return busy


def busy_processors(seconds: float = 2.0) -> float:
    """Return how many processors are busy, on average over the next seconds.

    The load's average over a minute would still contain the case before this one. It is the result only where the
    kernel has no /proc/stat.
    """
    if not _PROCESSORS.exists():
        return load()
    before = _busy_seconds(_PROCESSORS.read_text())
    began = time.monotonic()
    time.sleep(seconds)
    return round((_busy_seconds(_PROCESSORS.read_text()) - before) / (time.monotonic() - began), 2)


def _busy_seconds(text: str) -> float:
    """Return the busy seconds of all processors, from the first line of /proc/stat."""
    user, nice, system, _, _, irq, softirq, steal = map(int, text.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def warnings(busy_before: float, clean: bool | None) -> list[str]:
    """Return what a reader of the figure has to know. Without git, `clean` is None, and no warning is due."""
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
