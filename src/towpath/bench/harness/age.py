"""Whether a figure is of the code that is there now: what each suite measures, and since when that is another."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from towpath.bench.harness import stamp

BEFORE = ", before its code changed"

_ENGINE = tuple(f"src/towpath/{part}" for part in ("api.py", "engine", "collectives", "codecs", "core", "topology"))
_PLANNER = ("src/towpath/planner", "src/towpath/sim", "src/towpath/auto")
# What each suite measures: when it changes, figures are of the code before.
SOURCES: Mapping[str, tuple[str, ...]] = {
    "strategies": _ENGINE,
    "scaling": _ENGINE,
    "overhead": _ENGINE,
    "lora": _ENGINE,
    "ablations": _ENGINE,
    "muon": (*_ENGINE, "src/towpath/optim.py"),
    "memory": (*_ENGINE, "src/towpath/checkpoint"),
    "collectives": ("src/towpath/collectives", "src/towpath/core/routes.py"),
    "kernels": ("src/towpath/codecs/kernels",),
    "quality": _ENGINE,
    "planner": (*_ENGINE, *_PLANNER),
    "pipeline planner": (*_ENGINE, *_PLANNER, "src/towpath/pipeline"),
}


def is_old(line: Mapping[str, Any], suite: str, root: Path | None = None) -> bool:
    """Whether what the suite measures was another when this was measured."""
    commit, root = commit_of(line), root or stamp.checkout()
    return commit is not None and root is not None and suite in SOURCES and changed_since(commit, SOURCES[suite], root)


def commit_of(line: Mapping[str, Any]) -> str | None:
    """None: measured with an installed package."""
    return line.get("commit") or line.get("environment", {}).get("commit")


def when(line: Mapping[str, Any], suite: str, root: Path | None = None) -> str:
    """The commit that was measured, and whether its code is still what there is."""
    if commit := commit_of(line):
        return f"at {commit[:10]}{BEFORE * is_old(line, suite, root)}"
    version = line.get("versions", {}).get("towpath")
    return f"version {version}" if version else f"on {str(line.get('date'))[:10]}"


def changed_since(commit: str, paths: Sequence[str], root: Path) -> bool:
    """Whether `paths` in the working tree are others than in `commit`; not where git does not know that commit."""
    git = ["git", "-C", str(root), "diff", "--quiet", commit, "--", *paths]
    return subprocess.run(git, capture_output=True).returncode == 1
