"""What runs transfers on a CPU: threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import final

import torch

from towpath.engine.streams import Handle, Job, Stream, Waiting

# How often somebody who waits for a job looks whether it still can end.
_LOOK_SECONDS = 1.0


@final
class ThreadStream(Stream):
    """A thread for each way: gloo's collectives block, and PyTorch computes without the interpreter lock meanwhile."""

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
            job.run(job.workspace)
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
            for handle in after:  # first, so that its seconds are told to those whose they are
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
