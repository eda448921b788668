"""Runs that are disturbed end as undisturbed ones, and leave nothing behind. Long versions: `python -m benchmarks`.

`make soak` takes about half an hour. TOWPATH_SOAK_MINUTES sets the minutes of the last test, which has one run of each
kind at least.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.leftovers import VARIABLE, left_after
from lab import available

ROOT = Path(__file__).parents[2]
MINUTES = float(os.environ.get("TOWPATH_SOAK_MINUTES", "25"))
MEMORY = Path("/dev/shm")
OF_PYTORCH = ("torchelastic_", "torchinductor_")  # torchrun leaves an empty folder for logs, and ranks a cache


def run(folder: Path, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """The results of a suite."""
    results = folder / "results.jsonl"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks", *arguments, "--settle", "0", "-o", str(results)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in results.read_text().splitlines()]


@pytest.mark.soak
@pytest.mark.parametrize("case", ["zero3", "zero++ feedback", "paro-iig"])
def test_killed_ranks_change_no_bit_of_what_is_trained(tmp_path: Path, case: str) -> None:
    [result] = run(tmp_path, "soak", case, "--kills", "2", "--seed", "1", "--folder", str(tmp_path))
    assert result["kills"] == 2 and result["files_alike"] == 8  # two of each rank


def disturbed_runs() -> Iterator[tuple[str, ...]]:
    """Ranks, nodes and islands that are lost, again and again in other places."""
    for number in itertools.count():
        strategy = ("mics", "paro-iig")[number % 2]
        yield "islands", "4x1", "--kills", "4", "--period", "20", "--seed", str(number)
        yield "healing", f"{strategy} tiny {2 * number % 20}", f"{strategy} tiny {(2 * number + 1) % 20}"
        yield "soak", "paro-iig protected", "--kills", "4", "--seed", str(number)


@pytest.mark.soak
def test_lost_ranks_nodes_and_islands_leave_nothing_behind(tmp_path: Path) -> None:
    """No process, no shared memory, no file. A namespace or a socket lives no longer than its last process."""
    if reason := available():
        pytest.skip(reason)
    token, memory, temporary = str(tmp_path), tmp_path / "memory", tmp_path / "temporary"
    for folder in (memory, temporary):
        folder.mkdir()
    environment = {VARIABLE: token, "TMPDIR": str(temporary)}
    before, until = set(MEMORY.iterdir()), time.monotonic() + 60 * MINUTES
    for number, arguments in enumerate(disturbed_runs()):
        if number >= 3 and time.monotonic() > until:
            break
        # In a lab, each node has a memory of its own.
        own = {"TOWPATH_MEMORY": str(memory)} if arguments[0] == "soak" else {}
        for result in run(tmp_path, *arguments, "--folder", str(temporary), **environment, **own):
            if arguments[0] == "islands":
                assert (result["steps_lost"], result["samples_twice"]) == (0, 0), result
        # A keeper looks once a second whether its job has ended.
        assert not left_after(token, 10.0), arguments
        files = [path for path in temporary.iterdir() if not path.name.startswith(OF_PYTORCH)]
        files += [path for path in memory.rglob("*") if not path.is_dir()]
        assert not files, arguments
        assert set(MEMORY.iterdir()) <= before, arguments
