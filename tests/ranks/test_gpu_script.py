"""tools/gpu.py without a GPU: what fails, hangs or is missing is told, and the other cases run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.session.record import ROOT

CASES = """
import os, signal, subprocess, sys, threading, time
from contextlib import suppress
from pathlib import Path
import torch.distributed as dist
from tests.gpu.case import FOLDER, Case, SkipError

def works():
    total = [None] * dist.get_world_size()
    dist.all_gather_object(total, os.getpid())
    return {"first": total[0]}

def fails_on_one_rank():
    if dist.get_rank() == 1:
        raise ValueError("a bad day")

def hangs():
    threading.Event().wait()

def dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

def skips():
    raise SkipError("not here")

def works_alone(folder):
    assert folder.is_dir() and os.environ["WORLD_SIZE"] == "2"

def hangs_in_a_program():
    program = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    Path("program").write_text(str(program.pid))
    program.wait()

def program_has_ended():
    assert not Path("/proc", Path("program").read_text()).exists()

def case(name, run, *args, **options):
    return Case(**{"name": name, "feature": "routes", "run": run, "args": args, "ranks": 2} | options)

CASES = [
    case("first", works),
    case("fails", fails_on_one_rank),
    case("same ranks", works),
    case("hangs", hangs, limit=1.0),
    case("new ranks", works),
    case("dies", dies),
    case("newer ranks", works),
    case("needs a module", "no_such_module:run", needs=("no_such_module",)),
    case("needs a GPU", works, needs=("cuda",)),
    case("finds out", skips),
    case("alone", works_alone, FOLDER, alone=True),
    case("hangs in a program", hangs_in_a_program, limit=1.0),
    case("program has ended", program_has_ended),
    case("next to the others", hangs, ranks=None, limit=1.0),
    case("a figure", works, part="figures"),
]
WAITING = [case("first", works), case("waits", hangs, limit=600.0), case("last", works)]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(CASES)
    (tmp_path / "waiting.py").write_text("import tiny\nCASES = tiny.WAITING\n")
    return tmp_path


def _start(folder: Path, cases: str, *options: str) -> subprocess.Popen[str]:
    """The script, as a process that knows nothing of this environment's paths."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, str(ROOT / "tools/gpu.py"), "--device", "cpu", "--out", str(folder / "out")]
    return subprocess.Popen(
        [*command, "--cases", cases, *options],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )


def _ended(folder: Path) -> dict[str, Any]:
    lines = map(json.loads, (folder / "out/cases.jsonl").read_text().splitlines())
    return {line["case"]: line for line in lines}


def test_what_fails_hangs_or_is_missing_stops_no_other_case(tiny: Path) -> None:
    script = _start(tiny, "tiny")
    script.communicate()
    assert script.returncode == 1
    ended = _ended(tiny)
    outcomes = {name: line["outcome"] for name, line in ended.items()}
    passed = ("first", "same ranks", "new ranks", "newer ranks", "alone", "a figure", "program has ended")
    assert outcomes == {
        **dict.fromkeys(passed, "passed"),
        **dict.fromkeys(("needs a module", "needs a GPU", "finds out"), "skipped"),
        **dict.fromkeys(("hangs", "hangs in a program", "next to the others"), "hung"),
        **dict.fromkeys(("fails", "dies"), "failed"),
    }
    assert "ValueError: a bad day" in ended["fails"]["error"] and "in hangs" in ended["hangs"]["error"]
    assert ended["needs a module"]["error"] == "needs the module no_such_module"
    first, same, new, newer = (ended[name]["figures"]["first"] for name in passed[:4])
    assert first == same and len({first, new, newer}) == 3
    table = (tiny / "out/table.md").read_text()
    assert "|      7 |      5 |       3 |           0 |" in table
    assert "- fails: failed: ValueError: a bad day" in table
    assert max(map(len, table.splitlines())) <= 100
    assert json.loads((tiny / "out/environment.json").read_text())["torch"]


def test_a_run_that_is_ended_leaves_its_table_and_no_process(tiny: Path) -> None:
    script = _start(tiny, "waiting")
    assert script.stdout is not None
    assert "passed       first" in next(line for line in script.stdout if "first" in line)
    script.send_signal(signal.SIGTERM)
    script.communicate()  # its ranks write to the same pipe: it ends with the last of them
    assert script.returncode == 128 + signal.SIGTERM
    assert "|      1 |      0 |       0 |           2 |" in (tiny / "out/table.md").read_text()
    assert [name for name, line in _ended(tiny).items() if line["outcome"] != "not reached"] == ["first"]


@pytest.mark.parity
@pytest.mark.compiles
def test_every_case_that_needs_no_gpu_passes(tmp_path: Path) -> None:
    script = _start(tmp_path, "tests.gpu.cases")
    said, _ = script.communicate()
    assert script.returncode == 0, said
    table = (tmp_path / "out/table.md").read_text()
    assert "| all " in table and table.split("| all ")[1].splitlines()[0].split("|")[-2].strip() == "0", table
