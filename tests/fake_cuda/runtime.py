"""What of `torch.cuda` is used on a GPU: streams, events and the rest, for a device whose work is done when submitted.

The device never ends anything by itself: `Event.query()` is False until the host has waited for that event or a later
one. No device can be slower. Every wait of the host for it is recorded, with its place in the source.
"""

# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import towpath
from tests.fake_cuda.device import Device, library, operators

_SOURCES = str(Path(towpath.__file__).parent)
DEVICE = torch.device("cuda", 0)
_CUDA = 1  # its number among PyTorch's types of devices
FREE_BYTES, TOTAL_BYTES = 64 << 30, 80 << 30


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of the host for the device."""

    what: str
    places: tuple[str, ...]  # file:line of each frame in the sources, the innermost first
    left: int  # the operations that the device still has when the host goes on. 0 is a drained device.
    elsewhere: bool  # on a thread beside the training thread and autograd's

    def __str__(self) -> str:
        where = " < ".join(self.places[:4]) or "outside the sources"
        return f"{where}: {self.what}, with {self.left} operations left"


class HostWaitError(AssertionError):
    """The host waited for the device where it must not."""


@dataclass
class Runtime:
    """The device as the host sees it: what it has been given, what it is known to have done, and who waited for it."""

    waits: list[Wait] = field(default_factory=list[Wait])
    idle: bool = False  # whether the device is through with everything, so that events are always reached
    refused: str = ""  # if the host may not wait now: why

    def __post_init__(self) -> None:
        self.device = Device(self.waited)
        self.done = 0  # the operations that the device is known to have ended
        self.default = torch.Stream.__new__(Stream, stream_id=0, device_index=0, device_type=_CUDA).of(self)

    def waited(self, what: str, until: int | None = None) -> None:
        """Note that the host waits until the device has done `until` operations: by default, all of them."""
        until = self.device.launched if until is None else until
        if self.is_done(until) and what == "Event.synchronize":
            return
        # Other threads of Python may wait: the training thread does not wait with them. Those of autograd are dummies.
        thread = threading.current_thread()
        elsewhere = thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
        wait = Wait(what, _places(), self.device.launched - until, elsewhere)
        self.done = max(self.done, until)
        self.waits.append(wait)
        if self.refused and not elsewhere:
            raise HostWaitError(f"{self.refused}: {wait}")

    @contextmanager
    def counted(self) -> Generator[list[Wait]]:
        """Yield a list that has the waits of the training thread inside the block, once it ends."""
        first, found = len(self.waits), list[Wait]()
        yield found
        found += [wait for wait in self.waits[first:] if not wait.elsewhere]

    @contextmanager
    def no_waits(self, why: str) -> Generator[None]:
        """Raise if the host waits inside the block."""
        before, self.refused = self.refused, why
        try:
            yield
        finally:
            self.refused = before

    def is_done(self, operations: int) -> bool:
        """Return whether the device is known to have done so many operations."""
        return self.idle or operations <= self.done

    def current_stream(self) -> Stream:
        return _streams[library().fake_cuda_stream()]


def _places() -> tuple[str, ...]:
    found: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_SOURCES):
            found.append(f"{frame.f_code.co_filename[len(_SOURCES) + 1 :]}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(found)


_runtime: Runtime | None = None  # the one that runs
_streams: dict[int, Stream] = {}  # by number. Models share them, and may outlive a runtime.


class Stream(torch.Stream):
    """`torch.cuda.Stream`. Its number is that of PyTorch's own stream, so that `record_stream` takes it."""

    runtime: Runtime

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        assert _runtime is not None
        return super().__new__(cls, device=DEVICE, priority=priority).of(_runtime)

    def of(self, runtime: Runtime) -> Stream:
        self.runtime = runtime
        _streams[self.stream_id] = self
        return self

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_stream(self, stream: Stream) -> None:
        """Do nothing: what was submitted before is done."""

    def wait_event(self, event: Event) -> None:
        """Do nothing."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.runtime.is_done(self.runtime.device.launched)

    def synchronize(self) -> None:
        self.runtime.waited("Stream.synchronize")


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        assert _runtime is not None
        self._runtime, self._timed = _runtime, enable_timing
        self._at = 0  # the number of operations before it

    def record(self, stream: Stream | None = None) -> None:
        self._at = self._runtime.device.launched

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing."""

    def query(self) -> bool:
        return self._runtime.is_done(self._at)

    def synchronize(self) -> None:
        self._runtime.waited("Event.synchronize", self._at)

    def elapsed_time(self, end: Event) -> float:
        assert self._timed and end._timed, "events are timed if made with enable_timing=True"
        assert self.query() and end.query(), "the device has not reached both events"
        return float(end._at - self._at)


class _Generator(torch.Generator):
    """A generator of random numbers, which is the CPU's on all devices."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]


class _DeviceContext:
    def __init__(self, device: Any) -> None:
        """Do nothing: there is one device."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@contextmanager
def _stream(stream: Stream | None) -> Generator[None]:
    if stream is None:
        yield
        return
    before = library().fake_cuda_stream()
    library().fake_cuda_use_stream(stream.stream_id)
    try:
        yield
    finally:
        library().fake_cuda_use_stream(before)


def _replacements(runtime: Runtime) -> dict[str, Any]:
    def answers(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    properties = SimpleNamespace(
        name="fake", total_memory=TOTAL_BYTES, uuid="fake-0", major=9, minor=0, multi_processor_count=132
    )
    return {
        "Stream": Stream,
        "Event": Event,
        "device": _DeviceContext,
        "stream": _stream,
        "current_stream": lambda device=None: runtime.current_stream(),
        "default_stream": lambda device=None: runtime.default,
        "set_stream": lambda stream: library().fake_cuda_use_stream(stream.stream_id),
        "synchronize": lambda device=None: runtime.waited("torch.cuda.synchronize"),
        "is_available": answers(True),
        "is_initialized": answers(True),
        "is_current_stream_capturing": answers(False),
        "is_bf16_supported": answers(True),
        "init": answers(None),
        "_lazy_init": answers(None),
        "_is_in_bad_fork": answers(False),
        "device_count": answers(1),
        "current_device": answers(0),
        "set_device": answers(None),
        "mem_get_info": answers((FREE_BYTES, TOTAL_BYTES)),
        "get_device_properties": answers(properties),
        "get_device_name": answers("fake"),
        "get_device_capability": answers((9, 0)),
        "max_memory_allocated": answers(0),
        "memory_allocated": answers(0),
        "reset_peak_memory_stats": answers(None),
        "empty_cache": answers(None),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": answers(None),
        "manual_seed_all": answers(None),
    }


@contextmanager
def fake_cuda() -> Generator[Runtime]:
    """Give PyTorch a device "cuda:0" inside the block, and count the host's waits for it.

    Use it in a process that ends with the test: PyTorch keeps some answers, such as whether there is a GPU.
    """
    global _runtime
    library().fake_cuda_start()
    made = Runtime()
    barrier = dist.barrier

    def waiting_barrier(*args: Any, **kwargs: Any) -> Any:
        made.waited("torch.distributed.barrier")
        return barrier(*args, **kwargs)

    with (
        mock.patch.multiple(torch.cuda, **_replacements(made)),
        mock.patch.object(dist, "barrier", waiting_barrier),
        mock.patch.object(torch, "Generator", _Generator),
        operators(made.device),
    ):
        _runtime = made
        try:
            yield made
        finally:
            _runtime = None
