"""Progress of what may take longer than two seconds: a bar on a terminal, else a line now and then; on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 2.0


@contextmanager
def progress_bar(about: str) -> Generator[Callable[[int, int], None]]:
    """Inside, call it with how much is done, and how much there is to do."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _lines(about)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(about, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def counting_bar(about: str, total: int) -> Generator[Callable[[int], None]]:
    """Inside, call it with how much was done since the last call."""
    done = 0
    with progress_bar(about) as progress:

        def advance(more: int) -> None:
            nonlocal done
            done += more
            progress(done, total)

        yield advance


def _lines(about: str) -> Callable[[int, int], None]:
    last = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{about}: {done / total:.0%}", file=sys.stderr, flush=True)

    return line
