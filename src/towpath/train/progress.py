"""Progress on stderr: the live line of a training run, bars for long operations, and sizes and times as text.

step  120/1000  loss 3.2145  12.3k tok/s  MFU 41.2%  48.2 MB inter-node  12% exposed  1.52 GB  ETA 3:21
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import final

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from towpath.train.metrics import StepRow

# The remaining time is estimated from the mean of this many steps.
_RECENT = 20
# Seconds between plain lines, if there is no terminal: of a training run, and of other operations.
_SECONDS_BETWEEN_STEPS, _SECONDS_BETWEEN_LINES = 5.0, 2.0


@final
class StepProgress:
    """The live line of a training run. Without a terminal it prints a plain line every few seconds.

    Use it as a context, and call `show(row)` after each step.

    Args:
        steps: The steps of the whole run.
        console: The console to print to. The default is stderr.
        every: Steps between plain lines, or 0 for a line every few seconds. The first and last step always have one.
        quiet: Print nothing. Use it on all ranks except one.
    """

    def __init__(self, steps: int, *, console: Console | None = None, every: int = 0, quiet: bool = False) -> None:
        self._steps, self._every, self._quiet = steps, every, quiet
        self._console = console or Console(stderr=True, highlight=False)
        drawn = self._console.is_terminal and not quiet
        # Drawn after each step, without a thread.
        self._live = Live(console=self._console, auto_refresh=False) if drawn else None
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._since = math.inf  # seconds since the last plain line

    def __enter__(self) -> StepProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, row: StepRow) -> None:
        """Show a step that has ended."""
        self._recent.append(row.seconds)
        self._since += row.seconds
        if self._quiet:
            return
        if self._live is not None:
            self._live.update(Text(self._line(row), no_wrap=True, overflow="ellipsis"), refresh=True)
            return
        due = row.step % self._every == 0 if self._every else self._since >= _SECONDS_BETWEEN_STEPS
        if due or row.step == self._steps or math.isinf(self._since):
            self._since = 0.0
            self.note(self._line(row))

    def note(self, text: str) -> None:
        """Print a line that stays, such as a held-out loss."""
        if not self._quiet:
            self._console.print(Text(text), soft_wrap=True)

    def _line(self, row: StepRow) -> str:
        # At most a hundred columns, up to a hundred thousand steps.
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
    """Return a number of bytes as text with a decimal unit: 1 MB is a million bytes."""
    amount = float(count_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.4g} TB"


def duration(seconds: float) -> str:
    """Return seconds as minutes:seconds, or as hours and minutes."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}h{minutes:02}" if hours else f"{minutes}:{whole % 60:02}"


@contextmanager
def progress_bar(about: str) -> Generator[Callable[[int, int], None]]:
    """Show the progress of a long operation: a bar on a terminal, and otherwise a line now and then.

    Yields:
        A function to call with how much is done, and how much there is to do.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        last = time.monotonic()

        def line(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                print(f"{about}: {done / total:.0%}", file=sys.stderr, flush=True)

        yield line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(about, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def counting_bar(about: str, total: int) -> Generator[Callable[[int], None]]:
    """Show the progress of a long operation as `progress_bar` does.

    Yields:
        A function to call with how much was done since the last call.
    """
    done = 0
    with progress_bar(about) as progress:

        def advance(more: int) -> None:
            nonlocal done
            done += more
            progress(done, total)

        yield advance
