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

from towpath.collectives.collective import WireBuffers, Workspace
from towpath.collectives.rank_transfer import (
    RankMatrices,
    RankTransfer,
)
from towpath.core.queues import MAX_IN_FLIGHT, QUEUES
from towpath.core.strategy import BETWEEN_HOSTS, WITH_TRANSPORT, TransferKind
from towpath.core.transfer import Needs
from towpath.core.unit_plan import UnitPlan, largest
from towpath.engine.agree.digest import CollectiveLog
from towpath.engine.agree.watchdog import Watchdog
from towpath.engine.streams.record import Record, TransferWait, profiled
from towpath.engine.streams.streams import CudaStream, Handle, Job, Stream, Work
from towpath.logs import logger
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
