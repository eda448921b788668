"""The folders of labs on the host, and the sweep of those that dead owners have left.

A running lab has a small folder on the host, and nothing else. Its name identifies the owner:

    towpath-lab-<pid namespace>-<owner's pid>-<owner's start time>-<number>

The guard removes the folder as it ends (keeper.py). It only stays if owner and guard are both killed. The next lab of
the same user removes it, if no process with that pid and start time lives.
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


def make_folder() -> Path:
    """Make the folder of a new lab of this process."""
    owner = os.getpid()
    while True:
        name = f"towpath-lab-{_pid_namespace()}-{owner}-{_start_time(owner)}-{next(_NUMBERS)}"
        folder = Path(tempfile.gettempdir(), name)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return folder


def sweep_folders() -> None:
    """Remove the folders of labs whose owners are dead."""
    for folder in Path(tempfile.gettempdir()).glob("towpath-lab-*"):
        match = _NAME.fullmatch(folder.name)
        with suppress(FileNotFoundError):  # another sweep, or the guard, was faster
            # Pids of another container mean nothing here, and another user's folder is not ours.
            if match is None or int(match[1]) != _pid_namespace() or folder.stat().st_uid != os.getuid():
                continue
            if _start_time(int(match[2])) == int(match[3]):
                continue
            _kill_guard(folder)
            shutil.rmtree(folder, ignore_errors=True)


def note_guard(folder: Path, pid: int) -> None:
    """Note the guard of a lab in its folder, for a later sweep."""
    (folder / _GUARD).write_text(f"{pid} {_start_time(pid)}")


def _kill_guard(folder: Path) -> None:
    """Kill the guard of a dead owner. A guard normally ends moments after its owner, unless it is stopped or stuck."""
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
    """Return when a process started, in ticks since boot, or None if it does not exist. A pid with it is unique."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
