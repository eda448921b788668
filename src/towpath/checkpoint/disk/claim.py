"""Which job writes to a folder of checkpoints: one at a time.

claim-000001.json     names the job that holds the folder; of several such files the one with the highest number counts

Take    A job creates the file with the next number, which a file system lets only one job do (O_EXCL).
Beat    While a job holds the folder, a thread of it raises a counter in its file.
Dead    A job of this machine is dead if its process is gone. The time when that process began tells it from a later one
        with the same number. A job of another machine is dead if its counter has stood still for DEAD_SECONDS. That is
        measured here: clocks of two machines are never compared. Where torchrun restarts a job, its former ranks are
        dead.
Lost    A job that was taken for dead (it was stopped, or cut off) finds a file with a higher number, or its own gone.
        It must not write there any more.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from towpath.checkpoint.disk.fields import WrongFieldError, integer, member, table, text
from towpath.checkpoint.disk.safe_open import DamagedError, read_json, visible
from towpath.errors import CheckpointError
from towpath.logs import logger
from towpath.topology.groups import launcher_run

BEAT_SECONDS = 10.0
# NFS, and buckets mounted as folders, may show a file as it was a minute ago.
DEAD_SECONDS = 90.0
PAUSE_SECONDS = 1.0  # between two looks at a claim of another machine

_LOG = logger("checkpoint")

_NAME = re.compile(r"claim-([0-9]{6,})\.json")
_BEAT = '{"beat": "%010d"'  # what a file begins with, always as long


class FolderInUseError(CheckpointError):
    """Another job writes its checkpoints to the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that writes a job's manifests: its rank 0."""

    host: str
    pid: int
    since: str  # for people
    job: str
    launcher: str  # the same after a restart; empty if there was none that can tell
    machine: str  # where `pid` means a process; empty if that is not known
    started: int  # when the process began, in ticks since the machine did

    @staticmethod
    def here() -> Holder:
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
    """A folder that this job holds, or tries to. For one process: `claim_of` finds it, `release` gives it back."""

    def __init__(self, root: Path) -> None:
        self._root, self._me = root, Holder.here()
        self._held: Path | None = None
        self._beats = 0
        self._lost = ""
        # The file of another job that may be dead: what was in it, and since when it has been like that.
        self._watched: tuple[object, float] | None = None
        self._taking = threading.Lock()
        self.users = 0

    def hold(self) -> None:
        """Return when this job holds the folder. Raise FolderInUseError if another one does."""
        while not self.take():
            time.sleep(PAUSE_SECONDS)

    def take(self) -> bool:
        """Take the folder if it is free or its holder is dead. False: that is not known yet, look again later."""
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
            os.fchmod(descriptor, 0o644)  # other users' jobs are to read it, whatever the umask
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 (a descriptor)
            file.write(_BEAT % 0 + ", " + json.dumps(asdict(self._me))[1:] + "\n")
        others = [other for other in _claims(self._root) if other != path]
        if not {*others} <= {*before} or any(other == before[-1] and _content(other) != judged for other in others):
            path.unlink(missing_ok=True)  # who came meanwhile does the same, or was there first
            return False
        self._held, self._watched = path, None
        for other in before:
            other.unlink(missing_ok=True)
        _keep_beating()
        return True

    def _still_held(self) -> bool:
        """False if the folder itself was taken away: nobody else can have claimed it."""
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
        """Raise FolderInUseError if the job of that claim is alive. False: it is not known yet."""
        holder = _holder(content)
        if holder is not None:
            if holder.machine and holder.machine == self._me.machine:
                # Its own, if it could not be removed, does not stand in this process's way.
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
            if holder is not None and known is not None and known.job == holder.job:  # it has beaten
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
        with suppress(OSError):  # whether the folder can be written to, a save will tell
            descriptor = os.open(held, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.pwrite(descriptor, (_BEAT % self._beats).encode(), 0)
            finally:
                os.close(descriptor)

    def give_back(self) -> None:
        held, self._held = self._held, None
        if held is None or os.getpid() != self._me.pid:  # a fork has it from its parent
            return
        with suppress(OSError):
            now = _holder(_content(held))
            if now is not None and now.job == self._me.job:
                held.unlink(missing_ok=True)


# By folder, as this process holds them.
_CLAIMS: dict[Path, Claim] = {}
_LOCK = threading.Lock()
_beating: threading.Thread | None = None


def claim_of(root: Path) -> Claim:
    """Return the claim of this process on `root`. `release` it as often."""
    with _LOCK:
        folder = root.resolve()
        claim = _CLAIMS[folder] if folder in _CLAIMS else _CLAIMS.setdefault(folder, Claim(root))
        claim.users += 1
        return claim


def release(claim: Claim) -> None:
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


# Files ----------------------------------------------------------------------------------------------------------------


def _claims(root: Path) -> list[Path]:
    """The one that counts last."""
    return sorted((path for path in root.iterdir() if _NAME.fullmatch(path.name)), key=_number)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _content(path: Path) -> object:
    """What is in a claim. None: nothing that can be read, perhaps not yet."""
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
    try:
        said = table(content, "claim")
        values = {
            f.name: integer(member(said, f.name), f.name, high=2**63 - 1)
            if f.type == "int"
            else text(member(said, f.name), f.name)
            for f in fields(Holder)
        }
    except WrongFieldError:
        return None
    return Holder(**values)  # pyright: ignore[reportArgumentType]


# Processes ------------------------------------------------------------------------------------------------------------


def _machine() -> str:
    """Return what is the same for processes that see each other: of one boot of one machine, in one container."""
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
    except PermissionError:  # another user's
        pass
    started = _started(holder.pid)
    return started is None or started == holder.started


def _started(pid: int) -> int | None:
    """Return when a process began, 0 for one that has ended and is still listed, None if that cannot be read."""
    try:
        # The name, in brackets, may hold anything: state and times come after it.
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return 0 if values[0] in ("Z", "X") else int(values[19])
