"""A rank's account of what it is doing, and how ranks that stand still find out that their transfers will never end.

A rank that stands still, waiting for a transfer or in the user's own code, posts on the noticeboard what it is doing. A
transfer that fails reads there what its peers were doing meanwhile; one that takes long is logged with it.

On a GPU the host runs ahead, and a transfer that never ends holds up the device alone. So transfers that the device has
not finished count as waiting, too. Where they never will be, the process groups of the device are aborted: the thread
that trains, if it waits for the device, then goes on and meets the error at its next transfer.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import socket
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Protocol, final

from towpath.core.journal import Call, CollectiveLog, Scope, StepLog, difference, has_not_made, told_to
from towpath.core.strategy import Strategy
from towpath.core.transfer import Transfer
from towpath.errors import StepError
from towpath.logs import logger
from towpath.topology.groups import Groups, meeting_point
from towpath.topology.noticeboard import StatusStore

# --- presence ---------------------------------------------------------------------------------------------------------
#
# Whether the next rank's process is still there, for ranks whose devices do the waiting.
#
# On a CPU a transfer fails as soon as a peer's connection closes. On a GPU the host has gone on, and the device waits
# for as long as NCCL's watchdog lets it. So each rank holds a connection to the next one, over which nothing is ever
# sent: the kernel closes it when that process ends, and its keepalive notices when that machine or the link to it is
# gone. A rank that stands still looks at its own connection, and tells the others (`activity.py`).


_LOG = logger("engine")

_PATIENCE_SECONDS = 5.0
# Keepalive: after how many seconds of silence the other side is asked, how often again, and how often in all.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


@final
class Neighbour:
    """The next rank of a process group; the first follows on the last. Every rank must make one."""

    def __init__(self, groups: Groups) -> None:
        self.rank = (groups.rank + 1) % groups.world
        self._connection: socket.socket | None = None
        self._from_previous: socket.socket | None = None  # held, so that the previous rank sees this process end
        with socket.create_server(("", 0), backlog=1) as listener:
            host, _, _ = meeting_point().rpartition(":")
            addresses = groups.gather_objects((_own_address(host), listener.getsockname()[1]))
            try:
                self._connection = _watched(socket.create_connection(addresses[self.rank], _PATIENCE_SECONDS))
            except OSError as error:
                _LOG.info("no connection to rank %d: nobody is told soon if its process ends (%s)", self.rank, error)
            have_connected = groups.gather_objects(self._connection is not None)
            if have_connected[groups.rank - 1]:
                self._from_previous, _ = listener.accept()

    @property
    def is_gone(self) -> bool:
        """Whether the connection was closed. Where there never was one, nobody knows."""
        if self._connection is None:
            return False
        try:
            return self._connection.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def _own_address(other: str) -> str:
    """The address by which this machine reaches `other`."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        return probe.getsockname()[0]
    return socket.gethostname()


def _watched(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setblocking(False)
    return connection


# How long a rank makes no progress before it says so to its peers, and before it logs what it waits for; or earlier
# where the process group's own patience is short.
_SILENT_SECONDS = 2.0
_WARN_SECONDS = 60.0

# With how many peers a rank compares itself, and how many it tells of.
_FEW = 16

# How many of the transfers that a device was given last are looked at.
_ENQUEUED = 256


class Event(Protocol):
    """The end of what a device was given to do."""

    def query(self) -> bool:
        """Return whether it has come. Any thread may ask."""
        ...


@final
class RankStatus:
    """Of all models over one process group. `progress` rises with everything that begins or ends."""

    def __init__(self) -> None:
        self.progress = 0
        self.step = 0
        self._since = time.monotonic()  # of the last progress
        self._seen = 0
        self._computing = "outside the model"
        self._under_way: dict[int, str] = {}  # by thread: a queue runs one transfer after the other
        self._last = ""
        self._failure = ""
        self._enqueued: deque[tuple[Event, str]] = deque(maxlen=_ENQUEUED)  # by the host; of a device, in order
        self.inside = ""  # a collective that the program has started, over ranks that share parameters
        self.meeting: tuple[int, str] | None = None  # a call that waits for every rank, and how many came before it
        self.meetings = 0  # so far, with that one

    def computes(self, work: str, unit: str | None) -> None:
        self.progress += 1
        self._computing = work if unit is None else f"{work} of unit {unit or 'root'!r}"

    def begins(self, transfers: Sequence[Transfer]) -> None:
        self.progress += 1
        self._under_way[threading.get_ident()] = _named(transfers)

    def ends(self) -> None:
        """The transfer that this thread has begun."""
        self.progress += 1
        self._last = self._under_way.pop(threading.get_ident(), self._last)

    def enqueued(self, end: Event, transfers: Sequence[Transfer]) -> None:
        """The device was given these transfers, and the host goes on."""
        self._drop_finished()
        self._enqueued.append((end, _named(transfers)))

    def _drop_finished(self) -> None:
        while self._enqueued and self._enqueued[0][0].query():
            self._last = self._enqueued.popleft()[1]
            self.progress += 1

    def on_device(self) -> str:
        """Return the first transfer that a device was given and has not finished; '' if there is none."""
        self._drop_finished()
        return self._enqueued[0][1] if self._enqueued else ""

    @contextmanager
    def shared(self, call: str) -> Generator[None]:
        """Around a collective that the program has started, on the thread that trains."""
        self.progress += 1
        before, self._computing, self.inside = self._computing, f"in {call}", call
        try:
            yield
        finally:
            self.progress += 1
            self._computing, self.inside = before, ""

    def failed(self, what: str) -> None:
        """A forward or backward pass; '' once all ranks have agreed that it failed alike."""
        self.progress += 1
        self._failure = what

    def meets(self, what: str) -> None:
        self.progress += 1
        self.meeting = (self.meetings, what)
        self.meetings += 1

    def met(self) -> None:
        self.progress += 1
        self.meeting = None

    @property
    def waits(self) -> bool:
        """Whether a transfer is under way, here or on the device, or a call that other ranks must make, too."""
        return bool(self._under_way or self.inside or self.on_device()) or self.meeting is not None

    def silent_seconds(self) -> float:
        """Since when nothing has begun or ended. To be asked now and then, by one thread."""
        now = time.monotonic()
        if self.progress != self._seen:
            self._seen, self._since = self.progress, now
        return now - self._since

    def describe(self) -> str:
        parts = [f"step {self.step}"]
        parts += [self._failure] if self._failure else [self._computing]
        under_way = sorted(self._under_way.copy().values())
        if on_device := self.on_device():
            under_way.append(f"{on_device}, on the device")
        if self.meeting is not None:
            parts.append(f"waits for every rank to call {self.meeting[1]}")
        parts.append(f"waits for {', '.join(under_way)}" if under_way else "in no transfer")
        if self._last:
            parts.append(f"the last one that ended was {self._last}")
        return "; ".join(parts)


def _named(transfers: Sequence[Transfer]) -> str:
    first = transfers[0]
    return f"{first.kind.value} of unit {first.unit or 'root'!r}" if first.unit or first.bucket else first.kind.value


@final
class StallMonitor:
    """What the ranks of one process group know of each other when they are stuck."""

    def __init__(self, groups: Groups) -> None:
        self.rank, self.world, self._groups = groups.rank, groups.world, groups
        self.activity = RankStatus()
        self.journal: CollectiveLog | None = None  # of the model that was last at work
        self.diverged = ""  # why the ranks will never come to an end, once that is known
        self._neighbour: Neighbour | None = None  # see `watch_processes`
        self.patience_seconds = groups.timeout_seconds
        # A launcher may keep its store over restarts: what ranks that are gone have left there is not for these.
        new_name: str = groups.gather_objects(uuid.uuid4().hex)[0]
        self.noticeboard = StatusStore(f"{groups.name}/{new_name}", groups.rank, groups.world)
        if self.world > 1:
            stop = threading.Event()
            reporter = threading.Thread(
                target=_report, args=(weakref.ref(self), stop), name="towpath-stall-reporter", daemon=True
            )
            reporter.start()
            atexit.register(_end, reporter, stop)

    @staticmethod
    def of(groups: Groups) -> StallMonitor:
        return groups.shared("peers", lambda: StallMonitor(groups))

    def describe(self, ranks: Sequence[int]) -> str:
        """What `ranks` have last said of themselves, a line each."""
        others = [rank for rank in ranks if rank != self.rank]
        lines = [
            f"\n  rank {rank}: {note.doing if note else 'has said nothing: it makes progress, or it is gone'}"
            for rank, note in self._read(others[:_FEW]).items()
        ]
        return "".join(lines) + ("\n  …" if len(others) > _FEW else "")

    def watch_processes(self) -> None:
        """From now on notice when a peer's process ends while only the device waits. Every rank must call it."""
        if self._neighbour is None and self.world > 1:
            self._neighbour = Neighbour(self._groups)

    def raise_if_diverged(self) -> None:
        if self.diverged:
            raise StepError(
                f"{self.diverged} Transfers of this job are stuck, those of its other models, too: end it, and restart "
                "from a checkpoint."
            )

    @property
    def pause_seconds(self) -> float:
        return min(_SILENT_SECONDS, self.patience_seconds / 4) / 2

    @property
    def warn_seconds(self) -> float:
        return min(_WARN_SECONDS, self.patience_seconds / 2)

    def post(self, silent: bool) -> None:
        """What this rank is doing, now that it makes no progress; an old note is taken back when it does."""
        page = self._page()
        page_said = None if page is None else page.to_json()
        note = [self.activity.describe(), page_said, self.activity.meeting, self._ended_neighbour()]
        self.noticeboard.post(json.dumps(note) if silent else "")

    def _page(self) -> StepLog | None:
        return None if self.journal is None else replace(self.journal.page(), inside=self.activity.inside)

    def describe_all(self) -> str:
        """What this rank is doing, and what its peers last said of themselves."""
        said = self.describe(range(self.world))
        return f"This rank: {self.activity.describe()}. What its peers last said of themselves:{said}"

    def come_together(self, call: str) -> None:
        """Return when every rank has made this call; raise where one does not, or waits for a transfer meanwhile."""
        if self.world == 1:
            return
        self.activity.meets(call)
        event, patience = f"call {self.activity.meetings}", self.patience_seconds
        try:
            came = self.noticeboard.meet(event, call, patience, self.raise_if_diverged)
        finally:
            self.activity.met()
        other = next((rank for rank, theirs in came.items() if theirs != call), None)
        if other is not None:
            raise StepError(
                f"rank {self.rank}: this rank called {call}, and rank {other} {came[other]} meanwhile. Let every "
                "rank make the same calls in the same order."
            )
        missing = [rank for rank in range(self.world) if rank not in came]
        if missing:
            raise StepError(
                f"rank {self.rank}: every rank must call {call}; rank {', '.join(map(str, missing))} did not in "
                f"{patience:.0f} s. What they last said of themselves:{self.describe(missing)}"
            )

    def look_for_divergence(self) -> None:
        """Set `diverged` if peers that stand still, too, have done other things than this rank."""
        journal, mine, meeting = self.journal, self._page(), self.activity.meeting
        if journal is None or mine is None:
            return
        calls = [scope for scope in journal.scopes if scope.kinds & {Call.PROGRAM, Call.SHARED}]
        for scope in journal.scopes:
            members = scope.members(scope.group_of[self.rank])
            place = members.index(self.rank)
            for rank, note in self._read([*members[place + 1 :], *members[:place]][:_FEW]).items():
                if note is None or note.page is None:
                    continue
                both = [each for each in calls if each.group_of[self.rank] == each.group_of[rank]]
                # A rank that waits for others in a call submits nothing before they have come there.
                their = note.meeting if note.meeting is not None and note.meeting[0] >= self.activity.meetings else None
                here = meeting[1] if meeting is not None else _alone_in(mine, note.page, both)
                there = their[1] if their is not None else _alone_in(note.page, mine, both)
                pages = [(self.rank, _ended(mine, here)), (rank, _ended(note.page, there))]
                first, second = sorted(pages, key=itemgetter(0))
                found = difference(scope, first, second)
                if found is not None and (self._page(), self.activity.meeting) == (mine, meeting):
                    # Where one rank has stepped an optimizer and the other has not, their transfers differ by that.
                    cause = difference(journal.scopes[0], first, second, ended=True)
                    is_a_step = cause is not None and Call.STEP in cause.kinds and Call.SHARED not in found.kinds
                    self.diverged = told_to(self.rank, cause if cause is not None and is_a_step else found)
                    for who, other, call in ((self.rank, rank, here), (rank, self.rank, there)):
                        if call:
                            self.diverged = (
                                f"rank {self.rank}: rank {who} is in {call}, which every rank must call, while rank "
                                f"{other} waits for a transfer that rank {who} is to take part in: {found}. Call it on "
                                "every rank, at the same place."
                            )
                    return

    def look_for_lost_peers(self) -> None:
        """Set `diverged` if a peer's process has ended, as this rank or another one that stands still has noticed."""
        lost = self._ended_neighbour()
        if lost is None and self._neighbour is not None:
            everyone = [*range(self.rank + 1, self.world), *range(self.rank)]
            notes = self._read(everyone[:_FEW]).values()
            lost = next((note.lost for note in notes if note is not None and note.lost is not None), None)
        if lost is not None:
            self.diverged = (
                f"rank {self.rank}: the process of rank {lost} has ended, and this rank waits for it: "
                f"{self.activity.describe()}. See what rank {lost} printed, then restart from the last checkpoint."
            )

    def _ended_neighbour(self) -> int | None:
        """Return the next rank if its process has ended."""
        return self._neighbour.rank if self._neighbour is not None and self._neighbour.is_gone else None

    def release_device(self) -> None:
        """Let the thread that trains go on, where it waits for a device whose transfers will never end."""
        if self.activity.on_device():
            _LOG.error(self.diverged)
            self._groups.abort()

    def _read(self, ranks: Sequence[int]) -> dict[int, _Note | None]:
        notes = self.noticeboard.read(ranks)
        return {rank: _Note.parsed(note) if note else None for rank, note in notes.items()}


@dataclass(frozen=True, slots=True)
class _Note:
    doing: str
    page: StepLog | None
    meeting: tuple[int, str] | None
    lost: int | None

    @staticmethod
    def parsed(text: str) -> _Note:
        doing, page, meeting, lost = json.loads(text)
        met = None if meeting is None else tuple(meeting)
        return _Note(doing, None if page is None else StepLog.from_json(page), met, lost)


def _alone_in(page: StepLog, other: StepLog, scopes: Sequence[Scope]) -> str:
    """Return the call that the page's rank is in, if the other rank has not made it yet."""
    return page.inside if any(has_not_made(page, other, scope) for scope in scopes) else ""


def _ended(page: StepLog, call: str) -> StepLog:
    return replace(page, ended=True) if call else page


def _end(reporter: threading.Thread, stop: threading.Event) -> None:
    """Before the interpreter ends: a thread that waits for the store in C++ then would abort the process."""
    stop.set()
    reporter.join(timeout=2 * _SILENT_SECONDS)


def _report(reference: weakref.ref[StallMonitor], stop: threading.Event) -> None:
    """Tell the others when this rank stands still, and find out whether it ever will go on."""
    posted = warned = -1  # at which progress
    peers = reference()
    while peers is not None:
        pause, activity = peers.pause_seconds, peers.activity
        silent, progress = activity.silent_seconds(), activity.progress
        if peers.diverged:
            pass  # what this rank has posted stays there: by it the others find out, too, however late they look
        elif silent >= 2 * pause:
            if posted != progress:
                peers.post(silent=True)
                posted = progress
            if activity.waits:
                peers.look_for_divergence()
                if not peers.diverged:
                    peers.look_for_lost_peers()
                if peers.diverged:
                    peers.release_device()
        elif posted != -1:
            peers.post(silent=False)
            posted = -1
        if activity.waits and silent >= peers.warn_seconds and warned != progress:
            warned = progress
            _LOG.warning(
                "no progress for %.0f s: %s. This rank gives up after %.0f s. Other ranks:%s",
                *(silent, activity.describe(), peers.patience_seconds, peers.describe(range(peers.world))),
            )
        peers = None
        if stop.wait(pause):
            return
        peers = reference()


# --- failed passes ----------------------------------------------------------------------------------------------------
#
# Forward and backward passes that end in an exception: noticed, and agreed on by all ranks before the next one.
#
# A rank that catches the exception and goes on, while its peers do not, would send the transfers of its next pass
# into those that they still wait for. So after a failed pass a rank first waits until all others have failed alike.


@final
class EndOfBackward:
    """What autograd calls at the end of a backward pass. One that fails drops it without a call: that tells, too."""

    def __init__(self, through: weakref.WeakMethod[Callable[[], Any]], failed: weakref.WeakMethod[Callable[[], Any]]):
        self._through, self._failed = through, failed
        self._called = False

    def __call__(self) -> None:
        self._called = True
        through = self._through()
        if through is not None:
            through()

    def __del__(self) -> None:
        failed = self._failed()
        if not self._called and failed is not None:
            failed()


@final
class FailedPasses:
    """Of one model on one rank. Every rank must make its models in the same order."""

    def __init__(self, groups: Groups, peers: StallMonitor, strategy: Strategy, journal: CollectiveLog) -> None:
        self._groups, self._peers, self._journal = groups, peers, journal
        self._forward_is_shared = strategy.gathered_over.size > 1
        self._agreements = 0
        self._failure = ""

    def forward_failed(self, what: str) -> None:
        if self._forward_is_shared:
            self.failed(what)

    def failed(self, what: str) -> None:
        if self._groups.world > 1:
            self._failure = self._failure or what
            self._peers.activity.failed(f"{self._failure}, and was caught")

    def agree(self) -> None:
        """Before the next pass: return once all ranks have failed alike, or raise what the others do instead."""
        if not self._failure:
            return
        failure, self._failure = self._failure, ""
        event = f"failed pass {self._agreements} of model {self._journal.model}"
        self._agreements += 1
        mine = self._journal.encoded().hex()
        came = self._peers.noticeboard.meet(event, mine, self._peers.patience_seconds)
        self._peers.activity.failed("")
        missing = [rank for rank in range(self._groups.world) if rank not in came]
        if missing:
            ranks = ", ".join(map(str, missing))
            raise StepError(
                f"rank {self._groups.rank}: {failure}, which was caught here; rank {ranks} did not fail, and waits for "
                "the transfers of that pass. A pass that fails on some ranks cannot be left out: let the exception end "
                "the program, or see to it that it is raised on every rank. What they last said of themselves:"
                f"{self._peers.describe(missing)}"
            )
        everyones = [bytes.fromhex(came[rank]) for rank in range(self._groups.world)]
        self._journal.check(bytes(map(max, zip(*everyones, strict=True))), self._groups.gather_objects)
