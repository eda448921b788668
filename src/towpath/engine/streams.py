"""Lanes: ordered queues that run transfers beside the computation. A thread on a CPU, a stream on a GPU.

Gathers, reductions, boundary synchronisation and publication each have a lane of their own (and process groups of
their own), so that they overlap one another and the compute. Order between lanes is by handle, never device-wide.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, final

import torch

Work = Callable[[], None]

# How often somebody who waits for a job looks whether it still can end.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """`begin`: the first part of `run`, which waits for nobody; it may run before the job that precedes it is through.

    `turn`: jobs of one turn share memory, and never overlap; of no turn, it comes behind all of them.
    """

    run: Work
    begin: Work | None = None
    turn: int | None = None


class Exposed(Protocol):
    """What is told that somebody waits for a job."""

    def __call__(self, seconds: float) -> None:
        """A thread has waited so long."""

    def still_waits(self) -> None:
        """It goes on waiting: raise here if it never will end."""

    def held(self) -> AbstractContextManager[None]:
        """Around the order to a stream to wait: how long it does, the device alone knows."""
        ...


class Handle(ABC):
    """The end of a job. Waiting on it orders what follows after it, and counts the time nothing else was done."""

    @abstractmethod
    def wait(self) -> None:
        """Return once the job's results may be used by what the caller does next."""


class Lane(ABC):
    @abstractmethod
    def submit(self, job: Job, after: Sequence[Handle] = (), exposed: Exposed | None = None) -> Handle:
        """Queue `job` behind the lane's earlier jobs, `after`, and what the caller has computed so far.

        `exposed` is told when somebody waits for it.
        """

    @abstractmethod
    def begin_next(self) -> None:
        """Called by the running job when it needs the links no more: the one behind it may begin, once it is there."""

    @abstractmethod
    def close(self) -> None:
        """No more jobs will come."""


@final
class ThreadLane(Lane):
    """A thread for each turn: gloo's collectives block, and PyTorch computes without the interpreter lock meanwhile."""

    def __init__(self, name: str, turns: int) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[None], Work] | None] = queue.SimpleQueue()
        self._turns = turns
        for number in range(turns):
            # Daemons: where a peer never answers, the program ends all the same (`Lanes.leave`).
            threading.Thread(target=_work, args=(self._jobs,), name=f"towpath-{name}_{number}", daemon=True).start()
        self._lock = threading.Lock()
        self._last = self._running = _Progress()
        self._last.end()

    def submit(self, job: Job, after: Sequence[Handle] = (), exposed: Exposed | None = None) -> Handle:
        with self._lock:  # the threads take jobs in the order in which they were submitted
            before, self._last = self._last, _Progress()
            future: Future[None] = Future()
            self._jobs.put((future, partial(self._do, job, tuple(map(_thread_handle, after)), before, self._last)))
            return _ThreadHandle(future, after, exposed)

    def _do(self, job: Job, after: Sequence[_ThreadHandle], before: _Progress, mine: _Progress) -> None:
        try:
            with torch.no_grad():
                for handle in after:
                    handle.join()
                if job.begin is not None:
                    before.links_free.wait()
                    job.begin()
                before.ended.wait()
                self._running = mine
                job.run()
        finally:
            before.ended.wait()  # where it failed early: what comes behind it comes behind that one, too
            mine.end()

    def begin_next(self) -> None:
        self._running.links_free.open()

    def close(self) -> None:
        for _ in range(self._turns):
            self._jobs.put(None)

    def __del__(self) -> None:
        self.close()


def _work(jobs: queue.SimpleQueue[tuple[Future[None], Work] | None]) -> None:
    """What each of a lane's threads does: it takes jobs in the order in which they were submitted."""
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


class _Progress:
    """Of a job: what the one behind it waits for."""

    __slots__ = ("ended", "links_free")

    def __init__(self) -> None:
        self.links_free, self.ended = _Latch(), _Latch()

    def end(self) -> None:
        self.links_free.open()
        self.ended.open()


class _Latch:
    """Shut until it is opened, once and for all. A `threading.Event` takes five times as long to make."""

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
    def __init__(self, future: Future[None], after: Sequence[Handle], exposed: Exposed | None) -> None:
        self._future = future
        self._after = after
        self._exposed = exposed

    def join(self) -> None:
        """Wait on a lane: no computation is held up by it."""
        self._future.result()

    def wait(self) -> None:
        after, self._after = self._after, ()  # let go: the jobs of a unit would else be linked for ever
        if self._future.done():
            self._future.result()
            return
        for handle in after:  # first, so that its seconds are told to those whose they are
            handle.wait()
        start = time.perf_counter()
        try:
            while not self._ended():
                if self._exposed is not None:
                    self._exposed.still_waits()
        finally:
            if self._exposed is not None:
                self._exposed(time.perf_counter() - start)

    def _ended(self) -> bool:
        """Whether it has ended by now, or within a second."""
        try:
            self._future.result(_LOOK_SECONDS)
        except TimeoutError:
            if self._future.done():  # its own
                raise
        return self._future.done()


@final
class StreamLane(Lane):
    """A CUDA stream for each turn: jobs are enqueued at once, and events keep them in order with the computation.

    Jobs of different turns overlap as far as their process groups let them.
    """

    def __init__(self, device: torch.device, turns: int) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(turns)]

    def submit(self, job: Job, after: Sequence[Handle] = (), exposed: Exposed | None = None) -> Handle:
        stream = self._streams[job.turn or 0]
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream), torch.no_grad():
            if job.turn is None:
                for other in self._streams:
                    stream.wait_stream(other)
            for handle in after:
                assert isinstance(handle, _StreamHandle)
                handle.join()
            job.run()
        event = torch.cuda.Event()
        event.record(stream)
        return _StreamHandle(event, exposed)

    def begin_next(self) -> None:
        """Nothing: it is enqueued, and its own stream runs it as soon as it can."""

    def close(self) -> None:
        """A stream needs no closing."""


@final
class _StreamHandle(Handle):
    def __init__(self, event: torch.cuda.Event, exposed: Exposed | None) -> None:
        self._event, self._exposed = event, exposed

    def join(self) -> None:
        """Let the current stream wait: a lane's, and no computation is held up by it."""
        torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        with nullcontext() if self._exposed is None else self._exposed.held():
            self.join()


def make_lane(name: str, device: torch.device, turns: int) -> Lane:
    """`turns`: how many jobs at a time may be under way."""
    return StreamLane(device, turns) if device.type == "cuda" else ThreadLane(name, turns)
