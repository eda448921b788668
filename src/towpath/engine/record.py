"""What was executed: every transfer, in order, with its bytes and seconds; and what the engine itself took."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from towpath.collectives.coalesced import CoalescedAllGather
from towpath.collectives.collective import Collective, Members
from towpath.errors import StepError
from towpath.spec.schedule import Transfer


@dataclass(frozen=True, slots=True)
class TransferStats:
    """One transfer of the schedule, over all its calls so far. Bytes: sent by all ranks of the job together."""

    transfer: Transfer
    calls: int
    intra_bytes: int
    inter_bytes: int
    seconds_in_flight: float
    seconds_exposed: float


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

    def leave_out(self, work: Callable[Arguments, None], *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        """Work on tensors that the engine does."""
        began = time.perf_counter()
        work(*args, **kwargs)
        self.take_off(time.perf_counter() - began)


class HasHost(Protocol):
    host: HostClock


Self = TypeVar("Self", bound=HasHost)
Method = Callable[Concatenate[Self, Arguments], Result]


def on_host(method: Method[Self, Arguments, Result]) -> Method[Self, Arguments, Result]:
    """A method that PyTorch calls on the thread that trains: its seconds go to `self.host`."""

    @wraps(method)
    def timed(self: Self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.host:
            return method(self, *args, **kwargs)

    return timed


class Record:
    """The transfers of the running step and of the last whole one, and totals since the start."""

    def __init__(self) -> None:
        self.host = HostClock()
        self._lock = threading.Lock()  # lanes are threads
        self._step: list[Transfer] = []
        self.last_step: tuple[Transfer, ...] = ()
        self._calls: dict[Transfer, int] = defaultdict(int)
        self._in_flight: dict[Transfer, float] = defaultdict(float)
        self._exposed: dict[Transfer, float] = defaultdict(float)

    def submitted(self, transfer: Transfer, micro_step: int) -> None:
        with self._lock:
            self._step.append(replace(transfer, micro_step=micro_step))

    def end_step(self) -> None:
        with self._lock:
            self.last_step, self._step = tuple(self._step), []

    def finished(self, transfer: Transfer, seconds: float) -> None:
        with self._lock:
            self._calls[transfer] += 1
            self._in_flight[transfer] += seconds

    def exposed_by(self, transfers: list[Transfer]) -> Callable[[float], None]:
        """What to tell the seconds that the computation waited for these transfers: they are shared out evenly."""

        def tell(seconds: float) -> None:
            self.host.take_off(seconds)
            with self._lock:
                for transfer in transfers:
                    self._exposed[transfer] += seconds / len(transfers)

        return tell

    def totals(self) -> list[TransferStats]:
        with self._lock:
            return [
                TransferStats(t, n, n * t.intra_bytes, n * t.inter_bytes, self._in_flight[t], self._exposed[t])
                for t, n in self._calls.items()
            ]


@dataclass(frozen=True, slots=True)
class Line:
    """A transfer of the schedule bound to the collective that executes it on this rank."""

    transfer: Transfer
    members: Members
    collective: Collective
    record: Record

    def run(self, region: torch.Tensor, shard: torch.Tensor) -> None:
        start = time.perf_counter()
        try:
            self.collective.run(region, shard)
        except RuntimeError as error:
            raise StepError(self.failure(error)) from error
        self.record.finished(self.transfer, time.perf_counter() - start)

    def failure(self, error: RuntimeError) -> str:
        ranks = self.members.group.ranks
        mine = ranks[self.members.position]
        others = ", ".join(str(r) for r in ranks if r != mine)
        return (
            f"rank {mine}: {self.transfer} failed: {error}\nIf this speaks of a connection or of time, one of its "
            f"peers (rank {others}) has died, hangs, is at another step or has lost its link: see what that rank says."
        )


@dataclass(frozen=True, slots=True)
class Bundle:
    """Several gathers that travel as one."""

    lines: Sequence[Line]
    collective: CoalescedAllGather

    def run(self, regions: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        start = time.perf_counter()
        try:
            self.collective.run(regions, shards)
        except RuntimeError as error:
            raise StepError(self.lines[0].failure(error)) from error
        seconds = (time.perf_counter() - start) / len(self.lines)
        for line in self.lines:
            line.record.finished(line.transfer, seconds)
