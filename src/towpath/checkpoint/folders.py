"""The folder of a run: its checkpoints, and the lock of the job that may write there.

step-000120                        a checkpoint, complete when it got this name
step-000120.partial-1f3a…          being written, or left by a run that died
step-000120.replaced-1f3a…         the previous one, while another takes its name
lock.json                          names the job that writes here
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from towpath.checkpoint.manifest import NAME, step_of
from towpath.checkpoint.safe_files import DamagedError, opened, read_object, visible
from towpath.errors import CheckpointError
from towpath.files import make_folder, sync_folder
from towpath.logs import logger

IN_RUN = "checkpoints"  # where `towpath train` keeps them, in the folder of a run
LOCK = "lock.json"

_LOG = logger("checkpoint")
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of Linux: that of a machine itself
_PARTIAL = re.compile(r"step-[0-9]+\.partial-\w+")
_REPLACED = re.compile(r"(step-[0-9]+)\.replaced-\w+")

_IN_USE: set[Path] = set()  # partial checkpoints that this process writes


# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint_of(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step`."""
    return root / f"step-{step:06d}"


@contextmanager
def new_partial(root: Path, step: int) -> Generator[Path]:
    """Create a folder for a checkpoint that is being written, and remove it at the end unless it was published.

    `sweep` of this process leaves it.
    """
    partial = root / f"step-{step:06d}.partial-{uuid.uuid4().hex[:8]}"
    _IN_USE.add(partial.absolute())
    try:
        partial.mkdir()
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _IN_USE.discard(partial.absolute())


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` has the name of a checkpoint, or contains a manifest."""
    return step_of(path) >= 0 or os.path.lexists(path / NAME)


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints in `root`, newest first. Links are among them, and reading their manifests fails."""
    try:
        found = [path for path in root.iterdir() if step_of(path) >= 0 and _is_folder(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{root}: cannot be searched for checkpoints ({error}).") from error
    return sorted(found, key=step_of, reverse=True)


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 (Path.is_dir raises where it may not look)


def refuse_others(where: Path) -> None:
    """Raise CheckpointError if `where` exists and cannot hold checkpoints of Towpath."""
    if where.exists() and not where.is_dir():
        raise CheckpointError(f"{where} is a file; expected a checkpoint, or a folder of checkpoints. Check the path.")
    if (where / ".metadata").exists():
        raise CheckpointError(
            f"{where} is a checkpoint of torch.distributed.checkpoint. Load it with dcp.load(), or name a folder of "
            "Towpath's own checkpoints."
        )


def search_folder(where: Path) -> Path:
    """Return the folder to search: `where`, or its folder of checkpoints if `where` is the folder of a run."""
    inside = where / IN_RUN
    return inside if _is_folder(inside) and not inside.is_symlink() and not checkpoints(where) else where


def publish(partial: Path, final: Path) -> None:
    """Give a complete checkpoint its name. A previous one of that name is removed afterwards, or stays after a failure.

    A run that is killed between the two renames leaves both under other names, and `sweep` restores the previous one.
    """
    before = final.with_name(f"{final.name}.replaced-{uuid.uuid4().hex[:8]}") if final.exists() else None
    if before is not None:
        final.rename(before)
    try:
        partial.rename(final)
    except OSError:
        if before is not None:
            before.rename(final)
        raise
    sync_folder(final.parent)
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what dead runs left unfinished, and restore what they were replacing. No other job may be writing."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        replaced = _REPLACED.fullmatch(path.name)
        if replaced is not None and not (root / replaced[1]).exists():
            path.rename(root / replaced[1])
        elif replaced is not None or (_PARTIAL.fullmatch(path.name) and path.absolute() not in _IN_USE):
            shutil.rmtree(path, ignore_errors=True)


def remove_old(root: Path, step: int, keep_last: int | None, keep_every: int | None) -> None:
    """Remove checkpoints up to `step` that a `Saver` with these options does not keep. Later ones stay."""
    before = [] if keep_last is None else [p for p in checkpoints(root) if step_of(p) <= step]
    for path in before[keep_last:]:
        if keep_every and step_of(path) % keep_every == 0:
            continue
        # It is renamed first, because a half-removed folder must not look like a checkpoint.
        doomed = path.with_name(f"{path.name}.partial-{uuid.uuid4().hex[:8]}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


# --- the lock ---------------------------------------------------------------------------------------------------------


class RefusedError(CheckpointError):
    """The folder is another job's, or ranks have passed different arguments. Every rank raises it."""


class Lock:
    """The right of a job to write to a folder, which the job's rank 0 holds. `lock_of` returns it.

    `lock.json` is created exclusively (O_EXCL), so one of several jobs gets it. It names the job's process. If that has
    ended on this machine, as its number and start time or a new start of the machine tell, the next job takes the lock
    over.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._path = root, root / LOCK
        self._me = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),  # tells the process from a later one with the same number
            "machine": _machine(),
            "computer": _computer(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "job": uuid.uuid4().hex,
        }
        self._is_held = False
        self.users = 0

    def hold(self, *, alone: bool = False) -> None:
        """Take the lock, or check that this job still holds it. Raise RefusedError if another job does.

        `alone`: Raise it also if another user of this job has the lock.
        """
        if alone and self.users > 1:
            raise RefusedError(
                f"{self._root} is in use: another Saver of this job has it open, or another import writes there. Use "
                "that Saver, or close() it first."
            )
        if self._is_held and self._root.exists():
            if (holder := self._holder()).get("job") != self._me["job"]:
                raise RefusedError(
                    f"{self._path} was removed or replaced while this job held it{_named(holder)}. It saves no more "
                    "there: two jobs would overwrite each other's checkpoints. End one of them, or start this one anew "
                    "with another folder."
                )
            return
        make_folder(self._root)
        try:
            self._write(self._path)
        except FileExistsError:
            self._take_over()
        self._is_held = True

    def _write(self, path: Path) -> None:
        with path.open("x", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o644)  # jobs of other users must be able to read it, whatever the umask
            file.write(json.dumps(self._me) + "\n")

    def _take_over(self) -> None:
        """Replace the lock of a dead process. Of several jobs that try, one has it while the others wait and see."""
        try:
            with opened(self._path) as file:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX)
                holder = self._holder()
                is_same = os.path.samestat(os.fstat(file.fileno()), self._path.stat())
                if not is_same or not self._is_dead(holder):
                    raise RefusedError(
                        f"{self._root} is in use{_named(holder)}: two jobs would overwrite each other's checkpoints. "
                        "Expected a folder of this job's own (towpath train: log.folder). Name another one, or "
                        f"end that job first. If it cannot be alive, remove {self._path}."
                    )
                mine = self._path.with_name(f"{LOCK}.{uuid.uuid4().hex[:8]}")
                self._write(mine)
                mine.replace(self._path)
        except (DamagedError, FileNotFoundError) as error:
            raise RefusedError(
                f"{self._root} may be in use: {error} Name a folder of this job's own, or remove {self._path} if no "
                "job writes there."
            ) from None

    def _holder(self) -> dict[str, Any]:
        """Return what the lock says. It says nothing if it cannot be read, perhaps because it is being written."""
        try:
            return read_object(self._path, "a lock")
        except DamagedError:
            return {}

    def _is_dead(self, holder: dict[str, Any]) -> bool:
        pid = holder.get("pid")
        is_here = self._me["machine"] and holder.get("machine") == self._me["machine"]
        if not is_here and self._me["computer"] and holder.get("computer") == self._me["computer"]:
            return True  # this machine was switched off meanwhile
        if not is_here or type(pid) is not int or pid < 1:
            return False
        if pid == os.getpid():  # of a saver that could not remove it, or of a process before with the same number
            return True
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):  # OverflowError: no process can have this number
            return True
        except PermissionError:  # another user's process
            pass
        return _started(pid) not in (None, holder.get("started"))

    def release(self) -> None:
        """Remove the lock if this job holds it. A fork inherits its parent's lock, and leaves it."""
        is_mine = self._is_held and os.getpid() == self._me["pid"] and self._holder().get("job") == self._me["job"]
        self._is_held = False
        if is_mine:
            with suppress(OSError):
                self._path.unlink()


def _named(holder: dict[str, Any]) -> str:
    if not holder:
        return ""
    facts = {key: visible(str(holder.get(key))) for key in ("pid", "host", "job", "since")}
    return " by process {pid} on host {host} (job {job}, since {since})".format(**facts)


def _machine() -> str:
    """Return what is the same for processes that see each other: one boot of one machine, in one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # not Linux: the lock of a dead job must be removed by hand
        return ""


def _computer() -> str:
    """Return what this machine keeps when it is switched off, or "" in a container: those of an image share it."""
    try:
        is_container = Path("/proc/self/ns/pid").stat().st_ino != _FIRST_PID_NAMESPACE
        number = Path("/etc/machine-id").read_text().strip()
        return f"{socket.gethostname()} {number}" if number and not is_container else ""
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Return when a process began, 0 for one that has ended and is still listed, None if that cannot be read."""
    try:
        # The name, in brackets, may contain anything: state and times come after it.
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return 0 if values[0] in ("Z", "X") else int(values[19])


_LOCKS: dict[Path, Lock] = {}  # of this process, by folder
_GUARD = threading.Lock()


def lock_of(root: Path) -> Lock:
    """Return this process's lock on `root`, not yet held. Call `release` once for each call."""
    with _GUARD:
        lock = _LOCKS.setdefault(root.resolve(), Lock(root))
        lock.users += 1
        return lock


def release(lock: Lock) -> None:
    """Release the lock if this was its last user."""
    with _GUARD:
        lock.users -= 1
        if lock.users:
            return
        for root in [root for root, known in _LOCKS.items() if known is lock]:
            del _LOCKS[root]
    lock.release()
