"""The activity of this rank: what it computes, and which transfers it or its device waits for."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, final

import torch

from towpath.core.transfer import Transfer

# The number of transfers, submitted to a device last, that are remembered.
_ENQUEUED = 256

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def is_capturing() -> bool:
    """Return whether the current stream of this thread captures a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@cache
def _exchange_capture_mode() -> Callable[[Any], object]:
    """Return the driver's function that exchanges the capture mode of this thread, or one that does nothing."""
    # The driver is a library that every user of CUDA has loaded. PyTorch has no function for this.
    with suppress(OSError, AttributeError):
        return ctypes.PyDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    return lambda mode: None


@contextmanager
def relaxed() -> Generator[None]:
    """Let this thread look at events of the device inside, also while another thread captures a CUDA graph."""
    # Captures in the default mode forbid it on all threads: the look fails, and so does the capture. A thread whose own
    # mode is relaxed may do it. The watchdog of c10d does the same.
    mode = ctypes.c_int(_RELAXED)
    _exchange_capture_mode()(ctypes.byref(mode))
    try:
        yield
    finally:
        _exchange_capture_mode()(ctypes.byref(mode))


def has_ended(event: torch.cuda.Event) -> bool:
    """Return whether the device has come to `event`, without harm to a CUDA graph that another thread captures."""
    with relaxed():
        try:
            return event.query()
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            return False  # the next look will tell


@final
class RankStatus:
    """The activity of this rank, over all models of one process group. `progress` rises when it changes."""

    def __init__(self) -> None:
        self.progress = 0
        self.step = 0
        self._since = time.monotonic()  # the time of the last progress
        self._seen = 0
        self._computing = "outside the model"
        # By thread: each thread of a queue runs one message at a time, of one transfer or several.
        self._under_way: dict[int, Sequence[Transfer]] = {}
        self._last: Sequence[Transfer] = ()
        self.failure = ""  # the failed pass of this rank, if not all ranks have learned of it
        self.broken = ""  # its transfer that has failed, and how. Peers quote it, if that was the failure of a pass
        self._enqueued: deque[tuple[torch.cuda.Event, Sequence[Transfer]]] = deque(maxlen=_ENQUEUED)  # on the device
        # The training thread and the reporter both drop what has finished. Without the lock, one could drop an entry
        # between the other's look at the first entry and its removal.
        self._enqueued_lock = threading.RLock()
        self.inside = ""  # the call of the program that this rank is in, and that other ranks must make, too

    def computes(self, work: str, unit: str | None) -> None:
        """Note what the training thread computes now. `unit`: its unit, if it is work of a unit."""
        self.progress += 1
        self._computing = work if unit is None else f"{work} of unit {unit or 'root'!r}"

    def begins(self, transfers: Sequence[Transfer]) -> None:
        """Note that the calling thread begins these transfers, which are one message."""
        self.progress += 1
        self._under_way[threading.get_ident()] = transfers

    def ends(self) -> None:
        """Note that the transfers that the calling thread has begun are over, successful or not."""
        self.progress += 1
        self._last = self._under_way.pop(threading.get_ident(), self._last)

    def enqueued(self, end: torch.cuda.Event, transfers: Sequence[Transfer]) -> None:
        """Note that the host has enqueued these transfers on the device. The event `end` follows them."""
        if is_capturing():  # they run when the graph is replayed, and this event can never be queried
            return
        with self._enqueued_lock:
            self._drop_finished()
            self._enqueued.append((end, transfers))

    def _drop_finished(self) -> None:
        # A query while this thread captures a CUDA graph would end the capture in an error.
        if is_capturing():
            return
        while self._enqueued and has_ended(self._enqueued[0][0]):
            self._last = self._enqueued.popleft()[1]
            self.progress += 1

    def on_device(self) -> str:
        """Return the first enqueued transfer that the device has not finished; '' if there is none."""
        with self._enqueued_lock:
            self._drop_finished()
            return _named(self._enqueued[0][1]) if self._enqueued else ""

    @contextmanager
    def shared(self, call: str) -> Generator[None]:
        """Run a call that other ranks must make, too, such as a norm, and note `call` meanwhile."""
        self.progress += 1
        self.inside = call
        try:
            yield
        finally:
            self.progress += 1
            self.inside = ""

    def failed(self, what: str) -> None:
        """Note the error `what` of a forward or backward pass. With '', note that all ranks have learned of it."""
        self.progress += 1
        self.failure = what
        if not what:
            self.broken = ""

    @property
    def transfers(self) -> bool:
        """Whether this rank or its device is in a transfer."""
        return bool(self._under_way or self.on_device())

    @property
    def uses_links(self) -> bool:
        """Whether this rank is in a transfer between nodes, or its device has one that it has not finished."""
        with self._enqueued_lock:
            self._drop_finished()
            running = [*self._under_way.copy().values(), *(transfers for _, transfers in self._enqueued)]
        return any(transfers[0].grid.nodes > 1 for transfers in running)

    @property
    def waits(self) -> bool:
        """Whether this rank or its device is in a transfer, or in a call that other ranks must make, too."""
        return bool(self.inside) or self.transfers

    def silent_seconds(self) -> float:
        """Return for how long nothing has begun or ended. Call it at regular intervals: it looks for progress."""
        now = time.monotonic()
        if self.progress != self._seen:
            self._since, self._seen = now, self.progress  # in this order: another thread may read them in between
        return now - self._since

    def describe(self) -> str:
        inside = self.inside  # once, because another thread may change it
        parts = [f"step {self.step}", self.failure or (f"in {inside}" if inside else self._computing)]
        under_way = sorted(map(_named, self._under_way.copy().values()))
        if on_device := self.on_device():
            under_way.append(f"{on_device}, on the device")
        parts.append(f"waits for {', '.join(under_way)}" if under_way else "in no transfer")
        if self._last:
            parts.append(f"the last one that ended was {_named(self._last)}")
        return "; ".join(parts)


def _named(transfers: Sequence[Transfer]) -> str:
    first = transfers[0]
    return f"{first.kind.value} of unit {first.unit or 'root'!r}" if first.unit or first.bucket else first.kind.value
