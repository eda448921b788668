"""The record of what ran: counts, bytes and seconds of the transfers of one model, and the intervals of traced steps.

The queues, the transfers and the engine report to `Record`. Its table has one row for each transfer, from which
`towpath.stats` and the trainer's metrics are derived. While a `Trace` runs, it gets intervals of time as well.

The begin and end of an interval are marked: on a CPU by the clock, on a GPU by an event in the stream that does the
work. The events are read when the trace ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import torch
from torch.autograd import profiler

from towpath.codecs.kernels import Watch
from towpath.collectives.collective import Workspace
from towpath.core.formats import Codec
from towpath.core.strategy import BETWEEN_HOSTS, OUTER_KINDS, TransferKind
from towpath.core.transfer import Transfer
from towpath.engine.agree.status import has_ended
from towpath.engine.agree.watchdog import Watchdog
from towpath.observe.totals import Totals, TransferStats
from towpath.observe.trace import BETWEEN, CODEC, COMPUTE, INSIDE, WAITING, Args, Interval

if TYPE_CHECKING:
    from towpath.engine.compute_clock import ComputeClock

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
        return not isinstance(mark, torch.cuda.Event) or has_ended(mark)

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

    def subtract(self, seconds: float) -> None:
        """Subtract seconds that were no bookkeeping, if the clock runs."""
        # If the clock stands, the seconds were never added.
        if self._running:
            self.seconds -= seconds


# Named ranges for `torch.profiler`.
#
#     towpath submit gather blocks.3      on the training thread
#     towpath wait gather blocks.3        on the training thread, wherever it waits for the transfer
#     towpath gather blocks.3             on the thread or CUDA stream that executes the transfer
#
# Without a profiler they cost only the check whether one is active.


_NOTHING = nullcontext()


def profiled(what: str, transfers: Sequence[Transfer]) -> AbstractContextManager[object]:
    """Return a range in PyTorch's profiler, named `what` and the first transfer. It does nothing without transfers."""
    # `_is_profiler_enabled` is one flag for all threads. A stream's thread has no profiler of its own, and appears in
    # traces of all threads.
    if not transfers or not profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
        return _NOTHING
    others = f" and {len(transfers) - 1} more" if len(transfers) > 1 else ""
    return profiler.record_function(f"towpath {what}{transfers[0].kind} {transfers[0].unit}{others}")


@dataclass(frozen=True, slots=True)
class _Span:
    """An interval in which `transfers` ran or, if `exposed`, were waited for. On a GPU it may not have ended yet."""

    transfers: Sequence[Transfer]
    began: Mark
    ended: Mark
    exposed: bool


_REST: tuple[str, str] = ("rest of the step", "")


class Trace:
    """The intervals of the traced steps of one rank. `intervals` is complete, and sorted by start, after `end()`.

    Until then, `Record` and the training loop report intervals to it.

    Args:
        timer: The clocks of the streams.
    """

    def __init__(self, timer: Timer) -> None:
        self.intervals: tuple[Interval, ...] = ()
        self._lock = threading.Lock()  # the threads of the streams add intervals, too
        self._marked: list[tuple[str, str, Mark, Mark, Args]] = []
        self._timer, self.mark = timer, timer.mark
        timer.settle()  # on every stream, later marks then follow the zero
        self._zero = timer.mark()
        self._zero_on_host = self._zero if isinstance(self._zero, float) else time.perf_counter()
        self._doing: list[tuple[str, str]] = [_REST]  # what the training thread does, outermost first
        self._waiting: set[str] = set()  # names of phases that count as waiting
        self._since = self._zero

    def add(self, track: str, name: str, began: Mark, ended: Mark, args: Args) -> None:
        """Add an interval between two marks. Any thread may call it."""
        with self._lock:
            self._marked.append((track, name, began, ended, args))

    def end(self) -> None:
        """End the trace and set `intervals`. No transfer may be under way."""
        self._switch()
        self._timer.settle()
        found = [self._interval(*marked) for marked in self._marked]
        self._marked.clear()
        # Two changes of the work right after each other leave an empty interval between them.
        kept = (i for i in found if i.seconds > 0 or i.track not in (COMPUTE, WAITING))
        self.intervals = tuple(sorted(kept, key=lambda i: i.start_seconds))

    def _interval(self, track: str, name: str, began: Mark, ended: Mark, args: Args) -> Interval:
        # What ranks compare is marked by the host's clock, also where a device does everything else.
        start, end = (
            mark - self._zero_on_host if isinstance(mark, float) else self._timer.seconds(self._zero, mark)
            for mark in (began, ended)
        )
        return Interval(track=track, name=name, start_seconds=start, seconds=max(0.0, end - start), args=args)

    def enter(self, work: str, unit: str = "") -> None:
        """Note that the training thread begins `work`, inside what it does already."""
        self._switch()
        self._doing.append((work, unit))

    def leave(self, work: str, unit: str | None = "") -> None:
        """Note that `work` on `unit` has ended; with None, that it has ended on all units.

        It need not be the work that was entered last, because units end in the order of their gradients.
        """
        self._switch()
        found = [i for i, doing in enumerate(self._doing) if doing[0] == work and unit in (None, doing[1])]
        for index in reversed(found if unit is None else found[-1:]):
            del self._doing[index]

    @contextmanager
    def phase(self, name: str, *, waiting: bool = False) -> Generator[None]:
        """Run work that the engine does not see, such as the optimizer's step or an evaluation.

        Args:
            name: The name of the interval.
            waiting: Whether the phase counts as waiting, except for work that is entered inside.
        """
        if waiting:
            self._waiting.add(name)
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def _switch(self) -> None:
        now = self._timer.mark()
        self._computed(self._since, now)
        self._since = now

    def _computed(self, began: Mark, ended: Mark) -> None:
        work, unit = self._doing[-1]
        self.add(
            WAITING if work in self._waiting else COMPUTE,
            f"{work} {unit}".rstrip(),
            began,
            ended,
            {"unit": unit} if unit else {},
        )

    def waited(self, transfers: Sequence[Transfer], began: Mark, ended: Mark) -> None:
        """Note that the training thread waited for these transfers between two marks."""
        self._computed(self._since, began)
        self._since = ended
        self.add(WAITING, _name(transfers), began, ended, _args(transfers))

    def transferred(
        self, transfers: Sequence[Transfer], began: Mark, ended: Mark, micro_step: int, sent: tuple[int, int]
    ) -> None:
        """Add the interval of these transfers, which were one message, to the tracks of all links that it used.

        `sent` has its bytes between nodes and inside nodes.
        """
        args = _args(transfers) | {"micro_step": micro_step}
        for track, sent_bytes in zip((BETWEEN, INSIDE), sent, strict=True):
            if sent_bytes:
                self.add(track, _name(transfers), began, ended, {**args, "bytes": sent_bytes})

    def watch_codecs(self, micro_step: int) -> Watch:
        """Return the function with which codec kernels report their work for a transfer of this micro-step."""

        @contextmanager
        def coding(codec: Codec, work: str, elements: int) -> Generator[None]:
            began = self._timer.mark()
            yield
            args: Args = {"elements": elements, "micro_step": micro_step}
            self.add(f"{CODEC}{codec}", work, began, self._timer.mark(), args)

        return coding


def _name(transfers: Sequence[Transfer]) -> str:
    first = transfers[0]
    return first.kind.value if first.kind in BETWEEN_HOSTS else f"{first.kind.value} of {first.unit or 'root'}"


def _args(transfers: Sequence[Transfer]) -> Args:
    first = transfers[0]
    return {
        "kind": first.kind.value,
        "unit": first.unit or "root",
        "route": first.route,
        "codec": first.encoding,
        "calls": len(transfers),
    }


# How many spans may wait for the device before `Record` checks which of them have ended.
_UNKNOWN = 1000


class Record:
    """The transfers of one model on one rank: those of the current step and of the last one, and all totals.

    `CommContext` makes it. The queues, the transfers and the engine report to it, and pass the reports on to `trace`
    while a trace is recorded. `host` measures the engine's own seconds. Calls are always counted. Where timing is not
    free, seconds are counted during a trace, and from the first call of `totals` on.
    """

    def __init__(self, watchdog: Watchdog, timer: Timer, islands: int = 1) -> None:
        self.islands = islands  # all of them send what this one sends
        self.host = HostClock()
        self.watchdog, self.timer, self._host_timer = watchdog, timer, Timer()
        self.trace: Trace | None = None
        self._is_read = False  # whether someone has read the seconds
        # Whether to count seconds where that is not free. By default from the first call of `totals` on.
        self.times: bool | None = None
        self.clock: ComputeClock | None = None  # of a model whose ranks are measured, to share out its batches
        self._lock = threading.Lock()  # the threads of the streams report, too
        self._unknown: list[_Span] = []
        self._look_again = _UNKNOWN  # the length of `_unknown` at which it is checked
        self._step: list[Transfer] = []
        self.last_step: tuple[Transfer, ...] = ()
        self._stats: dict[Transfer, TransferStats] = {}

    def submitted(self, transfers: Sequence[Transfer], micro_step: int) -> None:
        """Note transfers of the current step, in the order in which they are submitted."""
        with self._lock:
            self._step += [transfer.in_micro_step(micro_step) for transfer in transfers]

    def so_far(self) -> int:
        """Return how many transfers of the current step were submitted so far."""
        return len(self._step)

    def forget_gathers(self, since: int) -> None:
        """Remove the gathers that follow the first `since` transfers of the current step.

        They belong to a forward pass that no backward pass follows, which is no part of a step.
        """
        with self._lock:
            self._step[since:] = [
                transfer for transfer in self._step[since:] if transfer.kind is not TransferKind.GATHER
            ]

    def timer_of(self, transfers: Sequence[Transfer]) -> Timer:
        """Return the timer of the device that executes these transfers. The hosts send some of them."""
        return self._host_timer if transfers and transfers[0].between_hosts else self.timer

    def is_timed(self, transfers: Sequence[Transfer]) -> bool:
        """Return whether the seconds of these transfers, and of waits for them, are counted."""
        times = self._is_read if self.times is None else self.times
        times = times or (self.clock is not None and self.clock.is_running)
        return times or self.trace is not None or self.timer_of(transfers).is_free

    def end_step(self) -> None:
        """Note that the current step has ended, and begin the next one."""
        with self._lock:
            self.last_step, self._step = tuple(self._step), []
            self._add_known()

    @contextmanager
    def running(self, transfers: Sequence[Transfer], workspace: Workspace) -> Generator[None]:
        """Run transfers that are one message. Count them unless they raise, and time them if `is_timed`."""
        activity, timer = self.watchdog.status, self.timer_of(transfers)
        activity.begins(transfers)
        before = workspace.encoded_bytes
        began = timer.mark() if self.is_timed(transfers) else None
        try:
            with profiled("", transfers):
                yield
            ended = None if began is None else timer.mark()
        finally:
            activity.ends()
        # A plan knows only the most that a transfer with a coding may send. What it did send is known here. Such
        # transfers are never coalesced.
        values, messages = workspace.encoded_bytes[0] - before[0], workspace.encoded_bytes[1] - before[1]
        with self._lock:
            rows = [self._stats_of(transfer) for transfer in transfers]
            for row in rows:
                row.calls += 1
                row.coded_values += values
                row.coded_messages += messages
            if began is None or ended is None:
                return
            self._note(_Span(transfers, began, ended, exposed=False))
        if self.trace is not None:
            once = [replace(row, calls=1, coded_values=values, coded_messages=messages) for row in rows]
            inter, intra = sum(each.inter_bytes for each in once), sum(each.intra_bytes for each in once)
            self.trace.transferred(transfers, began, ended, workspace.micro_step, (inter, intra))

    def waited(self, transfers: Sequence[Transfer], began: Mark, ended: Mark) -> None:
        """Note that the computation waited for these transfers between two marks."""
        self.host.subtract(self.timer.host_seconds(began, ended))
        if self.clock is not None:
            self.clock.waited(began, ended)
        if not transfers:  # the job was arithmetic only
            return
        with self._lock:
            self._note(_Span(transfers, began, ended, exposed=True))
        if self.trace is not None:
            self.trace.waited(transfers, began, ended)

    def _note(self, span: _Span) -> None:
        if self.timer.is_known(span.ended):
            self._add(span)
            return
        self._unknown.append(span)
        if len(self._unknown) >= self._look_again:  # inference has no boundary at which they would be checked
            self._add_known()

    def _add(self, span: _Span) -> None:
        """Add the seconds of a span to its transfers, in equal shares."""
        seconds = self.timer.seconds(span.began, span.ended) / len(span.transfers)
        for transfer in span.transfers:
            if span.exposed:
                self._stats_of(transfer).seconds_exposed += seconds
            else:
                self._stats_of(transfer).seconds_in_flight += seconds

    def _add_known(self) -> None:
        spans, self._unknown = self._unknown, []
        self._look_again = 2 * len(spans) + _UNKNOWN  # `_note` must not check again inside this loop
        for span in spans:
            self._note(span)
        self._look_again = 2 * len(self._unknown) + _UNKNOWN

    def _stats_of(self, transfer: Transfer) -> TransferStats:
        stats = self._stats.get(transfer)  # one look-up, because this runs for each transfer and each wait
        if stats is None:
            # An exchange is one transfer of all islands.
            stats = TransferStats.of(transfer, 1 if transfer.kind in OUTER_KINDS else self.islands)
            self._stats[transfer] = stats
        return stats

    def begins(self, work: str, unit: str) -> None:
        """Note that the training thread begins `work` of `unit`."""
        self.watchdog.status.computes(work, unit)
        if self.trace is not None:
            self.trace.enter(work, unit or "root")

    def ends(self, work: str, unit: str | None) -> None:
        """Note that the training thread has ended `work` of `unit`; with None, of all units."""
        self.watchdog.status.computes("outside the model" if unit in (None, "") else f"after {work}", unit or None)
        if self.trace is not None:
            self.trace.leave(work, None if unit is None else unit or "root")

    def totals(self) -> Totals:
        self._is_read = True
        with self._lock:
            self._add_known()
            # Copies, because later calls change what is counted here.
            transfers = tuple(replace(each) for each in self._stats.values() if each.calls)
        return Totals(transfers=transfers, seconds_host=self.host.seconds)


@final
class TransferWait:
    """A wait for these transfers. The handle of their job reports to it, and it reports to the record."""

    def __init__(self, record: Record, transfers: Sequence[Transfer]) -> None:
        self._record, self._transfers = record, transfers

    def profiled(self) -> AbstractContextManager[object]:
        return profiled("wait ", self._transfers)

    @property
    def is_timed(self) -> bool:
        return self._record.is_timed(self._transfers)

    def mark(self) -> Mark:
        return self._record.timer_of(self._transfers).mark()

    def waited(self, began: Mark, ended: Mark) -> None:
        self._record.waited(self._transfers, began, ended)

    def enqueued(self, end: torch.cuda.Event) -> None:
        """Note that the transfers were enqueued on a device. The event `end` follows them."""
        if self._transfers:
            self._record.watchdog.status.enqueued(end, self._transfers)

    def raise_if_stuck(self) -> None:
        """Raise StepError if the wait can never end."""
        self._record.watchdog.raise_if_diverged()
