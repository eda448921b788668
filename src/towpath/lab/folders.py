"""The one thing a lab leaves on the host while it lives: a small folder, whose name says whose it is.

    towpath-lab-<pid namespace>-<owner's pid>-<owner's start time>-<number>

The guard removes it as it ends (keeper.py). Only when guard and owner are both killed does it stay; the next lab of the
same user sweeps it, having seen that no process of that pid and start time lives.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"towpath-lab-(\d+)-(\d+)-(\d+)-\d+")
_NUMBERS = itertools.count()
_GUARD = "guard"


def make() -> Path:
    """A new folder for a lab of this process."""
    owner = os.getpid()
    while True:
        name = f"towpath-lab-{_pid_namespace()}-{owner}-{_start_time(owner)}-{next(_NUMBERS)}"
        folder = Path(tempfile.gettempdir(), name)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return folder


def note_guard(folder: Path, pid: int) -> None:
    (folder / _GUARD).write_text(f"{pid} {_start_time(pid)}")


def sweep() -> None:
    """Remove what labs of dead owners left."""
    for folder in Path(tempfile.gettempdir()).glob("towpath-lab-*"):
        match = _NAME.fullmatch(folder.name)
        with suppress(FileNotFoundError):  # another sweep, or its own guard, was faster
            # The pids of another container mean nothing here, and another user's folder is not ours to remove.
            if match is None or int(match[1]) != _pid_namespace() or folder.stat().st_uid != os.getuid():
                continue
            if _start_time(int(match[2])) == int(match[3]):
                continue
            _kill_guard(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _kill_guard(folder: Path) -> None:
    """A guard outlives its owner by moments, unless it is stopped or stuck."""
    with suppress(FileNotFoundError, ValueError, ProcessLookupError):
        pid, start = map(int, (folder / _GUARD).read_text().split())
        descriptor = os.pidfd_open(pid)
        try:
            if _start_time(pid) == start:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 (the link's target, not the link)


def _start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot: with it a pid is unique. None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
