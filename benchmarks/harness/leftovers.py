"""The processes that a run has started, wherever they are on this machine: in labs, and in sessions of their own."""

from __future__ import annotations

import os
import time
from pathlib import Path

# Every process inherits it, also those that leave their session, and those in the namespaces of a lab.
VARIABLE = "TOWPATH_RUN_TOKEN"
_PAUSE_SECONDS = 0.1


def processes_of(token: str) -> dict[int, str]:
    """Return the command lines of the processes that were started with a token in `VARIABLE`, by pid."""
    wanted, found = f"{VARIABLE}={token}".encode(), dict[int, str]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
        except OSError:  # it has ended, or is another user's
            continue
    return {pid: command for pid, command in found.items() if pid != os.getpid()}


def left_after(token: str, seconds: float) -> dict[int, str]:
    """Return the processes that still run after some seconds, in which those that notice the end of a run may end."""
    until = time.monotonic() + seconds
    while (found := processes_of(token)) and time.monotonic() < until:
        time.sleep(_PAUSE_SECONDS)
    return found
