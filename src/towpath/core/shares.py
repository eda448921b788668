"""Shares of ranks of unequal speed: the rows of a micro-batch that each rank takes, and when measured ones change."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final, Literal

from towpath.errors import ConfigError

# The relative speeds of all data-parallel ranks of a job. With "auto", they are measured.
Shares = tuple[float, ...] | Literal["auto"]

AUTO: Final = "auto"
# "auto" divides the rows anew if the speed of a rank has changed by this share, and the slowest rank gains the second.
DRIFT, GAIN = 0.1, 0.02
_NUMBER = r"(\d+\.?\d*|\.\d+)"  # a speed in a text, such as 2 or 0.5
# What each rank tells the others at a boundary: its tokens in the step, the seconds that it computes for a token (or
# 0), and how many micro-batches its sampler has drawn.
TOLD = Struct("<qdq")


def shares_of(value: Any) -> Shares | None:
    """Return `value` as shares: numbers, their text ("2,2,1,1"), "auto", or None. Raise ConfigError for others."""
    if value is None or value == AUTO:
        return value
    numbers: Any = value
    if isinstance(value, str):
        written = re.fullmatch(rf"{_NUMBER}(,{_NUMBER})*", value, re.ASCII)
        numbers = tuple(int(n) if n.isdecimal() else float(n) for n in value.split(",")) if written else None
    if not isinstance(numbers, (list, tuple)) or not numbers or not all(map(_is_speed, numbers)):
        raise ConfigError(
            f"shares={value!r}: expected a number above 0 for each data-parallel rank, such as (2, 2, 1, 1) if the "
            'last two ranks are half as fast, or "auto".'
        )
    return tuple(numbers)


def _is_speed(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def divided_rows(speeds: Sequence[float], total: int) -> tuple[int, ...]:
    """Return how many of `total` rows each rank takes, at least one, so that the slowest rank needs the least time."""
    if total < len(speeds):
        raise ConfigError(
            f"{total} rows for {len(speeds)} ranks: expected at least one row for each. Make the micro-batch larger."
        )
    rows = [1] * len(speeds)
    # Each further row goes to the rank that would finish first with it. No other division has a faster slowest rank.
    finishes = [(2 / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(finishes)
    for _ in range(total - len(speeds)):
        rank = finishes[0][1]
        rows[rank] += 1
        heapq.heapreplace(finishes, ((rows[rank] + 1) / speeds[rank], rank))
    return tuple(rows)


def adapted_rows(
    rows: tuple[int, ...], seconds: Sequence[float], before: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return the rows for ranks that compute so many seconds for a token: other ones than `rows` if that is worth it.

    `before`: The seconds that `rows` were chosen for. With None, no rank need have drifted.
    """
    best = divided_rows([1 / each for each in seconds], sum(rows))
    gains = _slowest(rows, seconds) > (1 + GAIN) * _slowest(best, seconds)
    has_drifted = before is None or any(
        abs(now - then) > DRIFT * then for now, then in zip(seconds, before, strict=True)
    )
    return best if gains and has_drifted else rows


def _slowest(rows: Sequence[int], seconds: Sequence[float]) -> float:
    return max(row * each for row, each in zip(rows, seconds, strict=True))
