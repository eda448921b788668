"""Streams: they run transfers beside the computation, in order. Threads on a CPU, CUDA streams on a GPU.

All models that are sharded over one process group share its streams, and with them the threads, and the connections of
the process groups: both stay as they are however many models are made one after the other. That the transfers of
several models keep one order on all ranks follows from sharing, too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, final

import torch

from towpath.collectives.workspace import Workspace
from towpath.core.queues import WAYS
from towpath.engine.activity import Peers
from towpath.engine.timing import Mark
from towpath.topology.groups import Groups

Work = Callable[[Workspace], None]

# How often somebody who waits for a job looks whether it still can end.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """`begin`: the first part of `run`, which waits for nobody; it may run before the job that precedes it is through.

    Jobs of one way share memory, and never overlap (`Workspace.way`).
    """

    workspace: Workspace
    run: Work
    begin: Work | None = None


class Waiting(Protocol):
    """What a handle tells of somebody's waiting for its job."""

    def profiled(self) -> AbstractContextManager[object]:
        """A range for a profiler, around the waiting."""
        ...

    def mark(self) -> Mark:
        """Now."""
        ...

    def waited(self, began: Mark, ended: Mark) -> None: ...

    def still_waits(self) -> None:
        """It goes on waiting: raise here if it never will end."""


class Handle(ABC):
    """The end of a job. Waiting on it orders what follows after it, and counts the time nothing else was done."""

    @abstractmethod
    def wait(self) -> None:
        """Return once the job's results may be used by what the caller does next."""


class Stream(ABC):
    """`ways`: how many jobs at a time may be under way."""

    def __init__(self, ways: int) -> None:
        self.ways, self._way = ways, 0

    def next_way(self) -> int:
        """Of the next job to be submitted. Every rank must submit the same ones."""
        self._way = (self._way + 1) % self.ways
        return self._way

    @abstractmethod
    def submit(self, job: Job, after: Sequence[Handle] = (), waiting: Waiting | None = None) -> Handle:
        """Queue `job` behind the earlier jobs of its way, `after`, and what the caller has computed so far.

        `waiting` is told when somebody waits for it.
        """

    @abstractmethod
    def finish(self) -> None:
        """Return once the results of all jobs may be used by what the caller does next."""

    @abstractmethod
    def uses(self, way: int, buffer: torch.Tensor) -> None:
        """Jobs of this way will use `buffer`, which the caller has made and may drop at any time."""

    @abstractmethod
    def close(self) -> None:
        """No more jobs will come."""


@final
class ThreadStream(Stream):
    """A thread for each way: gloo's collectives block, and PyTorch computes without the interpreter lock meanwhile."""

    def __init__(self, name: str, ways: int) -> None:
        super().__init__(ways)
        self._jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
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


def _work(jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
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

    def wait(self) -> None:
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


@final
class CudaStream(Stream):
    """A CUDA stream for each way: jobs are enqueued at once, and events keep them in order with the computation.

    Jobs of different ways overlap as far as their process groups let them: only `after` orders them.
    """

    def __init__(self, device: torch.device, ways: int) -> None:
        super().__init__(ways)
        self._streams = [torch.cuda.Stream(device) for _ in range(ways)]

    def submit(self, job: Job, after: Sequence[Handle] = (), waiting: Waiting | None = None) -> Handle:
        stream = self._streams[job.workspace.way]
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream), torch.no_grad():
            for handle in after:
                assert isinstance(handle, _CudaHandle)
                handle.join()
            job.run(job.workspace)
        event = torch.cuda.Event()
        event.record(stream)
        return _CudaHandle(event, stream.device, waiting)

    def finish(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def uses(self, way: int, buffer: torch.Tensor) -> None:
        buffer.record_stream(self._streams[way])

    def close(self) -> None:
        """A CUDA stream needs no closing."""


@final
class _CudaHandle(Handle):
    def __init__(self, event: torch.cuda.Event, device: torch.device, waiting: Waiting | None) -> None:
        self._event, self._device, self._waiting = event, device, waiting

    def join(self) -> None:
        """Let the model's current stream wait: no computation is held up by it if that is one of ours."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        if self._waiting is None:
            self.join()
            return
        with self._waiting.profiled():
            if self._event.query():  # it has come: there is no wait to be timed
                self.join()
                return
            began = self._waiting.mark()
            self.join()
            self._waiting.waited(began, self._waiting.mark())


def make_stream(name: str, device: torch.device, ways: int) -> Stream:
    return CudaStream(device, ways) if device.type == "cuda" else ThreadStream(name, ways)


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
            atexit.register(leave, weakref.ref(streams), Peers.of(groups))
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


def leave(streams: weakref.ref[Streams], peers: Peers) -> None:
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
