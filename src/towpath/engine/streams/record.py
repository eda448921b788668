"""What was executed: every transfer, in order, with its bytes and seconds; and what the engine itself took."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import final

from torch.autograd import profiler

from towpath.codecs.watched import Watch
from towpath.core.formats import Codec
from towpath.core.strategy import Kind
from towpath.core.transfer import Transfer
from towpath.engine.checks.activity import Event, StallMonitor
from towpath.engine.streams.streams import HostClock, HostTimer, Mark, Timer

# --- profiled ---------------------------------------------------------------------------------------------------------
#
# Ranges for `torch.profiler`: what a trace calls the submitting of a transfer, the waiting for it, and itself.
#
#     towpath submit gather blocks.3      on the training thread
#     towpath wait gather blocks.3        there, wherever it takes up what a transfer has brought
#     towpath gather blocks.3             on the thread, or the CUDA stream, that carries it out
#
# While nobody profiles, they cost the look whether somebody does.


_NOTHING = nullcontext()


def profiled(what: str, transfers: Sequence[Transfer]) -> AbstractContextManager[object]:
    """A range around what follows, named for `what` and the first of `transfers`; none where there is none."""
    # The same on every thread: that of a stream has no profiler of its own, and appears in traces of all threads.
    if not transfers or not profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
        return _NOTHING
    others = f" and {len(transfers) - 1} more" if len(transfers) > 1 else ""
    return profiler.record_function(f"towpath {what}{transfers[0].kind} {transfers[0].unit}{others}")


# --- trace ------------------------------------------------------------------------------------------------------------
#
# What the traced steps did on this rank, as intervals of time on tracks.
#
#     compute         what the thread that trains computes: each unit's forward and backward, and the loop's own phases
#     waiting         its holes: what it waited for, and how long
#     between nodes   transfers that send bytes over cables, while they are under way
#     inside nodes    transfers that send bytes inside nodes
#     codec NAME      encoding and decoding, one track a codec
#
# A time is marked before and after: on a CPU by the clock, on a GPU by an event in the stream that does the work,
# which is read when the trace ends. Bytes are those of all ranks together, as in `towpath.stats`.


COMPUTE, WAITING, BETWEEN, INSIDE, CODEC = "compute", "waiting", "between nodes", "inside nodes", "codec "
_REST: tuple[str, str] = ("rest of the step", "")

Args = dict[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """`start_seconds`: since all ranks began the trace together."""

    track: str
    name: str
    start_seconds: float
    seconds: float
    args: Args

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds


class Trace:
    """Being recorded until `end()`; then `intervals` has them all, in the order of their beginnings."""

    def __init__(self, timer: Timer) -> None:
        self.intervals: tuple[Interval, ...] = ()
        self._lock = threading.Lock()  # transfers run on threads
        self._marked: list[tuple[str, str, Mark, Mark, Args]] = []
        self._timer = timer
        timer.settle()  # all that is marked comes after the zero, on every stream
        self._zero = timer.mark()
        self._zero_on_host = self._zero if isinstance(self._zero, float) else time.perf_counter()
        self._doing: list[tuple[str, str]] = [_REST]  # what the thread that trains does, and around what
        self._waiting: set[str] = set()  # which of that is not computing
        self._since = self._zero

    def mark(self) -> Mark:
        return self._timer.mark()

    def add(self, track: str, name: str, began: Mark, ended: Mark, args: Args) -> None:
        with self._lock:
            self._marked.append((track, name, began, ended, args))

    def end(self) -> None:
        """Read all that was marked. Nothing may be under way."""
        self._switch()
        self._timer.settle()
        found = [self._interval(*marked) for marked in self._marked]
        self._marked.clear()
        # A change of what is computed right after another leaves nothing between them.
        kept = (i for i in found if i.seconds > 0 or i.track not in (COMPUTE, WAITING))
        self.intervals = tuple(sorted(kept, key=lambda i: i.start_seconds))

    def _interval(self, track: str, name: str, began: Mark, ended: Mark, args: Args) -> Interval:
        start = self._since_zero(began)
        seconds = max(0.0, self._since_zero(ended) - start)
        return Interval(track=track, name=name, start_seconds=start, seconds=seconds, args=args)

    def _since_zero(self, mark: Mark) -> float:
        return mark - self._zero_on_host if isinstance(mark, float) else self._timer.seconds(self._zero, mark)

    # The thread that trains -----------------------------------------------------------------------------------------

    def enter(self, work: str, unit: str = "") -> None:
        self._switch()
        self._doing.append((work, unit))

    def leave(self, work: str, unit: str | None = "") -> None:
        """It need not be what was entered last: units are through in the order of their gradients. None: all units."""
        self._switch()
        found = [i for i, doing in enumerate(self._doing) if doing[0] == work and unit in (None, doing[1])]
        for index in reversed(found if unit is None else found[-1:]):
            del self._doing[index]

    @contextmanager
    def phase(self, name: str, *, waiting: bool = False) -> Generator[None]:
        """The optimizer, the data, an evaluation: what the engine does not see. `waiting`: nothing is computed in it
        but what is entered inside."""
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
        """It did nothing but wait for these transfers."""
        self._computed(self._since, began)
        self._since = ended
        self.add(WAITING, _name(transfers), began, ended, _args(transfers))

    # Transfers ------------------------------------------------------------------------------------------------------

    def transferred(self, transfers: Sequence[Transfer], began: Mark, ended: Mark, micro_step: int) -> None:
        """These were one message, on every link class that it takes."""
        args = _args(transfers) | {"micro_step": micro_step}
        for track, sent_bytes in (
            (BETWEEN, sum(t.inter_bytes for t in transfers)),
            (INSIDE, sum(t.intra_bytes for t in transfers)),
        ):
            if sent_bytes:
                self.add(track, _name(transfers), began, ended, {**args, "bytes": sent_bytes})

    def watch_codecs(self, micro_step: int) -> Watch:
        """What the kernels tell that work for a transfer of this micro-step."""

        @contextmanager
        def coding(codec: Codec, work: str, elements: int) -> Generator[None]:
            began = self._timer.mark()
            yield
            args: Args = {"elements": elements, "micro_step": micro_step}
            self.add(f"{CODEC}{codec}", work, began, self._timer.mark(), args)

        return coding


def _name(transfers: Sequence[Transfer]) -> str:
    first = transfers[0]
    return first.kind.value if first.kind is Kind.USAGE else f"{first.kind.value} of {first.unit or 'root'}"


def _args(transfers: Sequence[Transfer]) -> Args:
    first = transfers[0]
    return {
        "kind": first.kind.value,
        "unit": first.unit or "root",
        "route": first.route,
        "codec": str(first.wire.codec),
        "calls": len(transfers),
    }


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

    def __init__(self, peers: StallMonitor, timer: Timer) -> None:
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
