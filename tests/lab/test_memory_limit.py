"""Limits on ranks' memory: the kernel ends who asks for more, and says so."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from benchmarks.suites.memory import MemoryGroup, memory_groups
from lab.errors import LabError

MEGABYTE = 1_000_000
PROGRAM = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('0'); bytearray(int(sys.argv[2]))"


def ended(group: MemoryGroup, takes_bytes: int) -> int:
    joined = str(group.folder / "cgroup.procs")
    return subprocess.run([sys.executable, "-c", PROGRAM, joined, str(takes_bytes)]).returncode


def test_who_asks_for_more_is_killed_and_counted_and_the_groups_are_removed() -> None:
    try:
        with memory_groups(2, 64 * MEGABYTE) as groups:
            assert ended(groups[0], 16 * MEGABYTE) == 0
            assert ended(groups[1], 128 * MEGABYTE) == -signal.SIGKILL
            assert [group.killed for group in groups] == [0, 1]
            assert 16 * MEGABYTE < groups[0].peak_bytes <= 64 * MEGABYTE
    except LabError as error:
        pytest.skip(str(error))
    assert not any(group.folder.exists() for group in groups)
