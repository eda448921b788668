"""Records of the transfers that were executed: their order, bytes and seconds, and the engine's own seconds.

`Record` counts and times the transfers of one model, for `towpath.stats`. `Trace` adds the intervals of time of single
steps, for `towpath.tracing`.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import final

from torch.autograd import profiler

from towpath.codecs.kernels import Watch
from towpath.core.exact import exact_codec
from towpath.core.formats import Codec
from towpath.core.strategy import BETWEEN_HOSTS, TransferKind
from towpath.core.transfer import Transfer
from towpath.engine.checks.activity import Event, StallMonitor
from towpath.engine.streams.streams import HostClock, HostTimer, Mark, Timer

# --- profiled ---------------------------------------------------------------------------------------------------------
#
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


# --- trace ------------------------------------------------------------------------------------------------------------
#
# The traced steps of this rank, as intervals of time on tracks.
#
#     compute         what the training thread computes: the forward and backward of each unit, and the loop's phases
#     waiting         what the training thread waited for
#     between nodes   transfers that send bytes between nodes
#     inside nodes    transfers that send bytes inside nodes
#     codec NAME      encoding and decoding, one track per codec
#
# The begin and end of an interval are marked: on a CPU by the clock, on a GPU by an event in the stream that does the
# work. The events are read when the trace ends. Bytes are those that all ranks send together, as in `towpath.stats`.


COMPUTE, WAITING, BETWEEN, INSIDE, CODEC = "compute", "waiting", "between nodes", "inside nodes", "codec "
_REST: tuple[str, str] = ("rest of the step", "")

Args = dict[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One interval of time on a track of a trace.

    Args:
        track: The row of the trace, such as "compute".
        name: What ran, such as "forward blocks.3".
        start_seconds: Seconds since the start of the trace, which is the same moment on all ranks.
        seconds: The duration.
        args: Further facts, by name, such as the bytes of a transfer.
    """

    track: str
    name: str
    start_seconds: float
    seconds: float
    args: Args

    @property
    def end_seconds(self) -> float:
        """End of the interval, in seconds from the start of the trace."""
        return self.start_seconds + self.seconds


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
        self._timer = timer
        timer.settle()  # on every stream, later marks then follow the zero
        self._zero = timer.mark()
        self._zero_on_host = self._zero if isinstance(self._zero, float) else time.perf_counter()
        self._doing: list[tuple[str, str]] = [_REST]  # what the training thread does, outermost first
        self._waiting: set[str] = set()  # names of phases that count as waiting
        self._since = self._zero

    def mark(self) -> Mark:
        """Return a mark of the current time."""
        return self._timer.mark()

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
        start = self._since_zero(began)
        seconds = max(0.0, self._since_zero(ended) - start)
        return Interval(track=track, name=name, start_seconds=start, seconds=seconds, args=args)

    def _since_zero(self, mark: Mark) -> float:
        return mark - self._zero_on_host if isinstance(mark, float) else self._timer.seconds(self._zero, mark)

    # The training thread --------------------------------------------------------------------------------------------

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

    # Transfers ------------------------------------------------------------------------------------------------------

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
        "codec": exact_codec(first.move.op) if first.exact else str(first.transport.codec),
        "calls": len(transfers),
    }


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
        """Return what was added since `earlier`."""
        return TransferStats(
            self.transfer,
            self.calls - earlier.calls,
            self.intra_bytes - earlier.intra_bytes,
            self.inter_bytes - earlier.inter_bytes,
            self.seconds_in_flight - earlier.seconds_in_flight,
            self.seconds_exposed - earlier.seconds_exposed,
        )

    def plus(self, other: TransferStats) -> TransferStats:
        """Return the sum of both, for stats of the same transfer."""
        return TransferStats(
            self.transfer,
            self.calls + other.calls,
            self.intra_bytes + other.intra_bytes,
            self.inter_bytes + other.inter_bytes,
            self.seconds_in_flight + other.seconds_in_flight,
            self.seconds_exposed + other.seconds_exposed,
        )

    def of_groups(self, count: int) -> TransferStats:
        """Return the total of `count` groups of ranks that all send this. Seconds stay those of one rank."""
        return replace(self, intra_bytes=count * self.intra_bytes, inter_bytes=count * self.inter_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """The sums over all transfers since the start. Bytes are those of all ranks together, seconds are this rank's.

    `exact_bytes` are those that this rank saw encoded, by exact codec and dtype: of values, and of their messages.
    """

    calls: int = 0
    intra_bytes: int = 0
    inter_bytes: int = 0
    exact_bytes: Mapping[tuple[str, str], tuple[int, int]] = field(
        default_factory=dict[tuple[str, str], tuple[int, int]]
    )
    exposed_seconds: Mapping[TransferKind, float] = field(default_factory=dict[TransferKind, float])
    host_seconds: float = 0.0

    @property
    def seconds_exposed(self) -> float:
        """Seconds in which the computation waited for transfers of any kind."""
        return sum(self.exposed_seconds.values())

    @property
    def exact_shares(self) -> dict[tuple[str, str], float]:
        """The bytes of exact messages as a share of their values, by codec and dtype."""
        return {key: messages / values for key, (values, messages) in self.exact_bytes.items() if values}

    def plus(self, other: Sums, sign: int = 1) -> Sums:
        """Return the sum of both, or the difference with `sign=-1`."""
        none = (0, 0)
        encoded = {
            key: (mine[0] + sign * theirs[0], mine[1] + sign * theirs[1])
            for key in {**self.exact_bytes, **other.exact_bytes}
            for mine, theirs in [(self.exact_bytes.get(key, none), other.exact_bytes.get(key, none))]
        }
        kinds = (*self.exposed_seconds, *other.exposed_seconds)
        mine, theirs = self.exposed_seconds, other.exposed_seconds
        return Sums(
            calls=self.calls + sign * other.calls,
            intra_bytes=self.intra_bytes + sign * other.intra_bytes,
            inter_bytes=self.inter_bytes + sign * other.inter_bytes,
            exact_bytes=encoded,
            exposed_seconds={k: mine.get(k, 0.0) + sign * theirs.get(k, 0.0) for k in kinds},
            host_seconds=self.host_seconds + sign * other.host_seconds,
        )

    def since(self, earlier: Sums) -> Sums:
        """Return what was added since `earlier`."""
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
    """The running totals of one transfer. Each call sends at most these bytes, and less if the transfer is exact."""

    intra_bytes_each: int
    inter_bytes_each: int
    encoded_inside: bool
    calls: int = 0
    seconds_in_flight: float = 0.0
    seconds_exposed: float = 0.0
    exact_values: int = 0
    exact_messages: int = 0

    @property
    def sent(self) -> tuple[int, int]:
        """The bytes sent between nodes so far, and inside nodes."""
        return self.sent_since(0, 0, 0)

    def sent_since(self, calls: int, values: int, messages: int) -> tuple[int, int]:
        """Return the bytes sent between nodes, and inside nodes, since there were so many calls and exact bytes.

        An exact transfer is scaled by what this rank has seen of it.
        """
        values, messages = self.exact_values - values, self.exact_messages - messages
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

    def __init__(self, peers: StallMonitor, timer: Timer) -> None:
        self.host = HostClock()
        self.peers, self.timer, self._host_timer = peers, timer, HostTimer()
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
        activity, timer = self.peers.activity, self.timer_of(transfers)
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
        """Return the calls of each transfer so far, and the bytes of its exact values and messages."""
        with self._lock:
            return [(t.calls, t.exact_values, t.exact_messages) for t in map(self._total, transfers)]

    def encoded(self, transfer: Transfer, values: int, messages: int) -> None:
        """Note that an exact transfer encoded `values` bytes of values in `messages` bytes of messages."""
        with self._lock:
            total = self._total(transfer)
            total.exact_values += values
            total.exact_messages += messages

    def describe_ranks(self, others: Sequence[int]) -> str:
        """Return this rank's status, and the last status that `others` have posted."""
        peers = self.peers
        said = peers.describe(others)
        return f"This rank: {peers.activity.describe()}. What its peers last said of themselves:{said}"

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
            total = _Total(transfer.intra_bytes, transfer.inter_bytes, transfer.encoded_inside)
            self._totals[transfer] = total
        return total

    def begins(self, work: str, unit: str) -> None:
        """Note that the training thread begins `work` of `unit`."""
        self.peers.activity.computes(work, unit)
        if self.trace is not None:
            self.trace.enter(work, unit or "root")

    def ends(self, work: str, unit: str | None) -> None:
        """Note that the training thread has ended `work` of `unit`; with None, of all units."""
        self.peers.activity.computes("outside the model" if unit in (None, "") else f"after {work}", unit or None)
        if self.trace is not None:
            self.trace.leave(work, None if unit is None else unit or "root")

    def totals(self) -> list[TransferStats]:
        """Return the totals of every transfer that was executed."""
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
            if total.exact_values:
                key = exact_codec(transfer.move.op), transfer.dtype
                values, messages = encoded.get(key, (0, 0))
                encoded[key] = values + total.exact_values, messages + total.exact_messages
        return Sums(
            calls=sum(t.calls for _, t in totals),
            intra_bytes=sum(t.sent[1] for _, t in totals),
            inter_bytes=sum(t.sent[0] for _, t in totals),
            exact_bytes=encoded,
            exposed_seconds=dict(exposed),
            host_seconds=self.host.seconds,
        )


@final
class TransferWait:
    """A wait for these transfers. The handle of their job reports to it (`Waiting`), and it reports to the record."""

    def __init__(self, record: Record, transfers: Sequence[Transfer]) -> None:
        self._record, self._transfers = record, transfers

    def profiled(self) -> AbstractContextManager[object]:
        """Return a profiler range to wait in."""
        return profiled("wait ", self._transfers)

    @property
    def is_timed(self) -> bool:
        """Whether the record counts the seconds of this wait."""
        return self._record.is_timed(self._transfers)

    def mark(self) -> Mark:
        """Return a mark of the current time."""
        return self._record.timer_of(self._transfers).mark()

    def waited(self, began: Mark, ended: Mark) -> None:
        """Note a wait between two marks."""
        self._record.waited(self._transfers, began, ended)

    def enqueued(self, end: Event) -> None:
        """Note that the transfers were enqueued on a device. The event `end` follows them."""
        if self._transfers:
            self._record.peers.activity.enqueued(end, self._transfers)

    def raise_if_stuck(self) -> None:
        """Raise StepError if the wait can never end."""
        self._record.peers.raise_if_diverged()
