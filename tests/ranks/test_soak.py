"""A run whose ranks are killed ends as one that nobody disturbed. The long version: benchmarks/suites/soak.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.parametrize("case", ["zero3", "zero++ feedback", "paro-iig at once"])
def test_killed_ranks_change_no_bit_of_what_is_trained(tmp_path: Path, case: str) -> None:
    command = [sys.executable, "-m", "benchmarks", "soak", case, "--kills", "2", "--seed", "1", "--settle", "0"]
    command += ["--folder", str(tmp_path), "-o", str(tmp_path / "soak.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    [result] = map(json.loads, (tmp_path / "soak.jsonl").read_text().splitlines())
    assert result["kills"] == 2 and result["files_alike"] == 4
