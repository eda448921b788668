"""The traced steps of this rank, as intervals of time on tracks.

    compute         what the training thread computes: the forward and backward of each unit, and the loop's phases
    waiting         what the training thread waited for
    between nodes   transfers that send bytes between nodes
    inside nodes    transfers that send bytes inside nodes
    codec NAME      encoding and decoding, one track per codec

The begin and end of an interval are marked: on a CPU by the clock, on a GPU by an event in the stream that does the
work. The events are read when the trace ends. Bytes are those that all ranks send together, as in `towpath.stats`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from towpath.codecs.kernels import Watch
from towpath.core.formats import Codec
from towpath.core.strategy import BETWEEN_HOSTS
from towpath.core.transfer import Transfer
from towpath.engine.timing import Mark, Timer

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
        "codec": first.encoding,
        "calls": len(transfers),
    }
