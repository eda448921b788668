"""What was executed: every transfer, in order, with its bytes and seconds; and what the engine itself took."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import final

from towpath.core.strategy import Kind
from towpath.core.transfer import Transfer
from towpath.engine.activity import Event, Peers
from towpath.engine.host_clock import HostClock
from towpath.engine.profiled import profiled
from towpath.engine.timing import HostTimer, Mark, Timer
from towpath.engine.trace import Trace


@dataclass(frozen=True, slots=True)
class TransferStats:
    """One transfer of the schedule, over all its calls so far. Bytes: sent by all ranks of the job together."""

    transfer: Transfer
    calls: int
    intra_bytes: int
    inter_bytes: int
    seconds_in_flight: float
    seconds_exposed: float

    def since(self, earlier: TransferStats) -> TransferStats:
        return TransferStats(
            self.transfer,
            self.calls - earlier.calls,
            self.intra_bytes - earlier.intra_bytes,
            self.inter_bytes - earlier.inter_bytes,
            self.seconds_in_flight - earlier.seconds_in_flight,
            self.seconds_exposed - earlier.seconds_exposed,
        )

    def of_groups(self, count: int) -> TransferStats:
        """Of so many groups of ranks that all send this."""
        return replace(self, intra_bytes=count * self.intra_bytes, inter_bytes=count * self.inter_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Over all transfers since the start. Bytes: sent by all ranks together; seconds: this rank's."""

    calls: int = 0
    intra_bytes: int = 0
    inter_bytes: int = 0
    exposed_seconds: Mapping[Kind, float] = field(default_factory=dict[Kind, float])
    host_seconds: float = 0.0

    @property
    def seconds_exposed(self) -> float:
        return sum(self.exposed_seconds.values())

    def plus(self, other: Sums, sign: int = 1) -> Sums:
        kinds = (*self.exposed_seconds, *other.exposed_seconds)
        mine, theirs = self.exposed_seconds, other.exposed_seconds
        return Sums(
            calls=self.calls + sign * other.calls,
            intra_bytes=self.intra_bytes + sign * other.intra_bytes,
            inter_bytes=self.inter_bytes + sign * other.inter_bytes,
            exposed_seconds={k: mine.get(k, 0.0) + sign * theirs.get(k, 0.0) for k in kinds},
            host_seconds=self.host_seconds + sign * other.host_seconds,
        )

    def since(self, earlier: Sums) -> Sums:
        return self.plus(earlier, sign=-1)

    def of_groups(self, count: int) -> Sums:
        """Of so many groups of ranks that all send this."""
        return replace(self, intra_bytes=count * self.intra_bytes, inter_bytes=count * self.inter_bytes)


@dataclass(frozen=True, slots=True)
class _Span:
    """Some time of these transfers, which was not known yet when it was noted."""

    transfers: Sequence[Transfer]
    began: Mark
    ended: Mark
    exposed: bool


@dataclass(slots=True)
class _Total:
    """Of one transfer."""

    intra_bytes_each: int
    inter_bytes_each: int
    calls: int = 0
    seconds_in_flight: float = 0.0
    seconds_exposed: float = 0.0


# How many spans may wait for the device before they are looked at again.
_UNKNOWN = 1000


class Record:
    """The transfers of the running step and of the last whole one, totals since the start, and a trace if one is on."""

    def __init__(self, peers: Peers, timer: Timer) -> None:
        self.host = HostClock()
        self.peers, self.timer, self._host_timer = peers, timer, HostTimer()
        self.trace: Trace | None = None
        self._lock = threading.Lock()  # transfers run on threads
        self._unknown: list[_Span] = []
        self._look_again = _UNKNOWN  # at how many of these
        self._step: list[Transfer] = []
        self.last_step: tuple[Transfer, ...] = ()
        self._totals: dict[Transfer, _Total] = {}

    def submitted(self, transfers: Sequence[Transfer], micro_step: int) -> None:
        with self._lock:
            self._step += [transfer.in_micro_step(micro_step) for transfer in transfers]

    def so_far(self) -> int:
        """Return how many transfers of the running step were submitted."""
        return len(self._step)

    def forget_gathers(self, since: int) -> None:
        """Leave the gathers of a forward pass that no backward pass follows out of the step; it began at `since`."""
        with self._lock:
            self._step[since:] = [transfer for transfer in self._step[since:] if transfer.kind is not Kind.GATHER]

    def timer_of(self, transfers: Sequence[Transfer]) -> Timer:
        """The clock of whoever carries these out: what ranks compare travels between their hosts."""
        return self._host_timer if transfers and transfers[0].kind is Kind.USAGE else self.timer

    def end_step(self) -> None:
        with self._lock:
            self.last_step, self._step = tuple(self._step), []
            self._add_known()

    @contextmanager
    def running(self, transfers: Sequence[Transfer], micro_step: int) -> Generator[None]:
        """Around transfers that travel together: those that come to their end are counted, and timed."""
        activity, timer = self.peers.activity, self.timer_of(transfers)
        activity.begins(transfers)
        began = timer.mark()
        try:
            with profiled("", transfers):
                yield
            ended = timer.mark()
        finally:
            activity.ends()
        with self._lock:
            for transfer in transfers:
                self._total(transfer).calls += 1
            self._note(_Span(transfers, began, ended, exposed=False))
        if self.trace is not None:
            self.trace.transferred(transfers, began, ended, micro_step)

    def describe_ranks(self, others: Sequence[int]) -> str:
        """What this rank is doing, and what `others` last said of themselves."""
        peers = self.peers
        said = peers.describe(others)
        return f"This rank: {peers.activity.describe()}. What its peers last said of themselves:{said}"

    def waited(self, transfers: Sequence[Transfer], began: Mark, ended: Mark) -> None:
        """The computation waited for these transfers."""
        self.host.take_off(self.timer.host_seconds(began, ended))
        if not transfers:  # it was a queue's arithmetic
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
        if len(self._unknown) >= self._look_again:  # in inference no boundary comes
            self._add_known()

    def _add(self, span: _Span) -> None:
        """The seconds are shared out evenly."""
        seconds = self.timer.seconds(span.began, span.ended) / len(span.transfers)
        for transfer in span.transfers:
            if span.exposed:
                self._total(transfer).seconds_exposed += seconds
            else:
                self._total(transfer).seconds_in_flight += seconds

    def _add_known(self) -> None:
        spans, self._unknown = self._unknown, []
        self._look_again = 2 * len(spans) + _UNKNOWN  # not while they are looked at
        for span in spans:
            self._note(span)
        self._look_again = 2 * len(self._unknown) + _UNKNOWN

    def _total(self, transfer: Transfer) -> _Total:
        total = self._totals.get(transfer)  # looked up once: a transfer's hash is that of all it consists of
        if total is None:
            total = self._totals[transfer] = _Total(transfer.intra_bytes, transfer.inter_bytes)
        return total

    def begins(self, work: str, unit: str) -> None:
        """From here on the thread that trains computes this."""
        self.peers.activity.computes(work, unit)
        if self.trace is not None:
            self.trace.enter(work, unit or "root")

    def ends(self, work: str, unit: str | None) -> None:
        """No more of it; None: of no unit."""
        self.peers.activity.computes("outside the model" if unit in (None, "") else f"after {work}", unit or None)
        if self.trace is not None:
            self.trace.leave(work, None if unit is None else unit or "root")

    def totals(self) -> list[TransferStats]:
        with self._lock:
            self._add_known()
            return [
                TransferStats(
                    transfer,
                    total.calls,
                    total.calls * total.intra_bytes_each,
                    total.calls * total.inter_bytes_each,
                    total.seconds_in_flight,
                    total.seconds_exposed,
                )
                for transfer, total in self._totals.items()
                if total.calls
            ]

    def sums(self) -> Sums:
        """Quick: for a look after every step."""
        with self._lock:
            self._add_known()
            totals = list(self._totals.items())
        exposed: dict[Kind, float] = defaultdict(float)
        for transfer, total in totals:
            exposed[transfer.kind] += total.seconds_exposed
        return Sums(
            calls=sum(t.calls for _, t in totals),
            intra_bytes=sum(t.calls * t.intra_bytes_each for _, t in totals),
            inter_bytes=sum(t.calls * t.inter_bytes_each for _, t in totals),
            exposed_seconds=dict(exposed),
            host_seconds=self.host.seconds,
        )


@final
class Waits:
    """Somebody's waiting for these transfers."""

    def __init__(self, record: Record, transfers: Sequence[Transfer]) -> None:
        self._record, self._transfers = record, transfers

    def profiled(self) -> AbstractContextManager[object]:
        return profiled("wait ", self._transfers)

    def mark(self) -> Mark:
        return self._record.timer_of(self._transfers).mark()

    def waited(self, began: Mark, ended: Mark) -> None:
        self._record.waited(self._transfers, began, ended)

    def enqueued(self, end: Event) -> None:
        if self._transfers:
            self._record.peers.activity.enqueued(end, self._transfers)

    def still_waits(self) -> None:
        self._record.peers.raise_if_diverged()
