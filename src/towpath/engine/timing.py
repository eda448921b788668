"""Timers of transfers, the clock of the engine's own work, and the decorators of methods that PyTorch calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, final

import torch

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
        # If the clock stands, the seconds were never added.
        if self._running:
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
