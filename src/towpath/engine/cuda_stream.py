"""What runs transfers on a GPU: CUDA streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from towpath.engine.streams import Handle, Job, Stream, Waiting


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
