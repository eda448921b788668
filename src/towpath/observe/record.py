"""Records of the transfers that were executed: their order, bytes and seconds, and the engine's own seconds.

`Record` counts and times the transfers of one model, for `towpath.stats`. While a `Trace` runs (`trace.py`), it also
gets the intervals of time of single steps.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch.autograd import profiler

from towpath.core.strategy import BETWEEN_HOSTS, OUTER_KINDS, TransferKind
from towpath.core.transfer import Transfer
from towpath.engine.agree.watchdog import Watchdog
from towpath.engine.timing import HostClock, Mark, Timer
from towpath.observe.trace import Trace

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
class TransferStats:
    """The calls, bytes and seconds of one transfer so far.

    Bytes are those that all ranks of the job send together. Seconds are this rank's.
    """

    transfer: Transfer
    calls: int
    intra_bytes: int
    inter_bytes: int
    seconds_in_flight: float
    seconds_exposed: float

    def since(self, earlier: TransferStats) -> TransferStats:
        return self.plus(earlier, sign=-1)

    def plus(self, other: TransferStats, sign: int = 1) -> TransferStats:
        """Return the sum of both, or the difference with `sign=-1`, for stats of the same transfer."""
        return TransferStats(
            self.transfer,
            self.calls + sign * other.calls,
            self.intra_bytes + sign * other.intra_bytes,
            self.inter_bytes + sign * other.inter_bytes,
            self.seconds_in_flight + sign * other.seconds_in_flight,
            self.seconds_exposed + sign * other.seconds_exposed,
        )

    def of_groups(self, count: int) -> TransferStats:
        """Return the total of `count` groups of ranks that all send this. Seconds stay those of one rank."""
        return replace(self, intra_bytes=count * self.intra_bytes, inter_bytes=count * self.inter_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """The sums over all transfers since the start. Bytes are those of all ranks together, seconds are this rank's.

    `coded_bytes` are those that this rank saw encoded, by coding: of values, and of their messages.
    """

    calls: int = 0
    intra_bytes: int = 0
    inter_bytes: int = 0
    coded_bytes: Mapping[tuple[str, str], tuple[int, int]] = field(
        default_factory=dict[tuple[str, str], tuple[int, int]]
    )
    exposed_seconds: Mapping[TransferKind, float] = field(default_factory=dict[TransferKind, float])
    host_seconds: float = 0.0

    @property
    def seconds_exposed(self) -> float:
        return sum(self.exposed_seconds.values())

    @property
    def encoded_shares(self) -> dict[tuple[str, str], float]:
        """The bytes of messages as a share of their values, by coding."""
        return {key: messages / values for key, (values, messages) in self.coded_bytes.items() if values}

    def plus(self, other: Sums, sign: int = 1) -> Sums:
        """Return the sum of both, or the difference with `sign=-1`."""
        none = (0, 0)
        encoded = {
            key: (mine[0] + sign * theirs[0], mine[1] + sign * theirs[1])
            for key in {**self.coded_bytes, **other.coded_bytes}
            for mine, theirs in [(self.coded_bytes.get(key, none), other.coded_bytes.get(key, none))]
        }
        kinds = (*self.exposed_seconds, *other.exposed_seconds)
        mine, theirs = self.exposed_seconds, other.exposed_seconds
        return Sums(
            calls=self.calls + sign * other.calls,
            intra_bytes=self.intra_bytes + sign * other.intra_bytes,
            inter_bytes=self.inter_bytes + sign * other.inter_bytes,
            coded_bytes=encoded,
            exposed_seconds={k: mine.get(k, 0.0) + sign * theirs.get(k, 0.0) for k in kinds},
            host_seconds=self.host_seconds + sign * other.host_seconds,
        )

    def since(self, earlier: Sums) -> Sums:
        return self.plus(earlier, sign=-1)

    def of_groups(self, count: int) -> Sums:
        """Return the total of `count` groups of ranks that all send this. Seconds stay those of one rank."""
        return replace(self, intra_bytes=count * self.intra_bytes, inter_bytes=count * self.inter_bytes)


@dataclass(frozen=True, slots=True)
class _Span:
    """An interval in which `transfers` ran or, if `exposed`, were waited for. On a GPU it may not have ended yet."""

    transfers: Sequence[Transfer]
    began: Mark
    ended: Mark
    exposed: bool


@dataclass(slots=True)
class _Total:
    """The running totals of one transfer. Each call sends at most these bytes, and less with a coding."""

    intra_bytes_each: int
    inter_bytes_each: int
    encoded_inside: bool
    calls: int = 0
    seconds_in_flight: float = 0.0
    seconds_exposed: float = 0.0
    coded_values: int = 0
    coded_messages: int = 0

    @property
    def sent(self) -> tuple[int, int]:
        """The bytes sent between nodes so far, and inside nodes."""
        return self.sent_since(0, 0, 0)

    def sent_since(self, calls: int, values: int, messages: int) -> tuple[int, int]:
        """Return the bytes sent between nodes, and inside nodes, since there were so many calls and coded bytes.

        A transfer with a coding is scaled by what this rank has seen of it.
        """
        values, messages = self.coded_values - values, self.coded_messages - messages
        share = messages / values if values else 1.0
        inter, intra = ((self.calls - calls) * each for each in (self.inter_bytes_each, self.intra_bytes_each))
        return round(share * inter), round(share * intra) if self.encoded_inside else intra


# How many spans may wait for the device before `Record` checks which of them have ended.
_UNKNOWN = 1000


class Record:
    """The transfers of one model on one rank: those of the current step and of the last one, and all totals.

    `CommContext` makes it. The queues, the transfers and the engine report to it, and pass the reports on to `trace`
    while a trace is recorded. `host` measures the engine's own seconds. Calls are always counted. Where timing is not
    free, seconds are counted during a trace, and from the first call of `totals` or `sums` on.
    """

    def __init__(self, watchdog: Watchdog, timer: Timer, islands: int = 1) -> None:
        self._islands = islands  # all of them send what this one sends
        self.host = HostClock()
        self.watchdog, self.timer, self._host_timer = watchdog, timer, Timer()
        self.trace: Trace | None = None
        self._is_read = False  # whether someone has read the seconds
        self._lock = threading.Lock()  # the threads of the streams report, too
        self._unknown: list[_Span] = []
        self._look_again = _UNKNOWN  # the length of `_unknown` at which it is checked
        self._step: list[Transfer] = []
        self.last_step: tuple[Transfer, ...] = ()
        self._totals: dict[Transfer, _Total] = {}

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
        """Return the timer of the device that executes these transfers. What ranks compare is sent by the hosts."""
        return self._host_timer if transfers and transfers[0].kind in BETWEEN_HOSTS else self.timer

    def is_timed(self, transfers: Sequence[Transfer]) -> bool:
        """Return whether the seconds of these transfers, and of waits for them, are counted."""
        return self._is_read or self.trace is not None or self.timer_of(transfers).is_free

    def end_step(self) -> None:
        """Note that the current step has ended, and begin the next one."""
        with self._lock:
            self.last_step, self._step = tuple(self._step), []
            self._add_known()

    @contextmanager
    def running(self, transfers: Sequence[Transfer], micro_step: int) -> Generator[None]:
        """Run transfers that are one message. Count them unless they raise, and time them if `is_timed`."""
        activity, timer = self.watchdog.status, self.timer_of(transfers)
        activity.begins(transfers)
        began = timer.mark() if self.is_timed(transfers) else None
        before = self._counts(transfers) if self.trace is not None else None
        try:
            with profiled("", transfers):
                yield
            ended = None if began is None else timer.mark()
        finally:
            activity.ends()
        with self._lock:
            for transfer in transfers:
                self._total(transfer).calls += 1
            if began is None or ended is None:
                return
            self._note(_Span(transfers, began, ended, exposed=False))
        if self.trace is not None and before is not None:
            sent = [self._totals[t].sent_since(*counts) for t, counts in zip(transfers, before, strict=True)]
            inter, intra = map(sum, zip(*sent, strict=True))
            self.trace.transferred(transfers, began, ended, micro_step, (inter, intra))

    def _counts(self, transfers: Sequence[Transfer]) -> list[tuple[int, int, int]]:
        """Return the calls of each transfer so far, and the bytes of its coded values and their messages."""
        with self._lock:
            return [(t.calls, t.coded_values, t.coded_messages) for t in map(self._total, transfers)]

    def encoded(self, transfer: Transfer, values: int, messages: int) -> None:
        """Note that a transfer encoded `values` bytes of values in `messages` bytes of messages."""
        with self._lock:
            total = self._total(transfer)
            total.coded_values += values
            total.coded_messages += messages

    def waited(self, transfers: Sequence[Transfer], began: Mark, ended: Mark) -> None:
        """Note that the computation waited for these transfers between two marks."""
        self.host.take_off(self.timer.host_seconds(began, ended))
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
                self._total(transfer).seconds_exposed += seconds
            else:
                self._total(transfer).seconds_in_flight += seconds

    def _add_known(self) -> None:
        spans, self._unknown = self._unknown, []
        self._look_again = 2 * len(spans) + _UNKNOWN  # `_note` must not check again inside this loop
        for span in spans:
            self._note(span)
        self._look_again = 2 * len(self._unknown) + _UNKNOWN

    def _total(self, transfer: Transfer) -> _Total:
        total = self._totals.get(transfer)  # one look-up, because hashing a transfer is slow
        if total is None:
            # An exchange is one transfer of all islands.
            count = 1 if transfer.kind in OUTER_KINDS else self._islands
            total = _Total(count * transfer.intra_bytes, count * transfer.inter_bytes, transfer.encoded_inside)
            self._totals[transfer] = total
        return total

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

    def totals(self) -> list[TransferStats]:
        self._is_read = True
        with self._lock:
            self._add_known()
            return [
                TransferStats(transfer, total.calls, intra, inter, total.seconds_in_flight, total.seconds_exposed)
                for transfer, total in self._totals.items()
                for inter, intra in [total.sent]
                if total.calls
            ]

    def sums(self) -> Sums:
        """Return the sums over all transfers. It is fast enough to be called after every step."""
        self._is_read = True
        with self._lock:
            self._add_known()
            totals = list(self._totals.items())
        exposed: dict[TransferKind, float] = defaultdict(float)
        encoded: dict[tuple[str, str], tuple[int, int]] = {}
        for transfer, total in totals:
            exposed[transfer.kind] += total.seconds_exposed
            if total.coded_values and (key := transfer.coding) is not None:
                values, messages = encoded.get(key, (0, 0))
                encoded[key] = values + total.coded_values, messages + total.coded_messages
        return Sums(
            calls=sum(t.calls for _, t in totals),
            intra_bytes=sum(t.sent[1] for _, t in totals),
            inter_bytes=sum(t.sent[0] for _, t in totals),
            coded_bytes=encoded,
            exposed_seconds=dict(exposed),
            host_seconds=self.host.seconds,
        )


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
