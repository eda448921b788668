"""The memory of a node: a folder of tmpfs that outlives the ranks of a job, and holds its snapshots.

    $TOWPATH_MEMORY or /dev/shm
      towpath-<uid>                only this user may enter it
        <digest of the root>       one job on this node; the root is the folder of its checkpoints
          alive                    names the job; each rank of the node holds a shared flock while it lives
          links                    which ranks use the links of the node
          keeper                   the keeper holds an exclusive flock (keeper.py)
          step-000120              a published snapshot
          step-000130.partial      being written, or left by ranks that died
          step-000130.replaced     the one before of the same step, for a moment
          node.json, noticed.json  notes
          keeper.log               what the keeper and its warm process have printed
        <digest>.removed-<pid>     being removed
        warm-<digest>.sock         where a warm process forks ranks for any job of this user (warm.py)

The kernel releases a flock when its process ends, in whatever way. Who holds `alive` alone may remove the folder: it
gets another name first, and a rank whose `alive` has gone meanwhile begins anew (`hold`). A job that uses the same root
at the same time is refused: here if the launcher has given it another name, and otherwise by the lock in the folder of
checkpoints. What its ranks may write until then fails their own checks, or the checksums in a manifest. No torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from towpath.errors import CheckpointError, ConfigError

VARIABLE = "TOWPATH_MEMORY"
ALIVE, KEEPER = "alive", "keeper"

_DEFAULT = "/dev/shm"
# So long may `alive` be held by a keeper that looks whether ranks live, or by ranks of an earlier start that still end.
_HELD_SECONDS, _LOOK_SECONDS = 1.0, 0.05
_SNAPSHOT = re.compile(r"step-([0-9]+)")
_UNFINISHED = re.compile(r"step-[0-9]+\.(partial|replaced)|\w+\.json\.[0-9]+")


def memory_of(root: str | Path) -> NodeMemory:
    """Return this node's memory of the job whose checkpoints are in `root`. Nothing is created yet.

    The path names the job, so it must be the same on all nodes. It need not exist on each of them.

    Raises:
        ConfigError: There is no folder for shared memory, or another user prepared ours.
    """
    digest = hashlib.sha256(os.path.abspath(root).encode()).hexdigest()[:16]  # noqa: PTH100 (without `..`, with links)
    return NodeMemory(base_folder() / digest)


def holds_snapshots(root: str | Path) -> bool:
    """Return whether this node's memory has snapshots of the job whose checkpoints are in `root`."""
    with suppress(ConfigError):
        return bool(memory_of(root).snapshots())
    return False


def base_folder() -> Path:
    """Return the folder of this user's jobs on this node, which may not exist yet."""
    shared = Path(os.environ.get(VARIABLE) or _DEFAULT)
    if not shared.is_dir():
        raise ConfigError(
            f"{shared} is no folder; expected one in shared memory, where snapshots survive the processes of a job. "
            f"Set {VARIABLE} to a folder in memory or on a disk of this node."
        )
    base = shared.absolute() / f"towpath-{os.getuid()}"
    with suppress(FileNotFoundError):
        _check_own(base)
    return base


def _check_own(base: Path) -> None:
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{base} is not safe: got {stat.filemode(found.st_mode)} of user {found.st_uid}; expected a folder of user "
            f"{os.getuid()} that nobody else may enter (drwx------). Others could replace snapshots there. Remove it, "
            f"or set {VARIABLE} to another folder."
        )


def lock(path: Path, how: int) -> int | None:
    """Return a descriptor of the file `path` with a flock on it. None: it is held by another, or gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:  # the folder
        return None
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, how)
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            return descriptor
    os.close(descriptor)
    return None


def _take_away(folder: Path, ending: str) -> None:
    """Remove a folder, if it is there. It gets an ending to its name first, so no process sees a part of it."""
    gone = folder.with_name(folder.name + ending)
    shutil.rmtree(gone, ignore_errors=True)  # left by a process that was killed: pids repeat in containers
    with suppress(FileNotFoundError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


class NodeMemory:
    """The folder of a job in the memory of this node.

    Each rank of the node calls `hold` first. Where a method is for one rank, this is the first rank of the node.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._alive: int | None = None

    def __str__(self) -> str:
        """Return the folder as all nodes can say it: where their memory is may differ."""
        return f"{self.path.parent.name}/{self.path.name} in {_DEFAULT} or ${VARIABLE}"

    # --- its life -----------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Create the folder if there is none, and hold it until this process ends, or until `release`.

        Raises:
            CheckpointError: The folder cannot be used, or another job's ranks are alive and hold it.
        """
        base, alive, job = self.path.parent, self.path / ALIVE, os.environ.get("TORCHELASTIC_RUN_ID", "none")
        try:
            base.mkdir(mode=0o700, exist_ok=True)
            _check_own(base)
            until = time.monotonic() + _HELD_SECONDS
            while (holder := self._enter(alive, job)) != job:
                self.release()
                if time.monotonic() > until:
                    raise CheckpointError(
                        f"{self.path} is in use by job {holder}, whose ranks have been alive on this node since "
                        f"{time.ctime(alive.stat().st_mtime)}; this is job {job}. Set {VARIABLE} to another folder on "
                        "this node, or name another one for checkpoints (towpath train: log.folder). Or end those "
                        "ranks."
                    )
                time.sleep(_LOOK_SECONDS)
            os.utime(self.path)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be used for snapshots ({error.strerror}). Set {VARIABLE} to another folder."
            ) from error

    def _enter(self, alive: Path, job: str) -> str:
        """Hold the folder, and return the job that it belongs to: this one, if no rank was alive."""
        while self._alive is None:  # again if a keeper has removed the folder in between
            self.path.mkdir(mode=0o700, exist_ok=True)
            if (alone := lock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)) is not None:
                alive.write_text(job)
                os.close(alone)
            self._alive = lock(alive, fcntl.LOCK_SH)
        return alive.read_text()

    def release(self) -> None:
        """Let go of the folder, which stays for the lease of its keeper."""
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None

    def close(self) -> None:
        """Remove the folder with all snapshots, after a normal end of the job. Any rank of the node may call this."""
        self.release()
        _take_away(self.path, f".removed-{os.getpid()}")

    def remove_if_unheld(self) -> bool:
        """Remove the folder unless a rank holds it. Return whether it is gone."""
        alive = lock(self.path / ALIVE, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if alive is not None:
            _take_away(self.path, f".removed-{os.getpid()}")
            os.close(alive)
        return not self.path.exists()

    def is_held(self) -> bool:
        """Return whether a rank of this node is alive."""
        alive = lock(self.path / ALIVE, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if alive is not None:
            os.close(alive)
        return alive is None and self.path.exists()

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def snapshots(self) -> list[Path]:
        """Return the published snapshots, newest first."""
        found = list[Path]()
        with suppress(FileNotFoundError):  # a keeper has removed the folder, or there was none
            found = [path for path in self.path.iterdir() if _SNAPSHOT.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    def new_partial(self, step: int) -> Path:
        """Create the folder for the files of a snapshot, if no other rank of the node has done so, and return it."""
        partial = self.folder_of(step, ".partial")
        partial.mkdir(mode=0o700, exist_ok=True)
        return partial

    def publish(self, step: int) -> None:
        """Give a complete snapshot its name. It replaces one of the same step. One rank of the node calls this."""
        final, before = self.folder_of(step), self.folder_of(step, ".replaced")
        with suppress(FileNotFoundError):
            final.rename(before)
        self.folder_of(step, ".partial").rename(final)
        shutil.rmtree(before, ignore_errors=True)

    def remove(self, step: int) -> None:
        """Remove a published snapshot, if it is there. One rank of the node calls this."""
        _take_away(self.folder_of(step), ".replaced")

    def sweep(self) -> None:
        """Remove what dead ranks left unfinished.

        One rank of the node calls this after `hold`, before any rank of the job may write: a launcher starts ranks when
        the former ones have ended. If one of those lives on all the same, its next file finds no folder.
        """
        for path in self.path.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def check_room(self, needed_bytes: int) -> None:
        """Raise `CheckpointError` if a snapshot of so many bytes does not fit."""
        found = os.statvfs(self.path)
        free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        if free < needed_bytes:
            from towpath.progress import format_bytes as text  # with rich, which a keeper does not need

            raise CheckpointError(
                f"{self.path.parent.parent} has {text(free)} free of {text(total)}; a snapshot on this node "
                f"needs {text(needed_bytes)}. Give the container more shared memory (docker run --shm-size=…, or a "
                f"Kubernetes emptyDir with medium: Memory at {_DEFAULT}), or set {VARIABLE} to a folder on a disk of "
                "this node."
            )

    def folder_of(self, step: int, ending: str = "") -> Path:
        """Return the folder of a snapshot, with an ending while it is not published."""
        return self.path / f"step-{step:06d}{ending}"

    # --- notes --------------------------------------------------------------------------------------------------------

    def note(self, name: str, value: Any) -> None:
        """Write a small value, as JSON, unless there is one of this name. Readers see the whole of it or none.

        Args:
            name: What `noted` finds it by.
            value: Any value of JSON.
        """
        new = self.path / f"{name}.json.{os.getpid()}"
        new.write_text(json.dumps(value))
        with suppress(FileExistsError):
            os.link(new, self.path / f"{name}.json")
        new.unlink()

    def noted(self, name: str) -> Any:
        """Return a value that was noted, or None."""
        try:
            return json.loads((self.path / f"{name}.json").read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:  # on a disk, after a loss of power
            raise CheckpointError(f"{name}.json is damaged. On this node, remove {self.path}.") from error

    def forget(self, name: str) -> None:
        """Remove a note, if there is one."""
        (self.path / f"{name}.json").unlink(missing_ok=True)
