"""Lanes: ordered queues that run transfers beside the computation. A thread on a CPU, a stream on a GPU.

Gathers, reductions, boundary synchronisation and publication each have a lane of their own (and process groups of
their own), so that they overlap one another and the compute. Order between lanes is by handle, never device-wide.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, final

import torch

Job = Callable[[], None]


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
    def close(self) -> None:
        """Let go of the lane's thread or stream."""


@final
class ThreadLane(Lane):
    """One thread: gloo's collectives block, and PyTorch computes without the interpreter lock meanwhile."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"towpath-{name}")

    def submit(self, job: Job, after: Sequence[Handle] = (), exposed: Exposed | None = None) -> Handle:
        def run() -> None:
            with torch.no_grad():
                for handle in after:
                    assert isinstance(handle, _ThreadHandle)
                    handle.join()
                job()

        return _ThreadHandle(self._threads.submit(run), after, exposed)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


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
        if self._future.done():
            self._future.result()
            return
        for handle in self._after:  # first, so that its seconds are told to those whose they are
            handle.wait()
        start = time.perf_counter()
        try:
            self._future.result()
        finally:
            if self._exposed is not None:
                self._exposed(time.perf_counter() - start)


@final
class StreamLane(Lane):
    """One CUDA stream: jobs are enqueued at once, and events keep them in order with the computation."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, job: Job, after: Sequence[Handle] = (), exposed: Exposed | None = None) -> Handle:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            for handle in after:
                assert isinstance(handle, _StreamHandle)
                handle.join()
            job()
        event = torch.cuda.Event()
        event.record(self._stream)
        return _StreamHandle(event, exposed)

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


def make_lane(name: str, device: torch.device) -> Lane:
    return StreamLane(device) if device.type == "cuda" else ThreadLane(name)
