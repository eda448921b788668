"""What runs the transfers of a queue beside the computation, in order; and what does it on a GPU: CUDA streams.

On a CPU it is threads (`queue.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, final

import torch

from towpath.collectives.workspace import Workspace
from towpath.engine.timing import Mark

Work = Callable[[Workspace], None]


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
    def wait(self, on_host: bool = False) -> None:
        """Return once the job's results may be used by what the caller computes next. `on_host`: and by the host, which
        else goes on at once where it is a device that computes."""


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

    def _wait(self, on_host: bool) -> None:
        self.join()
        if on_host:
            self._event.synchronize()

    def join(self) -> None:
        """Let the model's current stream wait: no computation is held up by it if that is one of ours."""
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
