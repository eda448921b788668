"""The result file of a benchmark: one entry a case, each with the environment it was measured in."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def keep(path: Path, result: dict[str, Any], order: Sequence[str]) -> None:
    """Put `result` in the file, in the place of an earlier one of the same case; cases not run stay."""
    results = json.loads(path.read_text())["results"] if path.exists() else []
    others = [r for r in results if r["case"]["name"] != result["case"]["name"]]
    place = {name: i for i, name in enumerate(order)}
    results = sorted([*others, {**result, "environment": _environment()}], key=lambda r: place[r["case"]["name"]])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"results": results}, indent=1, ensure_ascii=False) + "\n")


def selected(cases: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The cases of these names, or all if none is named."""
    known = [case.name for case in cases]
    if unknown := set(names) - set(known):
        raise SystemExit(f"no case {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [case for case in cases if not names or case.name in names]


def _environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"),
    }
