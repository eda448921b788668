"""The demo where the machine allows no lab: it runs on loopback, and says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

PROGRAM = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import towpath.lab
towpath.lab.available = lambda: "a test forbids it"
import demo
if __name__ == "__main__":
    sys.argv = ["demo.py", "--steps", "1"]
    demo.STRATEGIES = ("paro-iig",)
    demo.main()
"""


def test_without_a_lab_the_demo_runs_on_loopback_and_says_so(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "No shaped cluster here (a test forbids it)" in done.stdout
    assert "not counted" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
