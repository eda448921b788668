"""The folder of a run: its checkpoints, and the job that may write there.

    step-000120                        a checkpoint, complete when it got this name
    step-000120.partial-1f3a…          being written, or left by a run that died
    step-000120.replaced-1f3a…         the previous one, while another takes its name
    claim-000001.json                  names the job that holds the folder; the highest number counts

One job at a time holds a folder:

- A job creates the claim with the next number. The file system lets only one job do that (O_EXCL).
- While a job holds the folder, a thread of it raises a counter in its claim.
- A job of this machine is dead if its process has ended. The start time tells a process from a later one with the same
  number. A job of another machine is dead if its counter has not changed for `DEAD_SECONDS`, by the clock of this
  machine. After a restart by torchrun, the earlier ranks of the job are dead.
- A job that was stopped or disconnected may be taken for dead. It then finds a claim with a higher number, or its own
  claim removed, and must not write there any more.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from towpath.checkpoint.manifest import NAME
from towpath.checkpoint.safe_open import (
    MAX_INT,
    DamagedError,
    WrongFieldError,
    integer,
    is_folder,
    read_json,
    record,
    text,
    visible,
)
from towpath.errors import CheckpointError
from towpath.files import sync_folder
from towpath.logs import logger
from towpath.topology.groups import launcher_run

IN_RUN = "checkpoints"  # where `towpath train` keeps them, in the folder of a run

BEAT_SECONDS = 10.0
# NFS, and buckets mounted as folders, may show a file as it was a minute ago.
DEAD_SECONDS = 90.0
PAUSE_SECONDS = 1.0  # between two looks at a claim of another machine

_LOG = logger("checkpoint")
_CHECKPOINT = re.compile(r"step-([0-9]+)")
_PARTIAL = re.compile(r"step-[0-9]+\.partial-\w+")
_REPLACED = re.compile(r"(step-[0-9]+)\.replaced-\w+")
_CLAIM = re.compile(r"claim-([0-9]{6,})\.json")
_BEAT = '{"beat": "%010d"'  # the start of a claim, which always has the same length

_IN_USE: set[Path] = set()  # partial checkpoints that this process writes


# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint_of(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step`."""
    return root / f"step-{step:06d}"


def partial_of(root: Path, step: int) -> Path:
    """Return a new path for a checkpoint that is being written."""
    return root / f"step-{step:06d}.partial-{uuid.uuid4().hex[:8]}"


def mark_in_use(partial: Path) -> None:
    """Keep `sweep` of this process from removing `partial`."""
    _IN_USE.add(partial.absolute())


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` has the name of a checkpoint, or contains a manifest."""
    return _CHECKPOINT.fullmatch(path.name) is not None or os.path.lexists(path / NAME)


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint, or -1 if the name has none."""
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else -1


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints in `root`, newest first."""
    try:
        found = [p for p in root.iterdir() if _CHECKPOINT.fullmatch(p.name) and is_folder(p)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{root}: cannot be searched for checkpoints ({error}).") from error
    return sorted(found, key=step_of, reverse=True)


def refuse_link(checkpoint: Path) -> None:
    """Raise DamagedError if a checkpoint that a search found, and no user named, is a link to somewhere else."""
    if checkpoint.is_symlink():
        raise DamagedError(
            f"{checkpoint} is a symbolic link, which the search does not follow. Name it, or its target."
        )


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
    return inside if is_folder(inside) and not checkpoints(where) else where


def publish(partial: Path, final: Path) -> None:
    """Give a complete checkpoint its name in one step. A previous one of that name is removed afterwards."""
    before = final.with_name(f"{final.name}.replaced-{uuid.uuid4().hex[:8]}") if final.exists() else None
    if before is not None:
        final.rename(before)
    partial.rename(final)
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
    """Remove checkpoints up to `step` that are not to be kept. Later ones stay.

    Args:
        root: The folder of checkpoints.
        step: The step that was just published.
        keep_last: How many of the newest to keep. None keeps all.
        keep_every: Keep also those whose step is a multiple of this.
    """
    if keep_last is None:
        return
    before = [p for p in checkpoints(root) if step_of(p) <= step]
    for path in before[max(keep_last, 1) :]:
        if keep_every and step_of(path) % keep_every == 0:
            continue
        # It is renamed first, because a half-removed folder must not look like a checkpoint.
        doomed = partial_of(root, step_of(path))
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


# --- claims -----------------------------------------------------------------------------------------------------------


class FolderInUseError(CheckpointError):
    """Another job writes its checkpoints to the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that writes a job's manifests: its rank 0."""

    host: str
    pid: int
    since: str  # for people
    job: str
    launcher: str  # the same after a restart; empty if no launcher tells
    machine: str  # where `pid` identifies a process; empty if unknown
    started: int  # when the process began, in ticks since the machine started

    @staticmethod
    def here() -> Holder:
        """Return this process, as the holder of a new job."""
        started = _started(os.getpid())
        return Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            job=uuid.uuid4().hex,
            launcher=launcher_run(),
            machine=_machine() if started else "",
            started=started or 0,
        )

    def __str__(self) -> str:
        return visible(f"the job of process {self.pid} on host {self.host} (since {self.since})")


class Claim:
    """This process's claim on a folder, held or not. `claim_of` returns it, and `release` gives it back."""

    def __init__(self, root: Path) -> None:
        self._root, self._me = root, Holder.here()
        self._held: Path | None = None
        self._beats = 0
        self._lost = ""
        # The claim of another job that may be dead: its content, and since when the content has been like that.
        self._watched: tuple[object, float] | None = None
        self._taking = threading.Lock()
        self.users = 0

    def hold(self) -> None:
        """Return when this job holds the folder. Raise FolderInUseError if another one does."""
        while not self.take():
            time.sleep(PAUSE_SECONDS)

    def take(self) -> bool:
        """Take the folder if it is free or its holder is dead. Return False if that is not known yet: try again."""
        with self._taking:
            return self._take()

    def _take(self) -> bool:
        if self._lost:
            raise FolderInUseError(self._lost)
        if self._held is not None and self._still_held():
            return True
        self._root.mkdir(parents=True, exist_ok=True)
        before = _claims(self._root)
        number, judged = 1, None
        if before:
            judged = _content(before[-1])
            if not self._is_dead(before[-1], judged):
                return False
            number += _number(before[-1])
        path = self._root / f"claim-{number:06d}.json"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False  # another job was faster
        with suppress(OSError):
            os.fchmod(descriptor, 0o644)  # other users' jobs must be able to read it, whatever the umask
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 (a descriptor)
            file.write(_BEAT % 0 + ", " + json.dumps(asdict(self._me))[1:] + "\n")
        # A claim that appeared meanwhile, or one that changed since it was judged, belongs to a job that does the same
        # or was there first. This job withdraws and looks again.
        others = [other for other in _claims(self._root) if other != path]
        if not {*others} <= {*before} or any(other == before[-1] and _content(other) != judged for other in others):
            path.unlink(missing_ok=True)
            return False
        self._held, self._watched = path, None
        for other in before:
            other.unlink(missing_ok=True)
        _keep_beating()
        return True

    def _still_held(self) -> bool:
        """Return False if the folder itself was removed: then no other job can have claimed it."""
        if not self._root.exists():
            self._held = None
            return False
        claims = _claims(self._root)
        now = _holder(_content(claims[-1])) if claims else None
        if now is not None and now.job == self._me.job:
            return True
        self._held = None
        whom = now if now is not None else "another job, which has ended,"
        self._lost = (
            f"{self._root} was taken over by {whom} while this job (process {self._me.pid} on host {self._me.host}) "
            "gave no sign of life, or somebody removed its claim. It saves no more there: two jobs would overwrite "
            "each other's checkpoints. End one of them, or start this one anew with another folder."
        )
        raise FolderInUseError(self._lost)

    def _is_dead(self, path: Path, content: object) -> bool:
        """Return whether the job of a claim is known to be dead. Raise FolderInUseError if it is alive."""
        holder = _holder(content)
        if holder is not None:
            if holder.machine and holder.machine == self._me.machine:
                # A claim of this process that could not be removed is no obstacle.
                if holder.pid != self._me.pid and _is_alive(holder):
                    raise FolderInUseError(self._in_use(path, holder))
                return True
            if holder.launcher and holder.launcher == self._me.launcher:
                return True
        now = time.monotonic()
        if self._watched is not None:
            before, since = self._watched
            if content == before:
                return now - since >= DEAD_SECONDS
            known = _holder(before)
            if holder is not None and known is not None and known.job == holder.job:  # its counter has changed
                raise FolderInUseError(self._in_use(path, holder))
        self._watched = content, now
        _LOG.warning(
            "%s is claimed by %s: waiting up to %g s to see whether that is alive.",
            self._root,
            holder or "a job whose claim cannot be understood",
            DEAD_SECONDS,
        )
        return False

    def _in_use(self, path: Path, holder: Holder) -> str:
        return (
            f"{self._root} is in use: {holder} saves its checkpoints there, and two jobs would overwrite each other's. "
            f"Expected a folder of this job's own (towpath train: log.folder, or checkpoint.folder). Name another one, "
            f"or end that job first. If it cannot be alive, remove {path}."
        )

    def beat(self) -> None:
        """Show other machines that this job is alive."""
        held = self._held
        if held is None:
            return
        self._beats += 1
        with suppress(OSError):  # a save will report whether the folder can be written to
            descriptor = os.open(held, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.pwrite(descriptor, (_BEAT % self._beats).encode(), 0)
            finally:
                os.close(descriptor)

    def give_back(self) -> None:
        """Remove the claim's file if this job holds the folder."""
        held, self._held = self._held, None
        if held is None or os.getpid() != self._me.pid:  # a fork inherits its parent's claim
            return
        with suppress(OSError):
            now = _holder(_content(held))
            if now is not None and now.job == self._me.job:
                held.unlink(missing_ok=True)


_CLAIMS: dict[Path, Claim] = {}  # the claims of this process, by folder
_LOCK = threading.Lock()
_beating: threading.Thread | None = None


def claim_of(root: Path) -> Claim:
    """Return this process's claim on `root`. Call `release` once for each call."""
    with _LOCK:
        folder = root.resolve()
        claim = _CLAIMS[folder] if folder in _CLAIMS else _CLAIMS.setdefault(folder, Claim(root))
        claim.users += 1
        return claim


def release(claim: Claim) -> None:
    """Give the claim back if this was its last user."""
    with _LOCK:
        claim.users -= 1
        if claim.users:
            return
        for root in [root for root, known in _CLAIMS.items() if known is claim]:
            del _CLAIMS[root]
    claim.give_back()


def _keep_beating() -> None:
    global _beating
    with _LOCK:
        if _beating is None or not _beating.is_alive():
            _beating = threading.Thread(target=_beat, name="towpath claims", daemon=True)
            _beating.start()


def _beat() -> None:
    global _beating
    while True:
        time.sleep(BEAT_SECONDS)
        with _LOCK:
            claims = list(_CLAIMS.values())
            if not claims:
                _beating = None
                return
        for claim in claims:
            claim.beat()


def _claims(root: Path) -> list[Path]:
    """Return the claims in `root`. The last one counts."""
    return sorted((path for path in root.iterdir() if _CLAIM.fullmatch(path.name)), key=_number)


def _number(path: Path) -> int:
    match = _CLAIM.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _content(path: Path) -> object:
    """Return the content of a claim, or None if it cannot be read, perhaps because it is not yet complete."""
    try:
        return read_json(path, "a claim")
    except DamagedError as error:
        if isinstance(error.__cause__, PermissionError):
            raise FolderInUseError(
                f"{path.parent} may be in use by another user's job: {error} Name a folder of this job's own, or let "
                "this user read that file."
            ) from None
        return None


def _holder(content: object) -> Holder | None:
    checks = {f.name: integer(high=MAX_INT) if f.type == "int" else text for f in fields(Holder)}
    try:
        return Holder(**record(**checks)(content))
    except WrongFieldError:
        return None


# --- processes --------------------------------------------------------------------------------------------------------


def _machine() -> str:
    """Return what is the same for processes that see each other: one boot of one machine, in one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # not Linux
        return ""


def _is_alive(holder: Holder) -> bool:
    try:
        os.kill(holder.pid, 0)
    except (ProcessLookupError, OverflowError):  # OverflowError: no process can have this number
        return False
    except PermissionError:  # another user's process
        pass
    started = _started(holder.pid)
    return started is None or started == holder.started


def _started(pid: int) -> int | None:
    """Return when a process began, 0 for one that has ended and is still listed, None if that cannot be read."""
    try:
        # The name, in brackets, may contain anything: state and times come after it.
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return 0 if values[0] in ("Z", "X") else int(values[19])
