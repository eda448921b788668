"""Numbers of a command line with the range that they must lie in: one error that names what was given and the range."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import typer


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` to `most`."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise typer.BadParameter(f"got {text}; expected a whole number from {least:,} to {most:,}")
        return value

    return integer


def above_zero(most: float) -> Callable[[str], float]:
    """Return a parser of numbers above 0, up to `most`."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not (isfinite(value) and 0 < value <= most):
            raise typer.BadParameter(f"got {text}; expected a number above 0, up to {most:,.0f}")
        return value

    return number
