"""The queues of one model: in which order transfers go, in which wire buffers, and under which tags; and what runs them
on a CPU, threads. On a GPU it is CUDA streams (`cuda_stream.py`), and a thread for what the ranks compare.

All models that are sharded over one process group share its streams, and with them the threads, and the connections of
the process groups: both stay as they are however many models are made one after the other. That the transfers of
several models keep one order on all ranks follows from sharing, too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import final

import torch

from towpath.collectives.bound_transfer import (
    BoundMatrices,
    CoalescedAllGather,
    CoalescedTransfers,
    RankTransfer,
    has_group_between_nodes,
    select,
)
from towpath.collectives.collective import Binding, GroupRank, WireBuffers, Workspace
from towpath.collectives.owners import OwnersExchange
from towpath.core.journal import CollectiveLog
from towpath.core.schedule import QUEUES, WAYS
from towpath.core.strategy import WIRED, Kind
from towpath.core.transfer import Needs, Transfer
from towpath.core.unit_plan import UnitPlan, largest
from towpath.engine.checks.activity import StallMonitor
from towpath.engine.checks.program import Program
from towpath.engine.streams.record import Record, Waits, profiled
from towpath.engine.streams.streams import CudaStream, Handle, Job, Stream, Waiting, Work, timer_for
from towpath.topology.groups import Groups

# How often somebody who waits for a job looks whether it still can end.
_LOOK_SECONDS = 1.0


class Queues:
    """Every rank must submit the same transfers in the same order."""

    def __init__(self, streams: Streams, device: torch.device, record: Record, journal: CollectiveLog) -> None:
        self._streams, self._device, self._record, self._journal = streams, device, record, journal
        self.micro_step = 0
        self._buffers: dict[str, list[WireBuffers]] = {}  # by queue and way
        self._sizes: dict[str, Needs] = {}  # of these
        self._needs: dict[Kind, Needs] = {}  # of wire buffers, until there is room for them
        self._made_before = 0  # buffers that others have taken the place of

    def plan(self, plans: Iterable[UnitPlan]) -> None:
        """Transfers are those of `plans` from now on, and wire buffers as large as the largest of them needs."""
        plans = tuple(plans)
        self._needs = {kind: largest(plan.wire_needs(kind) for plan in plans) for kind in WIRED}
        self._made_before = self.buffers_made
        self._buffers.clear()
        self._sizes.clear()

    def submit(
        self,
        kind: Kind,
        transfers: Sequence[RankTransfer] | Sequence[BoundMatrices],
        works: Sequence[Work],
        after: Sequence[Handle] = (),
        begin: Work | None = None,
    ) -> Handle:
        """Do `works` one after the other, which execute `transfers`.

        `begin`: the first part of the first, for when the transfer before needs the links no more.
        """
        self._record.peers.raise_if_diverged()
        submitted = [bound.transfer for bound in transfers]
        self._record.submitted(submitted, self.micro_step)
        if submitted:
            self._journal.note(kind, submitted[0].unit)
            self._record.peers.journal = self._journal
        stream = self._streams[QUEUES[kind]]
        job = Job(self._workspace(kind, stream), works, begin)
        with profiled("submit ", submitted):
            return stream.submit(job, after, Waits(self._record, submitted))

    def _workspace(self, kind: Kind, stream: Stream) -> Workspace:
        way, trace = stream.next_way(), self._record.trace
        return Workspace(
            self._buffers_for(kind, stream)[way],
            way,
            stream.ways,
            self.micro_step,
            None if trace is None else trace.watch_codecs(self.micro_step),
        )

    def _buffers_for(self, kind: Kind, stream: Stream) -> list[WireBuffers]:
        """Made by the thread that submits: what a job allocates, another stream could be given too early.

        Where a kind needs larger ones, others take their place: a transfer under way keeps those that it began in.
        """
        name = QUEUES[kind]
        size = largest([self._sizes.get(name, {}), self._needs.pop(kind, {})])
        if name not in self._buffers or size != self._sizes[name]:
            made = sum(b.made for b in self._buffers.get(name, ()))
            self._buffers[name] = [WireBuffers(self._device, partial(stream.uses, way)) for way in range(stream.ways)]
            self._sizes[name], self._made_before = size, self._made_before + made
            for buffers in self._buffers[name]:
                buffers.reserve(size)
        return self._buffers[name]

    def finish(self) -> None:
        """Return once the results of all that was submitted may be used."""
        self._streams.finish()

    @property
    def wire_bytes(self) -> int:
        return sum(b.nbytes for each in self._buffers.values() for b in each)

    @property
    def buffers_made(self) -> int:
        return self._made_before + sum(b.made for each in self._buffers.values() for b in each)


def make_stream(name: str, device: torch.device, ways: int) -> Stream:
    """Make what runs a queue. What ranks compare lies in the host's memory, and travels on a thread everywhere: so the
    thread that trains can look, while it waits, whether its peers will ever come."""
    on_device = device.type == "cuda" and name != QUEUES[Kind.USAGE]
    return CudaStream(device, ways) if on_device else ThreadStream(name, ways)


@final
class Streams:
    """Of one process group on this rank, by the names of queues."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, Stream] = {}

    @staticmethod
    def of(groups: Groups, device: torch.device) -> Streams:
        def make() -> Streams:
            streams = Streams(device)
            atexit.register(leave, weakref.ref(streams), StallMonitor.of(groups))
            return streams

        return groups.shared(f"streams on {device}", make)

    def __getitem__(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = make_stream(name, self._device, WAYS[name])
        return self._streams[name]

    def finish(self) -> None:
        """Return once the results of all that was submitted may be used, however it ended."""
        for stream in self._streams.values():
            stream.finish()


def leave(streams: weakref.ref[Streams], peers: StallMonitor) -> None:
    """At the program's end: wait for what is under way, as its threads cannot be ended. But what waits for a peer that
    ran other units never ends, and would hold up the program for as long as the process group's patience lasts."""
    if peers.diverged:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    left = streams()
    if left is not None:
        with contextlib.suppress(Exception):
            left.finish()


@final
class ThreadStream(Stream):
    """As many threads as ways, which take jobs in turn: what a job has to `begin` may overlap with the one before it,
    all else comes after that. gloo's collectives block; PyTorch computes meanwhile, without the interpreter lock."""

    def __init__(self, name: str, ways: int) -> None:
        super().__init__(ways)
        self._jobs: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        for number in range(ways):
            # Daemons: where a peer never answers, the program ends all the same (`leave`).
            threading.Thread(target=_work, args=(self._jobs,), name=f"towpath-{name}_{number}", daemon=True).start()
        self._lock = threading.Lock()
        self._last = _Progress()
        self._last.end()

    def submit(self, job: Job, after: Sequence[Handle] = (), waiting: Waiting | None = None) -> Handle:
        with self._lock:  # the threads take jobs in the order in which they were submitted
            before, self._last = self._last, _Progress()
            job.workspace.links_free = self._last.links_free.open
            future: Future[None] = Future()
            self._jobs.put((future, partial(_do, job, tuple(map(_thread_handle, after)), before, self._last)))
            return _ThreadHandle(future, after, waiting)

    def finish(self) -> None:
        self._last.ended.wait()

    def uses(self, way: int, buffer: torch.Tensor) -> None:
        """Whoever uses memory holds it."""

    def close(self) -> None:
        for _ in range(self.ways):
            self._jobs.put(None)

    def __del__(self) -> None:
        self.close()


def _work(jobs: SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
    """What each of a stream's threads does: it takes jobs in the order in which they were submitted."""
    while True:
        job = jobs.get()
        if job is None:
            return
        future, work = job
        try:
            work()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)
        del job, future, work  # a job holds its model


def _do(job: Job, after: Sequence[_ThreadHandle], before: _Progress, mine: _Progress) -> None:
    try:
        with torch.no_grad():
            for handle in after:
                handle.join()
            if job.begin is not None:
                before.links_free.wait()
                job.begin(job.workspace)
            before.ended.wait()
            for work in job.works:
                work(job.workspace)
    finally:
        before.ended.wait()  # where it failed early: what comes behind it comes behind that one, too
        mine.end()


class _Progress:
    """Of a job: what the one behind it waits for."""

    __slots__ = ("ended", "links_free")

    def __init__(self) -> None:
        self.links_free, self.ended = _Latch(), _Latch()

    def end(self) -> None:
        self.links_free.open()
        self.ended.open()


class _Latch:
    """Shut until it is opened, once and for all. A `threading.Event` takes several times as long to make."""

    __slots__ = ("_is_open", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_open = False

    def open(self) -> None:
        """By one thread at a time."""
        if not self._is_open:
            self._is_open = True
            self._lock.release()

    def wait(self) -> None:
        if not self._is_open:
            with self._lock:
                pass


def _thread_handle(handle: Handle) -> _ThreadHandle:
    assert isinstance(handle, _ThreadHandle)
    return handle


@final
class _ThreadHandle(Handle):
    def __init__(self, future: Future[None], after: Sequence[Handle], waiting: Waiting | None) -> None:
        self._future = future
        self._after = after
        self._waiting = waiting

    def join(self) -> None:
        """Wait on a stream: no computation is held up by it."""
        self._future.result()

    def wait(self, on_host: bool = False) -> None:
        after, self._after = self._after, ()  # let go: the jobs of a unit would else be linked for ever
        if self._waiting is None:
            self._future.result()
            return
        with self._waiting.profiled():
            if self._future.done():
                self._future.result()
                return
            for handle in after:  # first, so that each transfer is charged with the waiting for itself
                handle.wait()
            began = self._waiting.mark()
            try:
                while not self._ended():
                    self._waiting.still_waits()
            finally:
                self._waiting.waited(began, self._waiting.mark())

    def _ended(self) -> bool:
        """Whether it has ended by now, or within a second."""
        try:
            self._future.result(_LOOK_SECONDS)
        except TimeoutError:
            if self._future.done():  # its own
                raise
        return self._future.done()


# --- wiring -----------------------------------------------------------------------------------------------------------
#
# From the transfers of a plan to the collectives and process groups that execute them on this rank.


class CommContext:
    """Of one model. Every rank must bind the same transfers in the same order (that makes process groups)."""

    def __init__(self, groups: Groups, device: torch.device, journal: CollectiveLog) -> None:
        self.rank = groups.rank
        self.device = device
        self.groups = groups
        self.journal = journal
        self.record = Record(StallMonitor.of(groups), timer_for(device))
        if device.type == "cuda":
            self.record.peers.watch_processes()
        self.program = Program(journal, self.record.peers)
        self.queues = Queues(Streams.of(groups, device), device, self.record, journal)
        self._backend = groups.backend(device)

    def bind(self, transfers: Iterable[Transfer]) -> list[RankTransfer]:
        return [self._bind(t) for t in transfers]

    def _bind(self, transfer: Transfer) -> RankTransfer:
        members = self._members(transfer)
        collective = select(transfer, members, self._backend, self.device)
        return RankTransfer(transfer, Binding.of(transfer), members, collective, self.record)

    def bind_matrices(self, transfer: Transfer) -> BoundMatrices:
        members = self._members(transfer)
        return BoundMatrices(transfer, members, OwnersExchange(transfer, members, self.device), self.record)

    def _members(self, transfer: Transfer) -> GroupRank:
        queue = QUEUES[transfer.kind]
        group = transfer.move.group_of(self.rank)
        partition = tuple(g.ranks for g in transfer.move.groups)
        nodes = tuple(map(transfer.topology.node_of, group.ranks))
        if transfer.kind is Kind.USAGE:
            within = between = self.groups.control_on_host()
        else:
            within = between = self.groups.of(partition, queue)
        if has_group_between_nodes(transfer.route, self._backend):
            between = self.groups.of(partition, f"{queue} between nodes")
        return GroupRank(within, between, group, group.ranks.index(self.rank), nodes)

    def coalesce(self, gathers: Sequence[RankTransfer]) -> CoalescedTransfers:
        """Gathers that have the same members, in one message."""
        bindings = [Binding.of(bound.transfer) for bound in gathers]
        collective = CoalescedAllGather(bindings, gathers[0].members, self._backend, self.device)
        return CoalescedTransfers(gathers, collective)
