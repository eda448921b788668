"""`ThreadStream`, which runs the transfers of a queue on threads: all of them on a CPU, what ranks compare on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import final

import torch

from towpath.daemons import start_daemon
from towpath.engine.transfer_queues import Handle, Stream, StreamJob
from towpath.observe.record import TransferWait

# How often a thread that waits for a job checks whether the job can still end.
_LOOK_SECONDS = 1.0


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
            start_daemon(f"towpath-{name}_{number}", partial(_work, self._jobs), partial(self._jobs.put, None))
        self._lock = threading.Lock()
        self._last = _Progress()
        self._last.end()

    def submit(self, job: StreamJob, after: Sequence[Handle] = (), waiting: TransferWait | None = None) -> Handle:
        # Two models may submit to one stream. The chain of `_Progress` and the queue must have the same order.
        with self._lock:
            before, self._last = self._last, _Progress()
            job.workspace.links_free = self._last.links_free.open
            future: Future[None] = Future()
            self._jobs.put((future, partial(_run, job, after, before, self._last)))
            return _ThreadHandle(future, after, waiting)

    def finish(self) -> None:
        """Wait until the last job has ended, successful or not."""
        # Jobs end in their order, because each of them waits for the one before it.
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
        # A job would keep its model alive while this thread waits.
        del job, future, work


def _run(job: StreamJob, after: Sequence[Handle], before: _Progress, mine: _Progress) -> None:
    """Run one job on a thread of its stream. `before`: the progress of the preceding job. `mine`: that of this job."""
    # A collective opens `links_free` once it has posted its last messages between nodes. The next job may then `begin`
    # on its own thread, while this one still works inside the node. The rest of the next job waits for `ended`.
    try:
        with torch.no_grad():
            # The computation needs no event here: on a CPU it has written its results before it submits a job.
            for handle in after:
                handle.block()
            if job.begin is not None:
                before.links_free.wait()
                job.begin(job.workspace)
            before.ended.wait()
            for work in job.works:
                work(job.workspace)
    finally:
        # This waits after an early failure, too: later jobs must not overtake the job before this one.
        before.ended.wait()
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

    def block(self) -> None:
        self._future.result()

    def has_ended(self) -> bool:
        return self._future.done()

    def wait(self, on_host: bool = False) -> None:
        """Wait on the training thread for the job and the jobs before it, and record the time."""
        # Dropped here, because handles would else link all jobs of a unit.
        after, self._after = self._after, ()
        if self._waiting is None:
            self._future.result()
            return
        with self._waiting.profiled():
            if self._future.done():
                self._future.result()
                return
            # The jobs before it come first, so that each transfer is charged for its own wait only.
            for handle in after:
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
            if not self._future.done():
                return False
            self._future.result()  # it raises if the job itself did, and not if the job has ended just now
        return True
