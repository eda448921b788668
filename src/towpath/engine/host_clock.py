"""Around what the engine does on the thread that trains: it is timed, and kept out of `torch.compile`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

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
