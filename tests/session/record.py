"""Write a summary of a run that passed to the file of `--record-to`."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class Recorder:
    def __init__(self, file: Path, load: float) -> None:
        self._file, self._load = file, load
        self._outcomes: Counter[str] = Counter()
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.outcome] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the file, unless the run failed or was interrupted."""
        if exitstatus != pytest.ExitCode.OK:
            return
        found: dict[str, Any] = {
            "commit": _git("rev-parse", "HEAD"),
            "clean": not _git("status", "--porcelain", "--", "src", "tests"),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "passed": self._outcomes["passed"],
            "skipped": self._outcomes["skipped"],
            "seconds": round(time.monotonic() - self._began),
            "cores": os.cpu_count(),
            "load_before": round(self._load, 2),
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(found, indent=2) + "\n")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
