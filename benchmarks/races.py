"""Contestants in turns on cables of a rate, or at a regime: (ours, theirs) → at most."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from towpath.bench.harness import figures, race
from towpath.bench.harness.contestants import Cluster, Contestant, Entry
from towpath.bench.harness.pool import started
from towpath.bench.harness.regime import FIRST, Derived, Trial, derive, near
from towpath.bench.harness.suite import Settings
from towpath.bench.peers import CandidateSpec, tuned
from towpath.bench.steps import Step
from towpath.bench.workload import PLAIN, Workload
from towpath.lab import Rate

WARM_TURNS = 2
# A regime is of these two.
COMMUNICATION, COMPUTE = "fsdp2 silent", "compute"
TRIAL_ROUNDS = 4

Asked = tuple[tuple[str, str, float], ...]


@dataclass(frozen=True, slots=True)
class Race:
    """`ours` against `theirs`, and against what an expert makes of `theirs`: at most `target` of either's step time.

    With a `regime`, cables are such that FSDP2's communication alone takes so many times what the module computes, and
    both of these take turns with the others, to show it; else they have the rate `inter` (None: unshaped).
    """

    name: str
    ours: str
    theirs: str
    target: float
    workload: Workload = PLAIN
    regime: float | None = None
    inter: str | None = None

    def measure(self, settings: Settings) -> dict[str, Any]:
        against = [theirs for theirs in (self.theirs, tuned(self.theirs)) if theirs is not None]
        asked = tuple((self.ours, theirs, self.target) for theirs in against)
        return raced(self, (self.ours, *against), asked, settings)


@dataclass(frozen=True, slots=True)
class Field:
    """Many contestants: `asked` has the ratios (ours, theirs) → at most."""

    name: str
    contestants: tuple[str, ...]
    asked: Asked = ()
    workload: Workload = PLAIN
    regime: float | None = None
    inter: str | None = None

    def measure(self, settings: Settings) -> dict[str, Any]:
        found = raced(self, self.contestants, self.asked, settings)
        medians = found["median_seconds"]
        first = medians[self.contestants[0]]
        return found | {"times as fast as the first": {kind: round(first / m, 3) for kind, m in medians.items()}}


def raced(case: Race | Field, contestants: Sequence[str], asked: Asked, settings: Settings) -> dict[str, Any]:
    for contestant in contestants:
        CandidateSpec.parse(contestant)  # refused before anything starts
    workload = case.workload.quick() if settings.quick else case.workload
    derived = None
    inter: str | Rate | None = case.inter
    if case.regime is not None:
        derived = rate_of(case.regime, replace(workload, micro_steps=1), settings.quick, settings.say)
        inter, contestants = derived.rate, (*contestants, COMMUNICATION, COMPUTE)
    entries = {
        kind: Entry(Cluster(workload.topology, inter), Step, (kind, workload), WARM_TURNS) for kind in contestants
    }
    with started(entries, settings.say) as made:
        run = race.run(made, settings.rounds, settings.say)
        facts = facts_of(made)
    checks = [figures.ratio(run.seconds, *each) for each in asked]
    return {"checks": checks, **regime_of(derived, run.seconds), **run.recorded(), **facts}


@functools.cache
def rate_of(asked: float, workload: Workload, quick: bool, say: Callable[[str], None]) -> Derived:
    """Looked for once by a run of the suite; each race shows whether it holds. `quick`: the first will do."""

    def measure(rate: Rate) -> Trial:
        entries = {
            kind: Entry(Cluster(workload.topology, rate), Step, (kind, workload), WARM_TURNS)
            for kind in (COMMUNICATION, COMPUTE)
        }
        with started(entries, lambda text: None) as made:
            medians = figures.medians(race.run(made, 1 if quick else TRIAL_ROUNDS, lambda text: None).seconds)
        return Trial(str(rate), medians[COMMUNICATION], medians[COMPUTE])

    return Derived(asked, FIRST, (measure(FIRST),)) if quick else derive(asked, measure, say)


def regime_of(derived: Derived | None, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """The regime asked for, and the one of the race itself."""
    if derived is None:
        return {}
    found = figures.ratio(seconds, COMMUNICATION, COMPUTE).found
    warnings = (
        [] if near(found, derived.asked) else [f"the regime was {found:.2f} in the race; asked {derived.asked:g}"]
    )
    return {"regime": derived.recorded() | {"found in the race": round(found, 3)}, "warnings": warnings}


def facts_of(made: dict[str, Contestant]) -> dict[str, Any]:
    """What our engine says of its own steps."""
    told = {kind: answers for kind, one in made.items() if "stats" in (answers := one.ask("facts"))[0]}
    return {
        "host_share": {kind: round(max(a["host_share"] for a in answers), 5) for kind, answers in told.items()},
        "stats": {kind: answers[0]["stats"] for kind, answers in told.items()},
    }
