"""The queues of transfers of one model, the threads that run them on a CPU, and the process groups they use.

On a GPU, CUDA streams run the transfers (`streams.py`), and a thread runs what the ranks compare.

All models that are sharded over one process group share its streams. So they share the threads and the connections of
the process groups, and their number does not grow with the number of models. Sharing also gives the transfers of
several models the same order on all ranks.
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
from functools import cache, partial
from queue import SimpleQueue
from typing import cast, final

import torch
import torch.distributed as dist

from towpath.collectives.collective import GroupRank, WireBuffers, Workspace
from towpath.collectives.owners import OwnersExchange
from towpath.collectives.rank_transfer import (
    CoalescedAllGather,
    CoalescedReduceScatter,
    CoalescedTransfers,
    RankMatrices,
    RankTransfer,
    form_for,
    group_rank,
    select,
)
from towpath.core.queues import MAX_IN_FLIGHT, QUEUES, Lanes, shared_lanes
from towpath.core.routes import WITH_OWNERS
from towpath.core.strategy import BETWEEN_HOSTS, OUTER_KINDS, WITH_TRANSPORT, Strategy, TransferKind
from towpath.core.transfer import Needs, Ranks, Transfer
from towpath.core.unit_plan import UnitPlan, largest
from towpath.engine.agree.digest import CollectiveLog
from towpath.engine.agree.program import Program
from towpath.engine.agree.watchdog import Watchdog
from towpath.engine.streams.record import Record, TransferWait, profiled
from towpath.engine.streams.streams import CudaStream, Handle, Job, Stream, Work, timer_for
from towpath.logs import logger
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups

_LOG = logger("engine")

# How often a thread that waits for a job checks whether the job can still end.
_LOOK_SECONDS = 1.0

# The priorities of the queues' CUDA streams. The computation (0) waits for most transfers soon, so these go first (-1).
# Nothing waits for the sync of gradients before the boundary, or for an exchange between islands before it is applied.
_LAST = (QUEUES[TransferKind.GRAD_SYNC], QUEUES[TransferKind.OUTER])
PRIORITIES = {queue: 0 if queue in _LAST else -1 for queue in QUEUES.values()}


class Queues:
    """The queues of transfers of one model on one rank. Every rank must submit the same transfers in the same order.

    It holds the wire buffers of each queue. Units submit their transfers here, and get a handle to wait for them.
    """

    def __init__(self, streams: Streams, device: torch.device, record: Record, log: CollectiveLog) -> None:
        self._streams, self._device, self._record, self._log = streams, device, record, log
        self.micro_step = 0
        self._buffers: dict[str, list[WireBuffers]] = {}  # by queue and buffer index
        self._sizes: dict[str, Needs] = {}  # the sizes of these buffers, by queue
        self._needs: dict[TransferKind, Needs] = {}  # sizes that the plans need, for kinds not submitted so far
        self.always: dict[TransferKind, Needs] = {}  # sizes for kinds that are in no plan of a unit
        self._made_before = 0  # the number of buffers made before, which were replaced since

    def plan(self, plans: Iterable[UnitPlan]) -> None:
        """Use the transfers of `plans` from now on, with wire buffers as large as the largest of them needs."""
        plans = tuple(plans)
        self._needs = {kind: largest(plan.wire_needs(kind) for plan in plans) for kind in WITH_TRANSPORT} | self.always
        self._made_before = self.buffers_made
        self._buffers.clear()
        self._sizes.clear()

    def submit(
        self,
        kind: TransferKind,
        transfers: Sequence[RankTransfer] | Sequence[RankMatrices],
        works: Sequence[Work],
        after: Sequence[Handle] = (),
        begin: Work | None = None,
    ) -> Handle:
        """Submit a job to the queue of `kind`.

        Args:
            begin: The first part of the first transfer. It may run as soon as the job before has released the links.
        """
        self._record.watchdog.raise_if_diverged()
        submitted = [bound.transfer for bound in transfers]
        self._record.submitted(submitted, self.micro_step)
        if submitted:
            self._log.note(kind, submitted[0].unit)
            self._record.watchdog.log = self._log
        stream = self._streams[QUEUES[kind]]
        index, trace = stream.next_buffer_index(), self._record.trace
        watch = None if trace is None else trace.watch_codecs(self.micro_step)
        buffers = self._buffers_for(kind, stream)[index]
        job = Job(Workspace(buffers, index, stream.depth, self.micro_step, watch), works, begin)
        with profiled("submit ", submitted):
            return stream.submit(job, after, TransferWait(self._record, submitted))

    def _buffers_for(self, kind: TransferKind, stream: Stream) -> list[WireBuffers]:
        """Return the wire buffers of the queue, by their index. Make larger ones first if `kind` needs them."""
        # The submitting thread makes the buffers. If a job allocated memory on its own CUDA stream, the allocator could
        # give it to another stream too early.
        #
        # Larger buffers replace the old ones. A transfer that has begun keeps the buffers that it began with.
        name = QUEUES[kind]
        size = largest([self._sizes.get(name, {}), self._needs.pop(kind, {})])
        if name not in self._buffers or size != self._sizes[name]:
            made = sum(b.made for b in self._buffers.get(name, ()))
            self._buffers[name] = [
                WireBuffers(self._device, partial(stream.uses, buffer_index)) for buffer_index in range(stream.depth)
            ]
            self._sizes[name], self._made_before = size, self._made_before + made
            for buffers in self._buffers[name]:
                buffers.reserve(size)
        return self._buffers[name]

    def finish(self) -> None:
        """Return once the caller may use the results of all submitted jobs."""
        self._streams.finish()

    @property
    def wire_buffer_bytes(self) -> int:
        return sum(b.nbytes for each in self._buffers.values() for b in each)

    @property
    def buffers_made(self) -> int:
        """Number of wire buffers made so far, including replaced ones."""
        return self._made_before + sum(b.made for each in self._buffers.values() for b in each)


def make_stream(name: str, device: torch.device, depth: int) -> Stream:
    """Return a new stream that runs the queue `name`, with `depth` jobs at a time."""
    # What ranks compare is in the host's memory, and a thread sends it on GPUs, too. So the training thread can check,
    # while it waits, whether its peers can still come.
    on_device = device.type == "cuda" and name not in {QUEUES[kind] for kind in BETWEEN_HOSTS}
    if not on_device:
        return ThreadStream(name, depth)
    _warn_of_one_connection()
    return CudaStream(device, depth, PRIORITIES[name])


@cache
def _warn_of_one_connection() -> None:
    """Warn once per process if the streams of a GPU share one hardware queue."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        _LOG.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, so transfers queue behind the computation and cannot overlap with it. "
            "Unset it, or set it to 32, before the program uses CUDA."
        )


@final
class Streams:
    """The streams of one process group on this rank, by the names of their queues. All models share them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, Stream] = {}

    @staticmethod
    def of(groups: Groups, device: torch.device) -> Streams:
        """Return the streams of a process group, which are made at the first call."""

        def make() -> Streams:
            streams = Streams(device)
            atexit.register(leave, weakref.ref(streams), Watchdog.of(groups))
            return streams

        return groups.shared(f"streams on {device}", make)

    def __getitem__(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = make_stream(name, self._device, MAX_IN_FLIGHT[name])
        return self._streams[name]

    def finish(self) -> None:
        """Return once the caller may use the results of all jobs. Do not raise if a job failed."""
        for stream in self._streams.values():
            stream.finish()


def leave(streams: weakref.ref[Streams], peers: Watchdog) -> None:
    """Wait at the program's end for jobs that are under way, because their threads cannot be stopped.

    If the ranks have diverged, such a job can never end. It would block the program until the process group's timeout.
    So the process then exits at once, with status 1.
    """
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
    """A stream on the CPU: one thread per job that may be under way, and the threads take jobs in turn.

    The `begin` of a job may overlap with the job before it. The rest of the job runs after that one. gloo's collectives
    block these threads, while PyTorch computes on the training thread without the interpreter lock.
    """

    def __init__(self, name: str, depth: int) -> None:
        super().__init__(depth)
        self._jobs: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        for number in range(depth):
            # Daemon threads, so that the program can end even if a peer never answers (`leave`).
            threading.Thread(target=_work, args=(self._jobs,), name=f"towpath-{name}_{number}", daemon=True).start()
        self._lock = threading.Lock()
        self._last = _Progress()
        self._last.end()

    def submit(self, job: Job, after: Sequence[Handle] = (), waiting: TransferWait | None = None) -> Handle:
        with self._lock:  # each job follows the one that was queued before it
            before, self._last = self._last, _Progress()
            job.workspace.links_free = self._last.links_free.open
            future: Future[None] = Future()
            self._jobs.put((future, partial(_run, job, cast(Sequence[_ThreadHandle], after), before, self._last)))
            return _ThreadHandle(future, after, waiting)

    def finish(self) -> None:
        """Wait until the last job has ended, successful or not."""
        self._last.ended.wait()

    def uses(self, buffer_index: int, buffer: torch.Tensor) -> None:
        """Do nothing: Python references keep the buffer alive while jobs use it."""

    def close(self) -> None:
        """Let the threads end after the jobs that were submitted."""
        for _ in range(self.depth):
            self._jobs.put(None)

    def __del__(self) -> None:
        self.close()


def _work(jobs: SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
    """Run the jobs of a stream on one of its threads. Jobs start in the order in which they were submitted."""
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
        del job, future, work  # a job would keep its model alive while this thread waits


def _run(job: Job, after: Sequence[_ThreadHandle], before: _Progress, mine: _Progress) -> None:
    """Run one job on a thread of its stream. `before`: the progress of the preceding job. `mine`: that of this job."""
    # A collective opens `links_free` once it has posted its last messages between nodes. The next job may then `begin`
    # on its own thread, while this one still works inside the node. The rest of the next job waits for `ended`.
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
        before.ended.wait()  # also after an early failure: later jobs must not overtake the job before this one
        mine.end()


class _Progress:
    """The events of a job that the next job waits for: the links are free, and the job has ended."""

    __slots__ = ("ended", "links_free")

    def __init__(self) -> None:
        self.links_free, self.ended = _Latch(), _Latch()

    def end(self) -> None:
        """Note that the job has ended, which also frees the links."""
        self.links_free.open()
        self.ended.open()


class _Latch:
    """A barrier that is opened once and stays open. A `threading.Event` takes several times as long to create."""

    __slots__ = ("_is_open", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_open = False

    def open(self) -> None:
        """Let waiting threads pass. Only one thread at a time may call it."""
        if not self._is_open:
            self._is_open = True
            self._lock.release()

    def wait(self) -> None:
        if not self._is_open:
            with self._lock:
                pass


@final
class _ThreadHandle(Handle):
    """The handle of a job on a `ThreadStream`."""

    def __init__(self, future: Future[None], after: Sequence[Handle], waiting: TransferWait | None) -> None:
        self._future = future
        self._after = after
        self._waiting = waiting

    def join(self) -> None:
        """Wait from another stream's thread. It is not recorded, because the computation does not wait."""
        self._future.result()

    def wait(self, on_host: bool = False) -> None:
        """Wait on the training thread for the job and the jobs before it, and record the time."""
        after, self._after = self._after, ()  # dropped, because handles would else link all jobs of a unit
        if self._waiting is None:
            self._future.result()
            return
        with self._waiting.profiled():
            if self._future.done():
                self._future.result()
                return
            for handle in after:  # first, so that each transfer is charged for its own wait only
                handle.wait()
            began = self._waiting.mark()
            try:
                while not self._ended():
                    self._waiting.raise_if_stuck()
            finally:
                self._waiting.waited(began, self._waiting.mark())

    def _ended(self) -> bool:
        """Return whether the job has ended, after a wait of at most a second. Raise if it failed."""
        try:
            self._future.result(_LOOK_SECONDS)
        except TimeoutError:
            if self._future.done():  # the job itself raised the TimeoutError
                raise
        return self._future.done()


# How many thread blocks a kernel of NCCL may use in a group that crosses nodes, or that exchanges all-to-all inside a
# node. More blocks keep no link between nodes busier, and take processors of the device away from the computation. For
# all-to-alls inside a node, each block also takes memory for each peer.
MAX_CTAS = 16


def shares_groups(backend: str) -> bool:
    """Return whether queues share the process groups of their lane.

    The threads of gloo's queues need groups of their own. Their messages overlap, and groups cost little.
    """
    return backend != "gloo"


class CommContext:
    """The communication of one model on one rank: its process groups, queues, record and logs.

    `build` makes it, and units and buckets turn their transfers into `RankTransfer`s with it. Every rank must bind the
    same transfers in the same order, because binding creates process groups.

    `groups` are those of the ranks that train together. `job` are those of all islands. Without islands, both are one.
    `rank` is this rank as `groups` count, and `number` as the job counts, which errors name.
    """

    def __init__(self, groups: Groups, device: torch.device, log: CollectiveLog, job: Groups | None = None) -> None:
        self.rank, self.number = groups.rank, groups.number
        self.device = device
        self.groups, self.job = groups, job or groups
        self.log = log
        self._backend = groups.backend(device)
        self.watchdog = Watchdog.of(groups)
        self.record = Record(self.watchdog, timer_for(device), self.job.world // groups.world)
        self._everyone = Watchdog.of(self.job)
        self._everyone.oversee(self.watchdog)
        if device.type == "cuda":
            self._everyone.watch_processes()
        self.program = Program(log, self.watchdog)
        self.queues = Queues(Streams.of(groups, device), device, self.record, log)
        self.form = form_for(self._backend)
        self._lanes = Lanes()

    def share(self, strategy: Strategy, plans: Iterable[UnitPlan]) -> None:
        """Share process groups as the transfers of `plans` need it. Call it before anything is bound."""
        plans = tuple(plans)
        self._lanes = Lanes.of(plans)
        self.log.share(shared_lanes(strategy, plans))

    def bind(self, transfers: Iterable[Transfer]) -> list[RankTransfer]:
        """Return for each transfer the collective that executes it on this rank."""
        bound: list[RankTransfer] = []
        for transfer in transfers:
            members = self._members(transfer)
            collective = select(transfer, members, self.device)
            # Errors of transfers between islands name ranks of the whole job.
            peers = self._everyone if transfer.kind in OUTER_KINDS else self.watchdog
            bound.append(RankTransfer(transfer, members, collective, self.record, peers.describe_ranks))
        return bound

    def tell(self, failure: str) -> None:
        """Post the error of an exchange between islands. Ranks of all islands that wait for this rank quote it."""
        if self.watchdog.status.failure:  # the first failure is the cause of others
            return
        for monitor in {self.watchdog, self._everyone}:
            monitor.tell(failure)

    def bind_matrices(self, transfer: Transfer) -> RankMatrices:
        """Return the exchange that executes a transfer of matrices between holders and owners on this rank."""
        members = self._members(transfer)
        exchange = OwnersExchange(transfer, members, self.device)
        return RankMatrices(transfer, members, exchange, self.record, self.watchdog.describe_ranks)

    def _members(self, transfer: Transfer) -> GroupRank:
        queue, topology = QUEUES[transfer.kind], transfer.topology
        if transfer.kind in OUTER_KINDS:  # its ranks are those of the job
            return group_rank(transfer, self.job.rank, lambda ranks, part: self._of_job(ranks, f"{queue}{part}"))

        def group_of(ranks: Ranks, part: str) -> dist.ProcessGroup:
            if transfer.kind in BETWEEN_HOSTS:
                return self.groups.control_on_host()
            if not shares_groups(self._backend):
                return self.groups.of(ranks, f"{queue}{part}", self._backend)
            return self._of_lane(ranks, queue, topology, borrows=transfer.move.op in WITH_OWNERS)

        return group_rank(transfer, self.rank, group_of, self.groups.first)

    def control(self, ranks: Ranks, topology: Topology) -> dist.ProcessGroup:
        """Return this rank's process group for collectives on the training thread, such as those of full parameters."""
        if shares_groups(self._backend):
            return self._of_lane(ranks, "control", topology, borrows=True)
        return self.groups.of(ranks, "control", self._backend)

    def _of_lane(self, ranks: Ranks, queue: str, topology: Topology, borrows: bool) -> dist.ProcessGroup:
        """Return this rank's process group of the lane of `queue`.

        With `borrows`, the parent serves where the lane has no group of all ranks. It is used in optimizer steps, and
        between steps, when no transfer overlaps.
        """
        mine = next(each for each in ranks if self.rank in each)
        lane, parent = self._lanes.lane(queue, mine, topology), self.groups.parent
        if borrows and len(ranks) == 1 and parent is not None and not self.groups.has(ranks, lane):
            return parent
        crosses = len(set(map(topology.node_of, mine))) > 1
        is_limited = crosses or (ranks[0], lane) in self._lanes.with_all_to_alls  # alike on all ranks
        limit = MAX_CTAS if is_limited and "NCCL_MAX_CTAS" not in os.environ else None
        return self.groups.of(ranks, lane, self._backend, limit)

    def _of_job(self, ranks: Ranks, purpose: str) -> dist.ProcessGroup:
        limit = MAX_CTAS if self._backend == "nccl" and "NCCL_MAX_CTAS" not in os.environ else None
        return self.job.of(ranks, purpose, self._backend, limit)

    def coalesce(self, alike: Sequence[RankTransfer]) -> CoalescedTransfers:
        """Return one transfer that runs all gathers, or all reductions, of the same members as one."""
        members = alike[0].members
        if alike[0].transfer.kind is TransferKind.REDUCE:
            return CoalescedTransfers(alike, CoalescedReduceScatter(members))
        return CoalescedTransfers(alike, CoalescedAllGather([bound.transfer for bound in alike], members, self.device))
