"""What runs the transfers of a queue beside the computation, in order.

On a CPU it is threads (`queue.py`), on a GPU CUDA streams (`cuda_stream.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from towpath.collectives.workspace import Workspace
from towpath.engine.activity import Event
from towpath.engine.timing import Mark

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
