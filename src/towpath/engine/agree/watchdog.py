"""The watchdog of a rank: it notices that a peer is dead, stalled, or waits for something else.

A thread posts the status of a rank without progress in the `StatusStore`. Errors and warnings about a transfer quote
the status of its peers. Ranks also compare their collective logs there, to find out that they wait for different
things.

On a GPU the host runs ahead, and a transfer that never ends blocks the device alone. So transfers that the device has
not finished count as waiting, too. If they can never end, the device's process groups are aborted. The training thread
then continues, and gets the error at its next transfer.

Nor does the host notice there that a peer has died, until NCCL's own watchdog stops the device. Over gloo it notices
only in transfers, and neither in a call in which ranks meet, nor that a machine no longer answers. So each rank holds a
connection to the next one (`NextRank`), over which only a token is sent. The kernel closes it when that process ends,
and its keepalive notices when that machine or the link to it fails.

A job that heals itself must not wait for a lost rank anywhere, also where no transfer of a model is under way, such as
in PyTorch's own collectives. There, a rank whose next rank is lost ends its process, and the launcher starts all again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import Any, final

import torch.distributed as dist

from towpath.core.queues import LoggedCall, Scope
from towpath.daemons import ends_in_error, start_daemon
from towpath.engine.agree.digest import CollectiveLog, StepLog, difference, divergence_message
from towpath.engine.agree.status import RankStatus
from towpath.errors import StepError
from towpath.logs import logger
from towpath.topology.groups import Groups
from towpath.topology.launcher import meeting_point
from towpath.topology.store import StatusStore

_LOG = logger("engine")

# Seconds without progress before a rank posts its status, and before it logs what it waits for. Both are shorter if
# the process group's timeout is short.
_SILENT_SECONDS = 2.0
_WARN_SECONDS = 60.0

# The largest number of peers that a rank compares itself with, and that a message describes.
_FEW = 16

_PATIENCE_SECONDS = 5.0  # for a connection to the next rank
# Keepalive: seconds of silence before the first probe, seconds between probes, and the number of probes. A lost machine
# is noticed after 60 seconds, because a link that returns sooner should delay a step and no more. In a job that heals
# itself it is after 7: a false alarm costs little there.
_KEEPALIVE, _KEEPALIVE_OF_PROTECTED = (15, 5, 9), (3, 1, 4)
_LEAVES = b"."
_PROBES = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
# How often a rank that waits for a collective checks whether the collective can still end.
_LOOK = timedelta(seconds=1)
# A rank of a protected job has so many seconds to raise, after the next rank is lost.
_RAISE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _StatusNote:
    """The note that a rank without progress posts."""

    status: str
    step_log: StepLog | None
    lost: int | None  # the rank that it found dead
    failure: str  # its pass that has failed, if not all ranks have learned of that
    cause: str  # why its transfers can never end, if it knows


@final
class Watchdog:
    """The exchange of status among the ranks of one process group, on one rank. All models over the group share it.

    If transfers can never end, `diverged` holds the error message.
    """

    def __init__(self, groups: Groups) -> None:
        self.rank, self.world, self._groups = groups.rank, groups.world, groups
        self.first, self.number = groups.first, groups.number  # errors name ranks by their numbers in the job
        self.status = RankStatus()
        self.log: CollectiveLog | None = None  # of the model that made the last transfer or call
        self.meetings = 0  # the number of calls so far in which this rank waited for all ranks
        self.warns = True  # whether this watchdog logs that there is no progress
        self.diverged = ""  # the reason why transfers can never end, once it is known
        self._cause = ""  # the same, as a peer has said it
        self.is_waiting = False  # in `wait`
        self._protected = False
        self._has_raised = False
        self._stuck: tuple[float, int] | None = None  # since when the next rank is lost, and the progress then
        self._next_rank: NextRank | None = None  # made by `watch_processes`
        self._islands: list[Watchdog] = []  # those of this rank's islands, if this one is of the whole job
        self.patience_seconds = groups.timeout.total_seconds()
        self.pause_seconds = min(_SILENT_SECONDS, self.patience_seconds / 4) / 2  # between two looks of the thread
        # A launcher may keep its store over restarts. A new name hides what the ranks of an earlier start left there.
        new_name: str = groups.broadcast_object(uuid.uuid4().hex)
        self.store = StatusStore(f"{groups.name}/{new_name}", groups.rank, groups.world)
        if self.world > 1:
            stop = threading.Event()
            start_daemon("towpath-stall-reporter", partial(_report, weakref.ref(self), stop), stop.set)

    @staticmethod
    def of(groups: Groups) -> Watchdog:
        """Return the watchdog of a process group, which is made at the first call."""
        return groups.shared("watchdog", lambda: Watchdog(groups))

    def oversee(self, island: Watchdog) -> None:
        """Report also what this rank does in its island. The island then learns which process of the job has ended."""
        self.status = island.status
        if island is not self and island not in self._islands:
            self._islands.append(island)
            island.warns = False  # this watchdog warns, and describes the ranks of all islands

    def watch_processes(self, protected: bool = False) -> None:
        """Start to watch whether the next rank's process ends. Every rank must call it.

        Args:
            protected: Whether the job heals itself. It then notices sooner that a machine no longer answers.
        """
        if self._next_rank is None and self.world > 1:
            self._next_rank = NextRank(self._groups)
            atexit.register(self._next_rank.take_leave)
            # It connects to the store. If rank 0, which may hold the store, is lost, an error would wait to connect.
            self.store.post(None)
        if protected and self._next_rank is not None:  # perhaps the first such model of the group
            self._next_rank.probe(_KEEPALIVE_OF_PROTECTED)
            self._protected = True

    def wait(self, work: dist.Work | None) -> None:
        """Wait on the host for a collective; raise StepError if the ranks have noticed that it can never end."""
        # On a GPU there is no work to wait for: the collective runs on the current stream, and does not block the host.
        self.is_waiting = True
        try:
            while work is not None:
                try:
                    work.wait(_LOOK)
                    return
                except RuntimeError:
                    if work.is_completed():  # it has failed, or has ended just now
                        work.wait()
                        return
                self.raise_if_diverged()
        finally:
            self.is_waiting = False

    # What errors say ------------------------------------------------------------------------------------------------

    def raise_if_diverged(self) -> None:
        """Raise StepError if the ranks are known to wait for transfers that can never end."""
        if self.diverged:
            self._has_raised = True
            raise StepError(
                f"{self.diverged} Transfers of this job are stuck, those of its other models, too: end it, and restart "
                "from a checkpoint."
            )

    def exchange(
        self, event: str, word: Any, why: str, omission: str, raise_if_stuck: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """Return by rank the word that each rank posts for `event`, which every rank uses once.

        If some do not come in time, raise a StepError that says `why` this rank waits, and their `omission`.
        """
        words = self.store.exchange(event, word, self.patience_seconds, raise_if_stuck)
        missing = [rank for rank in range(self.world) if rank not in words]
        if missing:
            numbers = ", ".join(str(self.first + rank) for rank in missing)
            raise StepError(
                f"rank {self.number}: {why}; rank {numbers} {omission} What they last said of themselves:"
                f"{self.describe(missing)}"
            )
        return [words[rank] for rank in range(self.world)]

    def describe(self, ranks: Sequence[int]) -> str:
        """Return the last status that each of `ranks` has posted, one line per rank."""
        others = [rank for rank in ranks if rank != self.rank]
        notes, nothing = self.store.read(others[:_FEW]), "has said nothing: it makes progress, or it is gone"
        said = {rank: f"{n.status}. It has found: {n.cause}" if n.cause else n.status for rank, n in notes.items()}
        lines = [f"\n  rank {self.first + rank}: {said.get(rank, nothing)}" for rank in others[:_FEW]]
        return "".join(lines) + ("\n  …" if len(others) > _FEW else "")

    def describe_ranks(self, others: Sequence[int]) -> str:
        """Return this rank's status, and the last status that `others` have posted."""
        return f"This rank: {self.status.describe()}. What its peers last said of themselves:{self.describe(others)}"

    # What ranks post ------------------------------------------------------------------------------------------------

    def post(self, silent: bool) -> None:
        """Post this rank's status if it is `silent`, or a call of it has failed. Otherwise clear what it has posted."""
        status = self.status
        found = self._cause or self.diverged.removeprefix(f"rank {self.number}: ")
        cause = found or (status.failure and status.broken)
        note = _StatusNote(status.describe(), self._step_log(), self.ended_peer(), status.failure, cause)
        self.store.post(note if silent or status.failure else None)

    def tell(self, failure: str) -> None:
        """Post the error of a call that only this rank may have made. Peers that wait for this rank quote it."""
        self.status.failed(failure)
        if self.world > 1:
            self.post(silent=True)

    def _step_log(self) -> StepLog | None:
        return None if self.log is None else self.log.step_log(self.status.inside)

    # What the background thread looks for ---------------------------------------------------------------------------

    def look_for_divergence(self) -> None:
        """Set `diverged` if a peer without progress has noted other transfers or calls than this rank."""
        log, mine = self.log, self._step_log()
        if log is None or mine is None:
            return
        for scope in log.scopes:
            members = scope.members(scope.group_of[self.rank])
            place = members.index(self.rank)
            for rank, note in self.store.read([*members[place + 1 :], *members[:place]][:_FEW]).items():
                found = "" if note.step_log is None else self._compare(log, scope, mine, rank, note, note.step_log)
                if found and self._step_log() == mine:  # this rank has not gone on meanwhile
                    self.diverged = found
                    return

    def _compare(
        self, log: CollectiveLog, scope: Scope, mine: StepLog, rank: int, note: _StatusNote, theirs: StepLog
    ) -> str:
        """Return why this rank and `rank` wait for each other, or "" if they may go on."""
        peer, calls = self.first + rank, {LoggedCall.PROGRAM, LoggedCall.SHARED}
        shared = [s for s in log.scopes if s.group_of[self.rank] == s.group_of[rank] and s.kinds & calls and not s.lane]
        # A rank in a call that its peer has not made submits nothing before the peer comes. Its log counts as ended.
        here = mine.inside if any(mine.is_alone_in_call(theirs, s) for s in shared) else ""
        there = theirs.inside if any(theirs.is_alone_in_call(mine, s) for s in shared) else ""
        # Nor does a rank whose pass has failed, before all ranks have failed, too.
        one = self.number, replace(mine, ended=mine.ended or bool(here))
        other = peer, replace(theirs, ended=theirs.ended or bool(there or note.failure))
        first, second = sorted((one, other), key=itemgetter(0))
        found = difference(scope, first, second)
        if found is None:
            return ""
        if call := there or here:
            who, waiting = (peer, self.number) if there else (self.number, peer)
            return (
                f"rank {self.number}: rank {who} is in {call}, which every rank must call, while rank {waiting} waits "
                f"for a transfer that rank {who} is to take part in: {found}. Call it on every rank, at the same place."
            )
        if note.failure and note.cause:  # a transfer of that pass has failed: `look_for_lost_peers` says so
            return ""
        if note.failure:
            return (
                f"rank {self.number}: a pass has failed on rank {peer} and not on this rank, which waits for rank "
                f"{peer}: {found}. What it said of itself: rank {peer}: {note.status}. A pass that fails on some ranks "
                "cannot be left out: let the exception end the program, or raise it on every rank."
            )
        # If only one rank has stepped an optimizer, that explains why their transfers differ.
        cause = difference(log.scopes[0], first, second, ended=True)
        if cause is not None and LoggedCall.STEP in cause.kinds and LoggedCall.SHARED not in found.kinds:
            found = cause
        return divergence_message(self.number, found)

    def look_for_lost_peers(self) -> None:
        """Set `diverged` if this rank has noticed that some rank is lost, or a peer says why none goes on.

        A rank whose transfers are so far those of its peers sees no difference itself. It waits for one that does.
        """
        if self.diverged:
            return
        lost, notes = self.ended_peer(), dict[int, Any]()
        if lost is None:
            notes = self.store.read([*range(self.rank + 1, self.world), *range(self.rank)][:_FEW])
            lost = next((note.lost for note in notes.values() if note.lost is not None), None)
        if lost is not None:
            peer = self.first + lost
            self.diverged = (
                f"rank {self.number}: the process of rank {peer} has ended or no longer answers, and this rank waits "
                f"for it: {self.status.describe()}. See what rank {peer} printed, then restart from the last "
                "checkpoint. If it printed no error, its machine or its link is lost, it has left out a call that "
                "every rank must make, or it has had fewer batches."
            )
            for island in self._islands:
                island.diverged = island.diverged or self.diverged
            return
        told = next(((rank, note.cause) for rank, note in notes.items() if note.cause), None)
        if told is not None:
            self._cause = told[1]
            self.diverged = f"rank {self.number}: {self._cause} Rank {self.first + told[0]} has found this."

    def ended_peer(self) -> int | None:
        """Return the number of the next rank if its process has ended or no longer answers, else None."""
        return self._next_rank.rank if self._next_rank is not None and self._next_rank.is_gone else None

    def end_if_stuck(self) -> None:
        """End this process if its job is protected, and it waits for a lost rank where it cannot raise."""
        next_rank, progress = self._next_rank, self.status.progress
        has_raised = self._has_raised or self.status.failure
        if not self._protected or next_rank is None or not next_rank.is_gone or next_rank.has_left or has_raised:
            self._stuck = None
        elif self._stuck is None or self._stuck[1] != progress:
            self._stuck = time.monotonic(), progress
        elif time.monotonic() - self._stuck[0] > _RAISE_SECONDS:
            _LOG.error(
                "rank %d: the process of rank %d is lost, and this rank waits where it cannot raise. It ends "
                "itself, so that the launcher starts all ranks again. %s",
                *(self.number, self.first + next_rank.rank, self.status.describe()),
            )
            os._exit(1)

    def release_device(self) -> None:
        """Abort the groups of a device in a transfer that can never end, so that the training thread can continue."""
        if self.diverged and self.status.on_device():
            _LOG.error(self.diverged)
            self._groups.abort(*(island._groups for island in self._islands))


def _report(reference: weakref.ref[Watchdog], stop: threading.Event) -> None:
    """Run the background thread: post the status of a rank without progress, and look for the cause."""
    posted, warned = None, -1  # the progress counter at the last post (and a lost peer), and at the last warning
    while (watchdog := reference()) is not None:
        pause, status, patience = watchdog.pause_seconds, watchdog.status, watchdog.patience_seconds
        silent, progress = status.silent_seconds(), status.progress
        # The posted status of a diverged rank stays, so that the others can find the difference, too.
        if not watchdog.diverged and silent >= 2 * pause:
            if posted != (progress, lost := watchdog.ended_peer()):
                watchdog.post(silent=True)
                posted = progress, lost
            if (waits := status.waits) or watchdog.is_waiting:
                if waits:
                    watchdog.look_for_divergence()
                watchdog.look_for_lost_peers()
                watchdog.release_device()
                if watchdog.diverged:
                    watchdog.post(silent=True)
        elif not watchdog.diverged and posted is not None:
            watchdog.post(silent=False)
            posted = None
        watchdog.end_if_stuck()
        # Whether the rank waits is the last question, because it queries events of the device. Another thread may be
        # capturing a CUDA graph, and CUDA's default mode of capture forbids queries of all threads.
        is_long = silent >= min(_WARN_SECONDS, patience / 2)
        if watchdog.warns and is_long and warned != progress and status.waits:
            warned = progress
            _LOG.warning(
                "no progress for %.0f s: %s. This rank gives up after %.0f s. `towpath doctor` examines the network. "
                "Other ranks:%s",
                *(silent, status.describe(), patience, watchdog.describe(range(watchdog.world))),
            )
        del watchdog
        if stop.wait(pause):
            return


@final
class NextRank:
    """A connection to the next rank, or from the last one to the first. It shows when that process is lost."""

    # Every rank must make one, at the same time.

    def __init__(self, groups: Groups) -> None:
        self.rank = (groups.rank + 1) % groups.world
        self._connection: socket.socket | None = None
        self._from_previous: socket.socket | None = None  # kept open, so that it closes with this process
        self.has_left = False  # whether the next rank has ended without an error
        with socket.create_server(("", 0)) as listener:
            host, _ = meeting_point()
            # Something else may be listening at an address, or connect to it. The token shows who is meant.
            token = uuid.uuid4().bytes
            here = _own_address(host), listener.getsockname()[1]
            peers: list[tuple[tuple[str, int], bytes]] = groups.all_gather_objects((here, token))
            reason: object = "another process answered at its address"
            try:
                self._connection = _introduced(*peers[self.rank])
                self.probe(_KEEPALIVE)
            except OSError as error:
                reason = error
            self._from_previous = _accepted(listener, token)
        have_accepted: list[bool] = groups.all_gather_objects(self._from_previous is not None)
        if self._connection is not None and have_accepted[self.rank]:
            return
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        _LOG.info("no connection to rank %d: this rank may notice late that its process ends (%s)", self.rank, reason)

    def probe(self, keepalive: Sequence[int]) -> None:
        """Let the kernel watch the connection from now on, with these values of `_PROBES`."""
        for name, value in zip(_PROBES, keepalive, strict=True):
            if self._connection is not None and hasattr(socket, name):
                self._connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def is_gone(self) -> bool:
        """Whether the connection to the next rank was closed. False if there never was one."""
        if self._connection is None:
            return False
        try:
            while word := self._connection.recv(1):
                self.has_left = word == _LEAVES
            return True
        except BlockingIOError:
            return False
        except OSError:
            return True

    def take_leave(self) -> None:
        """Tell the previous rank that this process ends without an error."""
        if self._from_previous is not None and not ends_in_error():
            with contextlib.suppress(OSError):
                self._from_previous.send(_LEAVES)


def _own_address(other: str) -> str:
    """Return the address of this machine on the route to `other`."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        return probe.getsockname()[0]
    return socket.gethostname()


def _introduced(address: tuple[str, int], token: bytes) -> socket.socket:
    """Connect to `address`, and send `token`."""
    connection = socket.create_connection(address, _PATIENCE_SECONDS)
    connection.sendall(token)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setblocking(False)
    return connection


def _accepted(listener: socket.socket, token: bytes) -> socket.socket | None:
    """Return the first connection that brings `token`, or None if none does in time. Close the others."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while (left := end - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            connection, _ = listener.accept()
        except OSError:  # the time is over
            break
        with contextlib.suppress(OSError):
            # The peer sent its token long ago. A stranger that sends nothing must not use up the time.
            connection.settimeout(_PATIENCE_SECONDS / 10)
            if connection.recv(len(token), socket.MSG_WAITALL) == token:
                return connection
        connection.close()
    return None
