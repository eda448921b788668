"""The clock by which shares are measured: how long a rank computes for a token, without its waits for other ranks."""

from __future__ import annotations

from statistics import median
from typing import final

from towpath.observe.record import Mark, Record

# Steps that are not measured before a window, because a process allocates and tunes in its first ones.
WARM_UP = 2
WINDOW = 5  # the steps of which the median counts


@final
class ComputeClock:
    """The seconds that this rank computes for a token, as the median of a few steps.

    It runs from the beginning of a forward pass until its loss is there, and in the backward pass. The waits for
    transfers, which `Record` reports, and the engine's own work do not count. On a GPU, events in the stream of the
    computation mark the times. The host reads them in a later step, when the device has passed them.
    """

    def __init__(self, record: Record) -> None:
        self._record, self._timer = record, record.timer
        self._left_out = WARM_UP  # steps until the next window begins
        self._began: tuple[Mark, float] | None = None
        self._spans: list[tuple[Mark, Mark, int]] = []  # of this step, each with its sign
        self._host = 0.0  # the engine's own seconds in them, where they are the computation's time
        self._steps: list[tuple[list[tuple[Mark, Mark, int]], float, int]] = []  # the tokens of each, and the above
        self._found: list[float] = []
        record.clock = self

    @property
    def is_running(self) -> bool:
        return self._began is not None

    def begin(self) -> None:
        """Run, if it does not run yet."""
        if self._began is None and not self._left_out:
            self._began = self._timer.mark(), self._record.host.seconds

    def end(self) -> None:
        """Stop, if it runs."""
        if self._began is not None:
            (began, host), self._began = self._began, None
            self._spans.append((began, self._timer.mark(), 1))
            if self._timer.is_free:
                self._host += self._record.host.seconds - host

    def waited(self, began: Mark, ended: Mark) -> None:
        """Subtract a wait for a transfer, if the clock runs."""
        if self._began is not None:
            self._spans.append((began, ended, -1))

    def drop_step(self) -> None:
        """Forget what was measured in this step."""
        self._began, self._spans, self._host = None, [], 0.0

    def end_step(self, tokens: int) -> float:
        """Begin the next step. Return the seconds for a token, or 0 before a window is complete."""
        if self._left_out:
            self._left_out -= 1
        elif tokens:
            self._steps.append((self._spans, self._host, tokens))
        self.drop_step()
        while self._steps and all(self._timer.is_known(ended) for _, ended, _ in self._steps[0][0]):
            spans, host, tokens = self._steps.pop(0)
            seconds = sum(sign * self._timer.seconds(began, ended) for began, ended, sign in spans) - host
            self._found.append(max(seconds, 1e-9) / tokens)
        return median(self._found) if len(self._found) >= WINDOW else 0.0

    def restart(self, after: int) -> None:
        """Begin another window after so many steps."""
        self._steps, self._found, self._left_out = [], [], after
