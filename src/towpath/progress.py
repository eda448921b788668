"""Progress of long operations on stderr, and numbers of bytes as text. Nothing here imports torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 2.0  # if there is no terminal


def size(count_bytes: float) -> str:
    """Return a number of bytes as text with a decimal unit: 1 MB is a million bytes."""
    amount = float(count_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.4g} TB"


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
