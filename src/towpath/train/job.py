"""The ranks of a training run: how a rank joins them, how all fail together, and how a signal stops all of them."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from towpath.daemons import start_daemon
from towpath.engine.agree.watchdog import Watchdog
from towpath.errors import ConfigError, StepError
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups, detect_shape
from towpath.topology.init import alone, device_of_rank, first_line, init
from towpath.topology.together import together

# If ranks receive different signals, the first of these counts.
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_HANDLED_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """This rank and the others. `topology`: the nodes and ranks, numbered as by `towpath.init()`."""

    groups: Groups
    topology: Topology
    device: torch.device
    rank: int  # kept, because the process group may be lost when it is printed
    world: int

    def together(self) -> AbstractContextManager[list[str]]:
        """Return the context of `topology.together` over all ranks. Its errors are those of the command."""
        return together(self.groups, "the start", "Give all ranks the same files and arguments.", ConfigError)

    @contextmanager
    def as_step_errors(self) -> Generator[None]:
        """Turn errors that are not the program's, such as a lost rank or too little memory, into a `StepError`.

        The command prints it as one line, without a traceback.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise StepError(
                f"rank {self.rank}: {first_line(error)} Lower train.micro_batch, set train.checkpointing = true, or "
                "choose a strategy that spreads more."
            ) from error
        except RuntimeError as error:
            # PyTorch's own collectives of the loss and the norm. gloo raises nothing more specific.
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise StepError(
                f"rank {self.rank} lost the others: {first_line(error)} One of them has died, hangs or has lost its "
                "link: see what it says. `towpath doctor` examines the network."
            ) from error

    def print_once(self, text: str) -> None:
        """Print a line on stderr, on rank 0 only."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def mean(self, values: Tensor, groups: Groups | None = None) -> Callable[[], list[float]]:
        """Sum `values` over the ranks in place, and begin to copy them to the host. Every rank must call it.

        Return a function that returns the mean of each element. On a GPU it waits for the sum, and not for what was
        enqueued after it.
        """
        groups = groups or self.groups
        if groups.world > 1:
            # A device does not block the host. A CPU does, and would wait for a lost rank until gloo's timeout.
            work = dist.all_reduce(values, group=groups.parent, async_op=values.device.type != "cuda")
            Watchdog.of(self.groups).wait(work)
        if values.device.type != "cuda":
            return lambda: [value / groups.world for value in values.tolist()]
        on_host = torch.empty_like(values, device="cpu", pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(values.device))

        def read() -> list[float]:
            copied.synchronize()
            return [value / groups.world for value in on_host.tolist()]

        return read


@contextmanager
def init_distributed() -> Generator[Job]:
    """Join the launcher's process group, or the one that exists already. Without a launcher, this rank trains alone."""
    creates_group = not (dist.is_initialized() or alone())
    device = init() if creates_group or dist.is_initialized() else device_of_rank()
    try:
        groups = Groups()
        yield Job(groups, Topology(*detect_shape(groups)), device, groups.rank, groups.world)
    finally:
        if creates_group:
            dist.destroy_process_group()


@dataclass(slots=True)
class StopRequest:
    """The request to stop that a signal makes."""

    # Whether steps have begun. Before that there is nothing to save, and the first signal ends the process.
    steps_began: bool = False
    # The signal that this rank has received, or 0. Ranks exchange it in every step, and so stop after the same one.
    signal: int = 0


@contextmanager
def handle_signals() -> Generator[StopRequest]:
    """Let the first signal request a stop once steps have begun. A second signal has its usual effect.

    A rank that waits in C++ for a dead one cannot handle signals. Before the steps it then ends after 2 seconds, as the
    launcher that restarts the job waits for it. Later torchrun ends it, 30 seconds after the first.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # no other thread can handle signals
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.steps_began and not stop.signal:
            stop.signal = number
        elif callable(handler := before[signal.Signals(number)]):
            handler(number, frame)
        elif handler is not signal.SIG_IGN:
            sys.exit(128 + number)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    start_daemon("towpath-signals", partial(_end_start, reader, stop))
    outer = signal.set_wakeup_fd(writer)  # Python writes each signal there, also while the main thread is in C++
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(outer)
        os.close(writer)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_start(reader: int, stop: StopRequest) -> None:
    """End this process if a signal comes before the steps, and the main thread does not handle it in time."""
    with open(reader, "rb", buffering=0) as signals:
        while number := signals.read(1):
            in_time = select.select([signals], [], [], _HANDLED_SECONDS)[0]  # the end of the pipe, or another signal
            if number[0] in SIGNALS and not stop.steps_began and not in_time:
                os._exit(128 + number[0])


@dataclass(slots=True)
class StepAgreement:
    """The values on which all ranks agree in each step: the loss, the norm, and flags such as whether to save.

    The device sums the loss and the norm, and the host reads them in the next step. Flags are sent on the host while
    the step runs, and count at its end. With outer steps, the loss and the norm are those of an island. The loss of all
    islands is sent with the flags while the next step runs, so no step waits for the slow link.

    Attributes:
        flags: The shares of ranks that have set each flag, the same on every rank.
        loss_of_islands: With islands, the mean loss of all of them in the step before.
        weight: With islands, the rows of this one, next to those of the average island.
    """

    job: Job
    island: Groups | None = None
    flags: list[float] = field(default_factory=list[float])
    loss_of_islands: float | None = None
    weight: float = 1.0
    _under_way: tuple[dist.Work | None, Tensor] | None = None
    _groups: Groups = field(init=False)

    def __post_init__(self) -> None:
        # A thread of the engine sends by the group of all ranks meanwhile.
        self._groups = self.job.groups.apart("flags")

    def begin(self, flags: Sequence[float]) -> None:
        """Begin a step. Send this rank's flags, unless an island sends them at the end of the step."""
        if self.island is None:
            self._send([0.0, *flags])

    def sum(self, loss: Tensor, norm: Tensor) -> Callable[[], list[float]]:
        """Sum the loss and the norm over the ranks. Return a function that waits for their means, and returns them."""
        return cache(self.job.mean(torch.stack([loss.double(), norm.to(loss.device).double()]), self.island))

    def end(self, means: Callable[[], list[float]], flags: Sequence[float]) -> None:
        """End the step. `flags` are then the same on every rank. With islands, read the loss of the step."""
        self.flags = [0.0] * len(flags)
        self._receive()
        if self.island is not None:
            self._send([self.weight * means()[0], *flags])

    def finish(self, flags: Sequence[float]) -> None:
        """Agree once more after the last step, with nothing left under way."""
        self._receive()
        loss = self.loss_of_islands
        self._send([0.0, *flags])
        self._receive()
        self.loss_of_islands = loss

    def _send(self, row: Sequence[float]) -> None:
        sums, work = torch.tensor(row, dtype=torch.float64), None
        if self.job.world > 1:
            work = dist.all_reduce(sums, group=self._groups.parent, async_op=True)
        self._under_way = work, sums

    def _receive(self) -> None:
        """Wait for what was sent last."""
        if self._under_way is None:  # in the first step of an island
            return
        work, sums = self._under_way
        if work is not None:
            Watchdog.of(self.job.groups).wait(work)
        loss, *self.flags = (sums / self.job.world).tolist()
        self.loss_of_islands = None if self.island is None else loss
