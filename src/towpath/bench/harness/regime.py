"""A regime is FSDP2's communication alone over the bare module's compute; the rate of the cables follows from the host.

A race at a rate says little beyond the machine it ran on: one with faster cores is another race. So a case asks for a
multiple, and the rate that gives it is looked for before each race, by measuring both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from towpath.bench.harness.failure import CaseError
from towpath.lab import Rate

FIRST = Rate.parse("200mbit")
TOLERANCE = 0.1
MOST_TRIALS = 6
_SLOWEST, _FASTEST = 10**6, 40 * 10**9


class RegimeError(CaseError):
    """No cable gives this regime on this host: what was tried, and what can be asked for instead."""


@dataclass(frozen=True, slots=True)
class Trial:
    inter: str
    communication_seconds: float
    compute_seconds: float

    @property
    def regime(self) -> float:
        return self.communication_seconds / self.compute_seconds


@dataclass(frozen=True, slots=True)
class Derived:
    """The rate, and every trial on the way; the last is the one of this rate."""

    asked: float
    rate: Rate
    trials: tuple[Trial, ...]

    @property
    def found(self) -> float:
        return self.trials[-1].regime

    @property
    def reached(self) -> bool:
        return near(self.found, self.asked)

    def recorded(self) -> dict[str, Any]:
        trials = [asdict(trial) | {"regime": round(trial.regime, 3)} for trial in self.trials]
        return {"asked": self.asked, "found before": round(self.found, 3), "inter": str(self.rate), "trials": trials}


def near(found: float, asked: float) -> bool:
    return abs(found / asked - 1) <= TOLERANCE


def derive(
    asked: float,
    measure: Callable[[Rate], Trial],
    say: Callable[[str], None],
    first: Rate = FIRST,
    known: Sequence[tuple[Rate, Trial]] = (),
) -> Derived:
    """Try rates until one gives the regime asked for; after the last trial, the nearest of them, tried once more.

    `known`: trials of other regimes of the same workload, which tell a better first rate than `first`.
    """
    tried: list[tuple[Rate, Trial]] = []
    rate = first
    if known:
        with suppress(RegimeError):  # what they say of a rate far from theirs may be nonsense
            rate = next_rate(asked, list(known))
    for _ in range(MOST_TRIALS):
        trial = measure(rate)
        tried.append((rate, trial))
        say(f"at {rate} FSDP2 communicates {trial.regime:.2f} times as long as the module computes (asked {asked:g})")
        if near(trial.regime, asked):
            break
        rate = next_rate(asked, tried)
    else:
        rate = min(tried, key=lambda each: abs(each[1].regime / asked - 1))[0]
        tried.append((rate, measure(rate)))
    return Derived(asked, rate, tuple(trial for _, trial in tried))


def next_rate(asked: float, tried: list[tuple[Rate, Trial]]) -> Rate:
    """Communication is a part that no cable changes, and one in inverse proportion to the rate.

    The line goes through the two trials that are nearest to what is asked; from one alone it goes through zero.
    """
    points = sorted(tried, key=lambda each: abs(each[1].regime / asked - 1))
    (nearest, trial) = points[0]
    slope, constant = trial.communication_seconds * nearest.bits_per_second, 0.0
    other = next((point for point in points[1:] if point[0] != nearest), None)
    if other is not None:
        inverse = 1 / nearest.bits_per_second
        run = 1 / other[0].bits_per_second - inverse
        through_both = (other[1].communication_seconds - trial.communication_seconds) / run
        if through_both > 0:  # else noise was larger than the difference between the rates
            slope, constant = through_both, trial.communication_seconds - through_both * inverse
    left = asked * trial.compute_seconds - constant
    bits_per_second = slope / left if left > 0 else float("inf")
    if not _SLOWEST <= bits_per_second <= _FASTEST:
        rates = ", ".join(f"{t.regime:.2f} at {rate}" for rate, t in tried)
        end = "faster than any cable here" if bits_per_second > _FASTEST else f"slower than {Rate(_SLOWEST)}"
        raise RegimeError(
            f"a communication of {asked:g} times the compute needs cables {end}: it was {rates}. Ask for a "
            f"{'larger' if bits_per_second > _FASTEST else 'smaller'} regime, or change what the case computes."
        )
    return Rate(significant(bits_per_second))


def significant(value: float, digits: int = 3) -> int:
    return int(float(f"{value:.{digits}g}"))
