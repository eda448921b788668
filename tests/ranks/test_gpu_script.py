"""tools/gpu.py without a GPU: every case that needs none passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.session.record import ROOT


@pytest.mark.parity
@pytest.mark.compiles
def test_every_case_that_needs_no_gpu_passes(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, str(ROOT / "tools/gpu.py"), "--device", "cpu", "--out", str(tmp_path / "out")]
    script = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert script.returncode == 0, script.stdout
    table = (tmp_path / "out/table.md").read_text()
    assert "| all " in table and table.split("| all ")[1].splitlines()[0].split("|")[-2].strip() == "0", table
