"""When something began and ended: by the host's clock, or on a GPU by events in the streams that do the work.

What the host itself does while a GPU computes is timed by the host's clock. An event is read only once it has come, so
that nobody waits for the device to learn how long something took.
"""

from __future__ import annotations

import time
from typing import Protocol, final

import torch

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
