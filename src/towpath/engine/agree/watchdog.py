"""Detection of stalls: ranks report what they are doing, and notice when their transfers can never end.

A rank without progress posts its status in the `StatusStore`. Errors and warnings about a transfer quote the status of
its peers. Ranks also compare their collective logs there, to find out that they wait for different things.

On a GPU the host runs ahead, and a transfer that never ends blocks the device alone. So transfers that the device has
not finished count as waiting, too. If they can never end, the device's process groups are aborted. The training thread
then continues, and gets the error at its next transfer.
"""

from __future__ import annotations

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
from functools import partial
from operator import itemgetter
from typing import Any, final

import torch

from towpath.core.scopes import LoggedCall, Scope
from towpath.core.strategy import Strategy
from towpath.core.transfer import Transfer
from towpath.daemons import start_daemon
from towpath.engine.agree.digest import (
    CollectiveLog,
    StepLog,
    difference,
    divergence_message,
    has_not_made,
)
from towpath.errors import StepError
from towpath.logs import logger
from towpath.topology.groups import Groups, rendezvous_address
from towpath.topology.store import StatusStore

# On a CPU a transfer fails as soon as a peer's connection closes. On a GPU the host has gone on, and the device waits
# until NCCL's watchdog stops it. So each rank holds a connection to the next one, over which only a token is sent. The
# kernel closes it when that process ends, and its keepalive notices when that machine or the link to it fails. A rank
# without progress checks its own connection, and posts what it finds.


_LOG = logger("engine")

_PATIENCE_SECONDS = 5.0
# Keepalive: seconds of silence before the first probe, seconds between probes, and the number of probes.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


@final
class Neighbor:
    """A connection to the next rank, which shows when its process ends. Every rank must make one.

    After the last rank comes the first. `Watchdog` uses it on GPUs.
    """

    def __init__(self, groups: Groups) -> None:
        self.rank = (groups.rank + 1) % groups.world
        self._connection: socket.socket | None = None
        self._from_previous: socket.socket | None = None  # kept open, so that it closes with this process
        with socket.create_server(("", 0)) as listener:
            host, _, _ = rendezvous_address().rpartition(":")
            # Something else may be listening at an address, or connect to it. The token shows who is meant.
            token = uuid.uuid4().bytes
            here = _own_address(host), listener.getsockname()[1]
            peers: list[tuple[tuple[str, int], bytes]] = groups.gather_objects((here, token))
            try:
                self._connection = _introduced(*peers[self.rank])
            except OSError as error:
                self._leave_out(error)
            have_connected: list[bool] = groups.gather_objects(self._connection is not None)
            if have_connected[groups.rank - 1]:
                self._from_previous = _accepted(listener, token)
        have_accepted: list[bool] = groups.gather_objects(self._from_previous is not None)
        if self._connection is not None and not have_accepted[self.rank]:
            self._connection.close()
            self._connection = None
            self._leave_out("another process answered at its address")

    def _leave_out(self, reason: object) -> None:
        _LOG.info(
            "no connection to rank %d: this rank may notice late that its process has ended (%s)", self.rank, reason
        )

    @property
    def is_gone(self) -> bool:
        """Whether the connection to the next rank was closed. False if there never was one."""
        if self._connection is None:
            return False
        try:
            return self._connection.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def _own_address(other: str) -> str:
    """Return the address of this machine on the route to `other`."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        return probe.getsockname()[0]
    return socket.gethostname()


def _introduced(address: tuple[str, int], token: bytes) -> socket.socket:
    """Connect to `address`, and send `token`. The kernel watches the connection from then on."""
    connection = socket.create_connection(address, _PATIENCE_SECONDS)
    connection.sendall(token)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
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


# Seconds without progress before a rank posts its status, and before it logs what it waits for. Both are shorter if
# the process group's timeout is short.
_SILENT_SECONDS = 2.0
_WARN_SECONDS = 60.0

# The largest number of peers that a rank compares itself with, and that a message describes.
_FEW = 16

# The number of transfers, submitted to a device last, that are remembered.
_ENQUEUED = 256


def is_capturing() -> bool:
    """Return whether the current stream of this thread captures a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@final
class RankStatus:
    """The current activity of this rank, over all models of one process group.

    `Record` and `FailedPasses` update it. `Watchdog` reads it, and posts it to the other ranks. `progress` is a
    counter that rises whenever something begins or ends.
    """

    def __init__(self) -> None:
        self.progress = 0
        self.step = 0
        self._since = time.monotonic()  # the time of the last progress
        self._seen = 0
        self._computing = "outside the model"
        self._under_way: dict[int, str] = {}  # by thread: each thread of a queue runs one transfer at a time
        self._last = ""
        self.failure = ""  # the failed pass of this rank, if not all ranks have learned of it
        self._enqueued: deque[tuple[torch.cuda.Event, str]] = deque(maxlen=_ENQUEUED)  # on the device, in order
        # The training thread and the reporter both drop what has finished. Without the lock, one could drop an entry
        # between the other's look at the first entry and its removal.
        self._enqueued_lock = threading.RLock()
        self.inside = ""  # the collective that the program is in, among ranks that share parameters
        # The call in which this rank waits for all ranks, and how many such calls came before it.
        self.meeting: tuple[int, str] | None = None
        self.meetings = 0  # the number of such calls so far, including the current one

    def computes(self, work: str, unit: str | None) -> None:
        """Note what the training thread computes now. `unit`: its unit, if it is work of a unit."""
        self.progress += 1
        self._computing = work if unit is None else f"{work} of unit {unit or 'root'!r}"

    def begins(self, transfers: Sequence[Transfer]) -> None:
        """Note that the calling thread begins these transfers, which are one message."""
        self.progress += 1
        self._under_way[threading.get_ident()] = _named(transfers)

    def ends(self) -> None:
        """Note that the transfers that the calling thread has begun are over, successful or not."""
        self.progress += 1
        self._last = self._under_way.pop(threading.get_ident(), self._last)

    def enqueued(self, end: torch.cuda.Event, transfers: Sequence[Transfer]) -> None:
        """Note that the host has enqueued these transfers on the device. The event `end` follows them."""
        with self._enqueued_lock:
            self._drop_finished()
            self._enqueued.append((end, _named(transfers)))

    def _drop_finished(self) -> None:
        # A query while this thread captures a CUDA graph would end the capture in an error.
        if is_capturing():
            return
        while self._enqueued and self._enqueued[0][0].query():
            self._last = self._enqueued.popleft()[1]
            self.progress += 1

    def on_device(self) -> str:
        """Return the first enqueued transfer that the device has not finished; '' if there is none."""
        with self._enqueued_lock:
            self._drop_finished()
            return self._enqueued[0][1] if self._enqueued else ""

    @contextmanager
    def shared(self, call: str) -> Generator[None]:
        """Run a collective of the user's program, such as a norm, and note `call` meanwhile."""
        self.progress += 1
        before, self._computing, self.inside = self._computing, f"in {call}", call
        try:
            yield
        finally:
            self.progress += 1
            self._computing, self.inside = before, ""

    def failed(self, what: str) -> None:
        """Note the error `what` of a forward or backward pass. With '', note that all ranks have learned of it."""
        self.progress += 1
        self.failure = what

    def meets(self, what: str) -> None:
        """Note that this rank begins to wait for all ranks to make the call `what`."""
        self.progress += 1
        self.meeting = (self.meetings, what)
        self.meetings += 1

    def met(self) -> None:
        """Note that this rank no longer waits for all ranks to make a call."""
        self.progress += 1
        self.meeting = None

    @property
    def waits(self) -> bool:
        """Whether this rank or its device is in a transfer, or in a call that other ranks must make, too."""
        return bool(self._under_way or self.inside or self.on_device()) or self.meeting is not None

    def silent_seconds(self) -> float:
        """Return for how long nothing has begun or ended. Call it at regular intervals: it looks for progress."""
        now = time.monotonic()
        if self.progress != self._seen:
            self._since, self._seen = now, self.progress  # in this order: another thread may read them in between
        return now - self._since

    def describe(self) -> str:
        parts = [f"step {self.step}"]
        parts += [self.failure] if self.failure else [self._computing]
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
class Watchdog:
    """The exchange of status among the ranks of one process group, on one rank.

    All models over the process group share it. A background thread posts this rank's status when it makes no progress,
    and looks for the cause. If transfers can never end, `diverged` holds the error message.
    """

    def __init__(self, groups: Groups) -> None:
        self.rank, self.world, self._groups = groups.rank, groups.world, groups
        self.first, self.number = groups.first, groups.number  # errors name ranks by their numbers in the job
        self.activity = RankStatus()
        self.log: CollectiveLog | None = None  # of the model that made the last transfer or call
        self.warns = True  # whether this monitor logs that there is no progress
        self.diverged = ""  # the reason why transfers can never end, once it is known
        self._neighbor: Neighbor | None = None  # made by `watch_processes`
        self._islands: list[Watchdog] = []  # those of this rank's islands, if this one is of the whole job
        self.patience_seconds = groups.timeout_seconds
        # A launcher may keep its store over restarts. A new name hides what the ranks of an earlier start left there.
        new_name: str = groups.gather_objects(uuid.uuid4().hex)[0]
        self.status_store = StatusStore(f"{groups.name}/{new_name}", groups.rank, groups.world)
        if self.world > 1:
            stop = threading.Event()
            start_daemon("towpath-stall-reporter", partial(_report, weakref.ref(self), stop), stop.set)

    @staticmethod
    def of(groups: Groups) -> Watchdog:
        """Return the monitor of a process group, which is made at the first call."""
        return groups.shared("peers", lambda: Watchdog(groups))

    def describe(self, ranks: Sequence[int]) -> str:
        """Return the last status that each of `ranks` has posted, one line per rank."""
        others = [rank for rank in ranks if rank != self.rank]
        nothing = "has said nothing: it makes progress, or it is gone"
        lines = [
            f"\n  rank {self.first + rank}: {note.doing if note else nothing}"
            for rank, note in self._read(others[:_FEW]).items()
        ]
        return "".join(lines) + ("\n  …" if len(others) > _FEW else "")

    def oversee(self, island: Watchdog) -> None:
        """Report also what this rank does in its island. The island then learns which process of the job has ended."""
        self.activity = island.activity
        if island is not self and island not in self._islands:
            self._islands.append(island)
            island.warns = False  # this monitor warns, and describes the ranks of all islands

    def watch_processes(self) -> None:
        """Start to watch whether the next rank's process ends. Every rank of a GPU job must call it."""
        if self._neighbor is None and self.world > 1:
            self._neighbor = Neighbor(self._groups)

    def raise_if_diverged(self) -> None:
        """Raise StepError if the ranks are known to wait for transfers that can never end."""
        if self.diverged:
            raise StepError(
                f"{self.diverged} Transfers of this job are stuck, those of its other models, too: end it, and restart "
                "from a checkpoint."
            )

    @property
    def pause_seconds(self) -> float:
        """Seconds between two looks of the background thread."""
        return min(_SILENT_SECONDS, self.patience_seconds / 4) / 2

    def post(self, silent: bool) -> None:
        """Post this rank's status if it is `silent`, which means without progress, or if a call of it has failed.

        Else clear the posted status.
        """
        step_log = self._step_log()
        step_log_json = None if step_log is None else step_log.to_json()
        activity = self.activity
        note = [activity.describe(), step_log_json, activity.meeting, self.ended_peer(), activity.failure]
        self.status_store.post(json.dumps(note) if silent or activity.failure else "")

    def tell(self, failure: str) -> None:
        """Post the error of a call that only this rank may have made. Peers that wait for this rank quote it."""
        self.activity.failed(failure)
        if self.world > 1:
            self.post(silent=True)

    def _step_log(self) -> StepLog | None:
        return None if self.log is None else replace(self.log.step_log(), inside=self.activity.inside)

    def describe_ranks(self, others: Sequence[int]) -> str:
        """Return this rank's status, and the last status that `others` have posted."""
        said = self.describe(others)
        return f"This rank: {self.activity.describe()}. What its peers last said of themselves:{said}"

    def meet(self, call: str) -> None:
        """Return once every rank has made this call."""
        if self.world == 1:
            return
        self.activity.meets(call)
        event, patience = f"call {self.activity.meetings}", self.patience_seconds
        try:
            came = self.status_store.exchange(event, call, patience, self.raise_if_diverged)
        finally:
            self.activity.met()
        other = next((rank for rank, theirs in came.items() if theirs != call), None)
        if other is not None:
            raise StepError(
                f"rank {self.number}: this rank called {call}, and rank {self.first + other} {came[other]} meanwhile. "
                "Let every rank make the same calls in the same order."
            )
        missing = [rank for rank in range(self.world) if rank not in came]
        if missing:
            ranks = ", ".join(str(self.first + rank) for rank in missing)
            raise StepError(
                f"rank {self.number}: every rank must call {call}; rank {ranks} did not in "
                f"{patience:.0f} s. What they last said of themselves:{self.describe(missing)}"
            )

    def look_for_divergence(self) -> None:
        """Set `diverged` if a peer without progress has noted other transfers or calls than this rank."""
        log, mine, meeting = self.log, self._step_log(), self.activity.meeting
        if log is None or mine is None:
            return
        calls = [
            scope for scope in log.scopes if scope.kinds & {LoggedCall.PROGRAM, LoggedCall.SHARED} and not scope.lane
        ]
        for scope in log.scopes:
            members = scope.members(scope.group_of[self.rank])
            place = members.index(self.rank)
            for rank, note in self._read([*members[place + 1 :], *members[:place]][:_FEW]).items():
                if note is None or note.step_log is None:
                    continue
                both = [each for each in calls if each.group_of[self.rank] == each.group_of[rank]]
                # A rank that waits for all ranks in a call submits nothing before they come. Its log counts as ended.
                their = note.meeting if note.meeting is not None and note.meeting[0] >= self.activity.meetings else None
                here = meeting[1] if meeting is not None else _alone_in(mine, note.step_log, both)
                there = their[1] if their is not None else _alone_in(note.step_log, mine, both)
                peer = self.first + rank
                # Nor does a rank whose pass has failed, before all ranks have failed, too.
                step_logs = [(self.number, _ended(mine, here)), (peer, _ended(note.step_log, there or note.failure))]
                first, second = sorted(step_logs, key=itemgetter(0))
                found = difference(scope, first, second)
                if found is not None and (self._step_log(), self.activity.meeting) == (mine, meeting):
                    # If only one rank has stepped an optimizer, that explains why their transfers differ.
                    cause = difference(log.scopes[0], first, second, ended=True)
                    is_a_step = (
                        cause is not None and LoggedCall.STEP in cause.kinds and LoggedCall.SHARED not in found.kinds
                    )
                    self.diverged = divergence_message(self.number, cause if cause is not None and is_a_step else found)
                    if note.failure:
                        self.diverged = (
                            f"rank {self.number}: a pass has failed on rank {peer} and not on this rank, which waits "
                            f"for rank {peer}: {found}. What it said of itself: rank {peer}: {note.doing}. A pass that "
                            "fails on some ranks cannot be left out: let the exception end the program, or raise it on "
                            "every rank."
                        )
                    for who, other, call in ((self.number, peer, here), (peer, self.number, there)):
                        if call:
                            self.diverged = (
                                f"rank {self.number}: rank {who} is in {call}, which every rank must call, while rank "
                                f"{other} waits for a transfer that rank {who} is to take part in: {found}. Call it on "
                                "every rank, at the same place."
                            )
                    return

    def look_for_lost_peers(self) -> None:
        """Set `diverged` if this rank, or a peer without progress, has noticed that some rank's process has ended."""
        lost = self.ended_peer()
        if lost is None and self._neighbor is not None:
            everyone = [*range(self.rank + 1, self.world), *range(self.rank)]
            notes = self._read(everyone[:_FEW]).values()
            lost = next((note.lost for note in notes if note is not None and note.lost is not None), None)
        if lost is not None:
            peer = self.first + lost
            self.diverged = (
                f"rank {self.number}: the process of rank {peer} has ended, and this rank waits for it: "
                f"{self.activity.describe()}. See what rank {peer} printed, then restart from the last checkpoint."
            )
            for island in self._islands:
                island.diverged = island.diverged or self.diverged

    def ended_peer(self) -> int | None:
        """Return the number of the next rank if its process has ended, else None."""
        return self._neighbor.rank if self._neighbor is not None and self._neighbor.is_gone else None

    def release_device(self) -> None:
        """Abort the device's process groups if it is in a transfer, so that the training thread can continue."""
        if self.activity.on_device():
            _LOG.error(self.diverged)
            self._groups.abort(*(island._groups for island in self._islands))

    def _read(self, ranks: Sequence[int]) -> dict[int, _Note | None]:
        notes = self.status_store.read(ranks)
        return {rank: _Note.parsed(note) if note else None for rank, note in notes.items()}


@dataclass(frozen=True, slots=True)
class _Note:
    """The status that a rank has posted: what it does, its log, the call it waits in, and a rank that it found dead.

    `failure` is the pass of it that has failed, if not all ranks have learned of that.
    """

    doing: str
    step_log: StepLog | None
    meeting: tuple[int, str] | None
    lost: int | None
    failure: str

    @staticmethod
    def parsed(text: str) -> _Note:
        doing, step_log, meeting, lost, failure = json.loads(text)
        met = None if meeting is None else tuple(meeting)
        return _Note(doing, None if step_log is None else StepLog.from_json(step_log), met, lost, failure)


def _alone_in(step_log: StepLog, other: StepLog, scopes: Sequence[Scope]) -> str:
    """Return the call that the step log's rank is in, if the other rank has not made it yet."""
    return step_log.inside if any(has_not_made(step_log, other, scope) for scope in scopes) else ""


def _ended(step_log: StepLog, call: str) -> StepLog:
    return replace(step_log, ended=True) if call else step_log


def _report(reference: weakref.ref[Watchdog], stop: threading.Event) -> None:
    """Run the background thread: post the status of a rank without progress, and look for the cause."""
    posted, warned = None, -1  # the progress counter at the last post (and a lost peer), and at the last warning
    peers = reference()
    while peers is not None:
        pause, activity = peers.pause_seconds, peers.activity
        silent, progress = activity.silent_seconds(), activity.progress
        if peers.diverged:
            pass  # the posted status stays, so that the others can find the difference, too
        elif silent >= 2 * pause:
            if posted != (progress, lost := peers.ended_peer()):
                peers.post(silent=True)
                posted = progress, lost
            if activity.waits:
                peers.look_for_divergence()
                if not peers.diverged:
                    peers.look_for_lost_peers()
                if peers.diverged:
                    peers.release_device()
        elif posted is not None:
            peers.post(silent=False)
            posted = None
        # Whether the rank waits is the last question, because it queries events of the device. Another thread may be
        # capturing a CUDA graph, and CUDA's default mode of capture forbids queries of all threads.
        is_long = silent >= min(_WARN_SECONDS, peers.patience_seconds / 2)
        if peers.warns and is_long and warned != progress and activity.waits:
            warned = progress
            _LOG.warning(
                "no progress for %.0f s: %s. This rank gives up after %.0f s. Other ranks:%s",
                *(silent, activity.describe(), peers.patience_seconds, peers.describe(range(peers.world))),
            )
        peers = None
        if stop.wait(pause):
            return
        peers = reference()


# Suppose that one rank catches the exception and goes on, and its peers do not. The transfers of its next pass would
# meet those that the peers still wait for. So after a failed pass a rank first waits until all others have failed, too.


@final
class EndOfBackward:
    """A callback that autograd calls at the end of a backward pass.

    If the pass fails, autograd drops the callback without a call. Its destructor then reports the failure.
    """

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
    """The failed passes of one model on one rank. Every rank must make its models in the same order.

    The engine notes failures here, and calls `agree` before the next pass.
    """

    def __init__(self, groups: Groups, peers: Watchdog, strategy: Strategy, log: CollectiveLog) -> None:
        self._groups, self._peers, self._log = groups, peers, log
        self._forward_is_shared = strategy.gathered_over.size > 1
        self._agreements = 0
        self._failure = ""

    def forward_failed(self, what: str) -> None:
        """Note a failed forward, if forwards involve other ranks: they gather parameters."""
        if self._forward_is_shared:
            self.failed(what)

    def failed(self, what: str) -> None:
        """Note a failed pass. Of several failures the first is kept."""
        if self._groups.world > 1:
            self._failure = self._failure or what
            self._peers.activity.failed(f"{self._failure}, and was caught")

    def agree(self) -> None:
        """Return once all ranks have failed like this one, if it has. The engine calls it before the next pass."""
        if not self._failure:
            return
        failure, self._failure = self._failure, ""
        event = f"failed pass {self._agreements} of model {self._log.model}"
        self._agreements += 1
        mine = self._log.encoded().hex()
        came = self._peers.status_store.exchange(event, mine, self._peers.patience_seconds)
        self._peers.activity.failed("")
        missing = [rank for rank in range(self._groups.world) if rank not in came]
        if missing:
            ranks = ", ".join(str(self._groups.first + rank) for rank in missing)
            raise StepError(
                f"rank {self._groups.number}: {failure}, which was caught here; rank {ranks} did not fail, and waits "
                "for the transfers of that pass. A pass that fails on some ranks cannot be left out: let the exception "
                "end the program, or see to it that it is raised on every rank. What they last said of themselves:"
                f"{self._peers.describe(missing)}"
            )
        everyones = [bytes.fromhex(came[rank]) for rank in range(self._groups.world)]
        self._log.check(bytes(map(max, zip(*everyones, strict=True))), self._groups.gather_objects)
