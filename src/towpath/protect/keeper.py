"""The keeper of a node: a process without torch that outlives the ranks, and guards what they leave in memory.

A rank starts it, and it ends by itself: when a job ends normally, `NodeMemory.close` removes the folder and the keeper
follows. When no rank has been alive for the lease, the keeper removes the folder, so a job that never comes back leaks
no memory. It is in a session of its own, so neither a launcher that ends its ranks nor Ctrl-C reaches it. SIGTERM ends
it and removes nothing: the next keeper takes over, of this job or of another one of the user. A keeper ends with its
container or Slurm step.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from towpath.errors import CheckpointError
from towpath.protect.memory import KEEPER, NodeMemory, lock

LEASE_SECONDS = 1800.0
LOG = "keeper.log"  # in the folder: what the keeper and its warm process have to say, mostly nothing

_POLL_SECONDS = 1.0
_START_SECONDS = 60.0  # all ranks wait for it
_JOB, _REMOVED = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{16}\.removed-[0-9]+")


def start_keeper(memory: NodeMemory, lease_seconds: float = LEASE_SECONDS, warm: bool = False) -> None:
    """Start the keeper of a node's memory, which this process holds, unless there is one. It is at work on return.

    Args:
        memory: The memory that it guards.
        lease_seconds: How long it keeps the memory when no rank is alive.
        warm: Let it also start a process from which later ranks fork (warm.py).

    Raises:
        CheckpointError: It could not start.
    """
    try:
        done = subprocess.run(
            _command("keeper", str(memory.path), str(lease_seconds), str(int(warm))),
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            start_new_session=True,
            check=False,
            timeout=_START_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(
            f"the keeper of {memory.path} did not start within {_START_SECONDS:.0f} s. Check that the disk with "
            f"{sys.executable} and its packages answers on this node, or train without protect."
        ) from None
    if done.returncode:
        raise CheckpointError(
            f"the keeper of {memory.path} ended with exit code {done.returncode}; expected it to start. Free memory or "
            f"processes of this node, or train without protect. It said: {done.stderr.strip()[-1000:]}"
        )


def _environment() -> dict[bytes, bytes] | None:
    """Return the environment that this process was started with, as later ranks will be. Libraries have added to it."""
    try:
        found = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # not Linux, so nothing forks
        return None
    return {name: value for name, _, value in (item.partition(b"=") for item in found) if name}


def _command(module: str, *arguments: str) -> list[str]:
    """Return a command that calls `main` of a module here. It finds the same packages as this process."""
    paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109 (text)
    end = 1 + len(arguments)
    program = f"from towpath.protect.{module} import main; main(*sys.argv[1:{end}])"
    return [sys.executable, "-c", f"import sys; sys.path[:] = sys.argv[{end}:]; {program}", *arguments, *paths]


def main(folder: str, lease_seconds: str, warm: str) -> None:
    """Run as the keeper in a process of its own. The caller's process ends when the keeper is at work."""
    memory = NodeMemory(Path(folder))
    held = lock(memory.path / KEEPER, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if held is None:  # another keeper holds it, or the job has ended
        return
    log = os.open(memory.path / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    if os.fork():  # the keeper holds the lock too. No rank has to wait for the keeper's end
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.chdir("/")  # keep no file system busy
    remove_leftovers(memory.path.parent, float(lease_seconds))
    # The warm process ends with this one, which alone holds the other end of its stdin. The name keeps that end open.
    _child = subprocess.Popen(_command("warm"), stdin=subprocess.PIPE) if warm == "1" else None
    guard(memory, held, float(lease_seconds))


def guard(
    memory: NodeMemory,
    held: int,
    lease_seconds: float,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Guard a node's memory until its folder is gone, and remove the folder when the lease has passed.

    Args:
        memory: The memory.
        held: A descriptor of the keeper's lock in it, which tells its folder from a later one of the same name.
        lease_seconds: How long to keep the folder when no rank is alive.
        now: The clock.
        pause: Called between two looks.
    """
    seen = now()
    while _is_there(memory, held):
        if memory.is_held():
            seen = now()
            os.utime(memory.path)  # `remove_leftovers` looks there if this keeper is killed
        elif now() - seen >= lease_seconds and memory.remove_if_unheld():
            return
        pause(_POLL_SECONDS)


def _is_there(memory: NodeMemory, held: int) -> bool:
    try:
        return os.path.samestat(os.fstat(held), (memory.path / KEEPER).lstat())
    except FileNotFoundError:
        return False


def remove_leftovers(base: Path, lease_seconds: float) -> None:
    """Remove the folders of dead jobs that have no keeper, and which no rank has held for the lease."""
    for path in base.iterdir():
        with suppress(FileNotFoundError):  # another keeper has removed it
            if _REMOVED.fullmatch(path.name):  # whoever did so was killed meanwhile
                shutil.rmtree(path, ignore_errors=True)
            elif _JOB.fullmatch(path.name) and time.time() - path.lstat().st_mtime >= lease_seconds:
                held = lock(path / KEEPER, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if held is not None:
                    NodeMemory(path).remove_if_unheld()
                    os.close(held)
