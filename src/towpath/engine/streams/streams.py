"""Streams, which run the transfers of a queue in order and concurrently with the computation; timers and handles.

`CudaStream` runs transfers on a GPU. On a CPU, `ThreadStream` in `queue.py` does.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, final

import torch

from towpath.collectives.collective import Workspace
from towpath.engine.agree.status import is_capturing

if TYPE_CHECKING:
    from towpath.engine.streams.record import TransferWait

# The host's own work is timed by its clock on GPUs, too. The time of an event is read only after the device has reached
# it, so that timing never waits for the device. Events cost the host some microseconds each, so transfers on a GPU are
# timed only while someone reads their seconds.


Mark = float | torch.cuda.Event


class Timer:
    """A timer that reads the host's clock. It makes marks, and returns the seconds between them."""

    is_free = True  # whether marks cost next to nothing, so that everything may be timed

    def mark(self) -> Mark:
        """Return a mark of the current time: on a GPU, the time at which the current stream reaches this point."""
        return time.perf_counter()

    def is_known(self, mark: Mark) -> bool:
        """Return whether the time of `mark` can be read without a wait."""
        return True

    def seconds(self, began: Mark, ended: Mark) -> float:
        """Return the seconds between two marks whose times are known."""
        assert isinstance(began, float) and isinstance(ended, float)
        return ended - began

    def host_seconds(self, began: Mark, ended: Mark) -> float:
        """Return how long the calling thread was blocked between two marks that it made."""
        return self.seconds(began, ended)

    def settle(self) -> None:
        """Return once all marks are known."""


@final
class DeviceTimer(Timer):
    """A timer that records CUDA events in the current stream."""

    is_free = False

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
        """Return 0 between two events, which block their stream only and not the host."""
        return 0.0 if isinstance(began, torch.cuda.Event) else self.seconds(began, ended)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


def timer_for(device: torch.device) -> Timer:
    return DeviceTimer(device) if device.type == "cuda" else Timer()


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class HostClock:
    """The seconds that the training thread spends on the engine's own bookkeeping.

    The engine does its work inside `with clock:`. Two things are taken off again: waits for transfers, which count as
    exposed, and work on tensors, which belongs to the computation.
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
        """Subtract seconds that were no bookkeeping, if the clock runs."""
        if self._running:  # if not, the seconds were never added
            self.seconds -= seconds


Method = Callable[Concatenate[Any, Arguments], Result]


# A decorator that excludes a function from torch.compile and, if recursive, what it calls, too. It loads the compiler
# only at the first call.
eager = torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def on_host(method: Method[Arguments, Result]) -> Method[Arguments, Result]:
    """Add the seconds of the decorated method, which runs on the training thread, to the `HostClock` `self.host`."""

    @wraps(method)
    def timed(self: Any, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.host:
            return method(self, *args, **kwargs)

    return timed


Work = Callable[[Workspace], None]


@dataclass(frozen=True, slots=True)
class Job:
    """The work that a stream does for one submission.

    `works` run one after the other. `begin`, if any, is the non-blocking first part of the first of them. It may run
    before the preceding job has ended. Jobs with the same `Workspace.buffer_index` never overlap.
    """

    workspace: Workspace
    works: Sequence[Work]
    begin: Work | None = None


class Handle(ABC):
    """The end of a job. `Stream.submit` returns it, and the engine waits on it before it uses the job's results."""

    @abstractmethod
    def wait(self, on_host: bool = False) -> None:
        """Return once the job's results may be used by what the caller computes next. Record the time of the wait.

        Args:
            on_host: Whether the host waits, too. Otherwise only the current CUDA stream waits on a GPU.
        """


class Stream(ABC):
    """A runner of jobs, which execute in order and concurrently with the computation.

    Up to `depth` jobs may be under way at a time. Each has its own buffer index, and so its own wire
    buffers and tags.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self._buffer_index = depth, 0

    def next_buffer_index(self) -> int:
        """Return the buffer index of the next job to be submitted. Every rank must submit the same jobs."""
        self._buffer_index = (self._buffer_index + 1) % self.depth
        return self._buffer_index

    @abstractmethod
    def submit(self, job: Job, after: Sequence[Handle] = (), waiting: TransferWait | None = None) -> Handle:
        """Queue a job, which starts after earlier jobs with its buffer index, and after what was computed so far.

        Args:
            waiting: The object to which waits for the job are reported.
        """

    @abstractmethod
    def finish(self) -> None:
        """Return once the results of all jobs may be used by what the caller does next."""

    @abstractmethod
    def uses(self, buffer_index: int, buffer: torch.Tensor) -> None:
        """Keep the memory of `buffer` for jobs with this index, even if the caller drops it before they end."""


@final
class CudaStream(Stream):
    """A stream on a GPU: one CUDA stream per buffer index.

    Jobs are enqueued at once, and events order them with the computation. Jobs with different indices overlap as far as
    their process groups allow. Only `after` orders them. The kernels of a stream with `priority` -1 start before
    kernels of the computation that wait for a multiprocessor.
    """

    def __init__(self, device: torch.device, depth: int, priority: int = 0) -> None:
        super().__init__(depth)
        self._streams = [torch.cuda.Stream(device, priority=priority) for _ in range(depth)]

    def submit(self, job: Job, after: Sequence[Handle] = (), waiting: TransferWait | None = None) -> Handle:
        """Enqueue `job` on the CUDA stream of its buffer index."""
        # The new work follows everything that the computation has enqueued so far, and the results of `after`. The
        # host waits for neither. The event marks the end of the job, for the computation and for later jobs.
        stream = self._streams[job.workspace.buffer_index]
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
        """Let the current stream wait for all jobs. The host does not wait."""
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def uses(self, buffer_index: int, buffer: torch.Tensor) -> None:
        """Tell the caching allocator that a CUDA stream uses `buffer`, so that its memory is not reused."""
        buffer.record_stream(self._streams[buffer_index])


@final
class _CudaHandle(Handle):
    """The handle of a job on a `CudaStream`: an event behind the job."""

    def __init__(self, event: torch.cuda.Event, device: torch.device, waiting: TransferWait | None) -> None:
        self._event, self._device, self._waiting = event, device, waiting

    def _wait(self, on_host: bool) -> None:
        self.join()
        if on_host:
            self._event.synchronize()

    def join(self) -> None:
        """Let the current stream wait. It is not recorded: on a stream of transfers, no computation waits."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self, on_host: bool = False) -> None:
        """Let the current stream wait, and with `on_host` the host, too. Record the time."""
        # In the capture of a CUDA graph, events can be neither queried nor timed.
        if self._waiting is None or is_capturing():
            self._wait(on_host)
            return
        with self._waiting.profiled():
            if not self._waiting.is_timed or self._event.query():  # once the job has ended, there is no wait to time
                self._wait(on_host)
                return
            began = self._waiting.mark()
            self._wait(on_host)
            self._waiting.waited(began, self._waiting.mark())
