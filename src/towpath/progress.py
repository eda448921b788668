"""Progress of long operations on stderr, and numbers of bytes as text. Nothing here imports torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console

_SECONDS_BETWEEN_LINES = 2.0  # if there is no terminal


def format_bytes(count_bytes: float) -> str:
    """Return a number of bytes as text with a decimal unit: 1 MB is a million bytes."""
    amount = float(count_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.4g} TB"


def format_rate(bytes_per_second: float) -> str:
    """Return the rate of a link as text in bits per second. There is no Tbit/s: networks are named by their Gbit/s."""
    gigabits = bytes_per_second * 8 / 1e9
    amount, unit = (gigabits, "Gbit/s") if gigabits >= 0.9995 else (gigabits * 1000, "Mbit/s")
    return f"{float(f'{amount:.3g}'):,g} {unit}"


@contextmanager
def show_progress(about: str) -> Generator[Callable[[str], object]]:
    """Show that something takes long: a spinner on a terminal, and otherwise a line on stderr now and then.

    Yields:
        A function to call with what is being done now.
    """
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(about) as status:
            yield status.update
        return
    last = time.monotonic()

    def line(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    yield line
