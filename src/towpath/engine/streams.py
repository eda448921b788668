"""Lanes: ordered queues that run transfers beside the computation. A thread on a CPU, a stream on a GPU.

Gathers, reductions, boundary synchronisation and publication each have a lane of their own (and process groups of
their own), so that they overlap one another and the compute. Order between lanes is by handle, never device-wide.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, final

import torch

Work = Callable[[], None]


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
        """Called by a job that needs the links no more: the one behind it may begin."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the lane's thread or stream."""


@final
class ThreadLane(Lane):
    """One thread: gloo's collectives block, and PyTorch computes without the interpreter lock meanwhile."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"towpath-{name}")
        self._lock = threading.Lock()
        self._queue: deque[_Queued] = deque()

    def submit(self, job: Job, after: Sequence[Handle] = (), exposed: Exposed | None = None) -> Handle:
        queued = _Queued(job, after)
        with self._lock:  # the thread takes them in the order of the queue
            self._queue.append(queued)
            return _ThreadHandle(self._threads.submit(self._run, queued), after, exposed)

    def _run(self, queued: _Queued) -> None:
        self._queue.popleft()
        with torch.no_grad():
            for handle in queued.after:
                _thread_handle(handle).join()
            if queued.failure is not None:
                raise queued.failure
            queued.job.run()

    def begin_next(self) -> None:
        following = self._queue[0] if self._queue else None
        if following is None or following.begun or following.job.begin is None:
            return
        if all(_thread_handle(h).done for h in following.after):
            following.begun = True
            try:
                following.job.begin()
            except Exception as failure:  # its own, to be raised in its turn
                following.failure = failure

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class _Queued:
    job: Job
    after: Sequence[Handle]
    begun: bool = False
    failure: Exception | None = None


def _thread_handle(handle: Handle) -> _ThreadHandle:
    assert isinstance(handle, _ThreadHandle)
    return handle


@final
class _ThreadHandle(Handle):
    def __init__(self, future: Future[None], after: Sequence[Handle], exposed: Exposed | None) -> None:
        self._future = future
        self._after = after
        self._exposed = exposed

    @property
    def done(self) -> bool:
        return self._future.done()

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
            self._future.result()
        finally:
            if self._exposed is not None:
                self._exposed(time.perf_counter() - start)


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
    return StreamLane(device, turns) if device.type == "cuda" else ThreadLane(name)
