"""What runs the transfers of a queue beside the computation, in order.

On a CPU it is threads (`queue.py`), on a GPU CUDA streams (`cuda_stream.py`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar, final

import torch

from towpath.collectives.collective import Workspace
from towpath.engine.checks.activity import Event

# --- timing -----------------------------------------------------------------------------------------------------------
#
# When something began and ended: by the host's clock, or on a GPU by events in the streams that do the work.
#
# What the host itself does while a GPU computes is timed by the host's clock. An event is read only once it has come,
# so that nobody waits for the device to learn how long something took.


Mark = float | torch.cuda.Event


class Timer(Protocol):
    def mark(self) -> Mark:
        """Now: on a GPU, when the stream that is current here has come so far."""
        ...

    def is_known(self, mark: Mark) -> bool:
        """Whether its time has come, and can be read without a wait."""
        ...

    def seconds(self, began: Mark, ended: Mark) -> float:
        """Between two that are known."""
        ...

    def host_seconds(self, began: Mark, ended: Mark) -> float:
        """How long the thread that made both was held up between them."""
        ...

    def settle(self) -> None:
        """Return once all marks are known."""


@final
class HostTimer:
    def mark(self) -> Mark:
        return time.perf_counter()

    def is_known(self, mark: Mark) -> bool:
        return True

    def seconds(self, began: Mark, ended: Mark) -> float:
        assert isinstance(began, float) and isinstance(ended, float)
        return ended - began

    def host_seconds(self, began: Mark, ended: Mark) -> float:
        return self.seconds(began, ended)

    def settle(self) -> None:
        """The clock is read at once."""


@final
class DeviceTimer:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_known(self, mark: Mark) -> bool:
        return not isinstance(mark, torch.cuda.Event) or mark.query()

    def seconds(self, began: Mark, ended: Mark) -> float:
        if not isinstance(began, torch.cuda.Event):
            assert not isinstance(ended, torch.cuda.Event)
            return ended - began
        assert isinstance(ended, torch.cuda.Event)
        return began.elapsed_time(ended) / 1e3

    def host_seconds(self, began: Mark, ended: Mark) -> float:
        """Between two events only their stream was."""
        return 0.0 if isinstance(began, torch.cuda.Event) else self.seconds(began, ended)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


def timer_for(device: torch.device) -> Timer:
    return DeviceTimer(device) if device.type == "cuda" else HostTimer()


# --- host clock -------------------------------------------------------------------------------------------------------
#
# Around what the engine does on the thread that trains: it is timed, and kept out of `torch.compile`.


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class HostClock:
    """Seconds of the thread that trains which go to the engine's own bookkeeping.

    `with clock:` around what the engine does there; waiting for transfers, which is counted as exposed, and work on
    tensors, which is the computation's, are taken off again.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._running = False
        self._began = 0.0

    def __enter__(self) -> None:
        self._running = True
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began
        self._running = False

    def take_off(self, seconds: float) -> None:
        if self._running:  # what a user's call waits for was never added
            self.seconds -= seconds


class HasHost(Protocol):
    host: HostClock


Self = TypeVar("Self", bound=HasHost)
Method = Callable[Concatenate[Self, Arguments], Result]


# Keeps torch.compile out of a function and, if recursive, of what it calls. It loads the compiler at the first call.
eager = torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def on_host(method: Method[Self, Arguments, Result]) -> Method[Self, Arguments, Result]:
    """A method for the thread that trains: its seconds go to `self.host`."""

    @wraps(method)
    def timed(self: Self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.host:
            return method(self, *args, **kwargs)

    return timed


Work = Callable[[Workspace], None]


@dataclass(frozen=True, slots=True)
class Job:
    """`works`: what is to be done, one after the other. `begin`: the first part of the first of them, which waits for
    nobody; it may be done before the job that precedes it is through.

    Jobs of one way share memory, and never overlap (`Workspace.way`).
    """

    workspace: Workspace
    works: Sequence[Work]
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

    def enqueued(self, end: Event) -> None:
        """A device was given the job, and the host goes on."""
        ...

    def still_waits(self) -> None:
        """It goes on waiting: raise here if it never will end."""


class Handle(ABC):
    """The end of a job. Waiting on it orders what follows after it, and counts the time nothing else was done."""

    @abstractmethod
    def wait(self, on_host: bool = False) -> None:
        """Return once the job's results may be used by what the caller computes next. `on_host`: the host waits,
        too, where it is a device that computes; else the host goes on at once there."""


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


# --- cuda stream ------------------------------------------------------------------------------------------------------
#
# What runs transfers on a GPU: CUDA streams.


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
            for work in job.works:
                work(job.workspace)
        event = torch.cuda.Event()
        event.record(stream)
        if waiting is not None:
            waiting.enqueued(event)
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

    def _wait(self, on_host: bool) -> None:
        self.join()
        if on_host:
            self._event.synchronize()

    def join(self) -> None:
        """Let the current stream wait. Where that is one of ours, no computation is held up."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self, on_host: bool = False) -> None:
        if self._waiting is None:
            self._wait(on_host)
            return
        with self._waiting.profiled():
            if self._event.query():  # it has come: there is no wait to be timed
                self.join()
                return
            began = self._waiting.mark()
            self._wait(on_host)
            self._waiting.waited(began, self._waiting.mark())
