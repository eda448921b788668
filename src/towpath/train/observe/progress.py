"""The live line of a training run; where nobody looks at a terminal, plain lines now and then.

step  120/1000  loss 3.2145  12.3k tok/s  MFU 41.2%  48.2 MB inter-node  12% exposed  1.52 GB  ETA 3:21
"""

from __future__ import annotations

import math
from collections import deque
from typing import final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from towpath.train.observe.metrics import StepRow

# The end is foretold by the mean of so many steps: recent ones, for the network changes; several, for steps vary.
_RECENT = 20
# A plain line at least so many seconds after the one before, unless asked for every so many steps.
_SECONDS_APART = 5.0


@final
class Progress:
    """`with Progress(steps) as progress:`, then `progress.show(row)` after each step. `quiet`: on all ranks but one.

    `every`: steps from one plain line to the next; 0: as many as take some seconds. The first and the last always come.
    """

    def __init__(self, steps: int, *, console: Console | None = None, every: int = 0, quiet: bool = False) -> None:
        self._steps, self._every, self._quiet = steps, every, quiet
        self._console = console or Console(stderr=True, highlight=False)
        # Drawn anew after each step, by nobody's thread.
        self._live = Live(console=self._console, auto_refresh=False) if self._drawn else None
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._since = math.inf  # seconds since the last plain line; none was yet

    @property
    def _drawn(self) -> bool:
        return self._console.is_terminal and not self._quiet

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, row: StepRow) -> None:
        self._recent.append(row.seconds)
        self._since += row.seconds
        if self._quiet:
            return
        if self._live is not None:
            self._live.update(Text(self._line(row), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._is_due(row.step):
            self._since = 0.0
            self._print(self._line(row))

    def note(self, text: str) -> None:
        """A line of its own, that stays: a validation loss, a checkpoint."""
        if not self._quiet:
            self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _is_due(self, step: int) -> bool:
        if step == self._steps or math.isinf(self._since):
            return True
        return step % self._every == 0 if self._every else self._since >= _SECONDS_APART

    def _line(self, row: StepRow) -> str:
        # A hundred columns at most, up to a hundred thousand steps.
        width = len(str(self._steps))
        parts = [
            f"{row.step:>{width}}/{self._steps}",
            f"loss {row.loss:#.5g}",
            f"{_short(row.tokens_per_second)} tok/s",
            "" if row.mfu is None else f"MFU {row.mfu:.1%}" if row.mfu < 0.1 else f"MFU {row.mfu:.0%}",
            f"inter {size(row.inter_bytes)}",
            f"exposed {row.exposed_share:.0%}",
            f"mem {size(row.memory_bytes)}",
            f"ETA {duration((self._steps - row.step) * sum(self._recent) / len(self._recent))}",
        ]
        return "  ".join(part for part in parts if part)


def _short(number: float) -> str:
    for unit in ("", "k", "M"):
        if not number >= 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}G"


def size(count_bytes: float) -> str:
    """As the network's makers count: 1 MB is a million bytes."""
    amount = float(count_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.4g} TB"


def duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}h{minutes:02}" if hours else f"{minutes}:{whole % 60:02}"
