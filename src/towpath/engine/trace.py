"""What the traced steps did on this rank, as intervals of time on tracks.

    compute         what the thread that trains computes: each unit's forward and backward, and the loop's own phases
    waiting         its holes: what it waited for, and how long
    between nodes   transfers that send bytes over cables, while they are under way
    inside nodes    transfers that send bytes inside nodes
    codec NAME      encoding and decoding, one track a codec

A time is marked before and after: on a CPU by the clock, on a GPU by an event in the stream that does the work, which
is read when the trace ends. Bytes are those of all ranks together, as in `towpath.stats`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from towpath.codecs.watched import Watch
from towpath.core.formats import Codec
from towpath.core.strategy import Kind
from towpath.core.transfer import Transfer
from towpath.engine.timing import Mark, Timer

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
