"""Steps of every strategy of ours beside PyTorch's own, configured as their experts would.

    towpath bench strategies --quick               two environments, six
                                                   contestants: two minutes
    towpath bench strategies                       everything: hours; --resume
                                                   goes on with it
    towpath bench strategies 2x2-regime4-micro1    one environment
    towpath bench strategies --nodes 2 --ranks 2 --regime 8,4 --micro-steps 1
    torchrun --nnodes 2 --nproc-per-node 8 … -m towpath bench strategies
                                                   on your own cluster

On this machine an environment is a shaped cluster. A regime of 4 asks for cables on which FSDP2's communication alone
takes four times what the bare module computes; the rate is looked for first. All contestants are screened once, in the
first of the environments that differ in their links alone; the best five of ours, the best peer of each library and the
pair of equal rank then race in turns. The pairs:

    lossless                 our best lossless strategy against the best
                             lossless peer, which may have our ring in place
                             of gloo's reduce-scatter (that sends twice the
                             bytes)
    lossless, as they come   the same without such help
    beside DeepSpeed         the same, with its ZeRO where it is installed
                             (deepspeed_peer.py)
    lossy against lossless   our best strategy with codecs against the best
                             lossless peer
    low rank                 ddp with low-rank gradients against DDP's
                             PowerSGD hook of the same rank

Where blocks wait (--waiting), also a step of mics, paro-iig and zero++ against the least that it can take, which the
simulator gives for perfect overlap, both without the optimizer (and clipping).

Lossless is what sends nothing in fewer bits than the run computes in. Under torchrun all ranks run each contestant in
turns inside one job, on the links that there are; the regime is then reported.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from towpath.bench import deepspeed_peer, table
from towpath.bench.environment import (
    COMMUNICATION,
    COMPUTE,
    OTHER_CASES,
    Environment,
    Link,
    Rates,
    add_options,
    alone,
    asked_for,
    regime_recorded,
    several,
)
from towpath.bench.field import QUICK, Entrant, everyone, named
from towpath.bench.floor import floor_seconds
from towpath.bench.harness import race
from towpath.bench.harness.failure import CaseError
from towpath.bench.harness.figures import Check, interval_of_median, medians
from towpath.bench.harness.suite import Settings, Suite
from towpath.bench.peers import AUTO, DEEPSPEED, CandidateSpec
from towpath.bench.selection import finalists, pairs
from towpath.bench.steps import Span
from towpath.bench.venue import Screening, Venue, told_by
from towpath.bench.workload import Workload
from towpath.errors import ConfigError, TowpathError
from towpath.lab import Rate
from towpath.topology.cluster import Topology

SHAPES = (Topology(2, 2), Topology(4, 2), Topology(2, 4))
REGIMES = (8.0, 4.0, 2.0, 1.0, 0.5)
MICRO_STEPS = (1, 4)
LINKS = (*(Link(regime=regime) for regime in REGIMES), Link())
QUICK_LINKS = (Link(inter="100mbit"), Link())

# Where blocks wait: whose step comes how near to what it would take with perfect overlap.
OVERLAPPING, MOST_OVER_THE_FLOOR = ("mics", "paro-iig", "zero++"), 1.15

QUICK_WIDTH, QUICK_DEPTH = 192, 6
SCREENING_TURNS = 1

# Of this process: what one environment's trials and screening showed serves the next. Screenings have the case's name.
_RATES = Rates()
_SCREENINGS: dict[tuple[Workload, tuple[str, ...]], tuple[str, Screening]] = {}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    workload: Workload
    link: Link

    def measure(self, settings: Settings) -> dict[str, Any]:
        workload, derived = self.workload, None
        entrants = entrants_of(settings.options, workload)
        names = [*(each.name for each in entrants), COMMUNICATION, COMPUTE]
        settings.pool.keep([Venue(settings.job).entry(name, alone(name, workload)) for name in names])
        inter = Rate.parse(self.link.inter) if self.link.inter is not None else None
        if self.link.regime is not None:
            derived = _RATES.of(self.link.regime, workload, settings.say, settings.pool)
            inter = derived.rate
        venue = Venue(settings.job, inter)
        screened_in, screening = self._screened(entrants, venue, settings)
        raced = list(entrants) if screening is None else finalists(entrants, screening.seconds)
        found, failures = measured(raced, venue, workload, settings)
        raced = [each for each in raced if each.name not in failures]
        seconds: dict[str, list[float]] = found.pop("run").seconds
        usual = medians(seconds)
        found_regime = usual[COMMUNICATION] / usual[COMPUTE]
        regime, warnings = regime_recorded(derived, found_regime)
        skipped = {} if screening is None else screening.skipped
        floors = floors_of(raced, workload, usual[COMPUTE], inter) if settings.job is None else {}
        checks = [pair.check(seconds) for pair in pairs(raced, usual, self.link.regime or found_regime)]
        return {
            "checks": [*checks, *overlap_checks(seconds, found["optimizer_seconds"], floors, workload)],
            "floor_seconds": floors,
            "warnings": warnings,
            "inter": None if inter is None else str(inter),
            "regime": regime,
            "contestants": {each.name: asdict(each) for each in (raced if screening is None else entrants)},
            "screened": {} if screening is None else _told(screening),
            "screened_in": screened_in,
            "skipped": skipped | failures,
            **found,
        }

    def _screened(
        self, entrants: Sequence[Entrant], venue: Venue, settings: Settings
    ) -> tuple[str | None, Screening | None]:
        """And in which case: the first of those that differ in their links alone. Nobody is where all can race."""
        options = settings.options
        if settings.quick or (options.contestants and not options.screen):
            return None, None
        names = tuple(each.name for each in entrants)
        if (self.workload, names) not in _SCREENINGS:
            found = venue.screen(names, self.workload, SCREENING_TURNS, settings.say)
            _SCREENINGS[self.workload, names] = self.name, found
        return _SCREENINGS[self.workload, names]


def entrants_of(options: argparse.Namespace, workload: Workload) -> list[Entrant]:
    usual = QUICK if options.quick else everyone(workload.micro_steps)
    return check_contestants(named(options.contestants or usual, workload.micro_steps), workload)


def check_contestants(names: Sequence[str], workload: Workload) -> list[Entrant]:
    """A name that nobody has, or that cannot run here, is a user's mistake."""
    try:
        if any(CandidateSpec.parse(name).name == DEEPSPEED for name in names):
            deepspeed_peer.check_installed()
        return [Entrant.of(name, workload.topology, workload.dtype) for name in dict.fromkeys(names)]
    except (ValueError, TowpathError) as error:
        raise ConfigError(str(error)) from None


def measured(
    raced: Sequence[Entrant], venue: Venue, workload: Workload, settings: Settings
) -> tuple[dict[str, Any], dict[str, str]]:
    """The race, and why some were not in it. With the two that a regime is made of."""
    names = [*(each.name for each in raced), COMMUNICATION, COMPUTE]
    entries = {name: venue.entry(name, alone(name, workload)) for name in names}
    failures: dict[str, str] = {}
    settings.pool.keep(entries.values())
    with settings.pool.started(entries, settings.say, failures) as made:
        _check_regime(failures)
        for one in made.values():
            one.ask("forget")
        run = race.run(made, settings.rounds, settings.say, failures)
        _check_regime(failures)
        told = told_by({name: one for name, one in made.items() if name not in failures})
    return {"run": run, **run.recorded(), **figures_of(run, told, workload)}, failures


def _check_regime(failures: Mapping[str, str]) -> None:
    """Without the two that it is made of there is none."""
    for name in (COMMUNICATION, COMPUTE):
        if name in failures:
            raise CaseError(failures[name])


def figures_of(run: race.Race, told: Mapping[str, Sequence[Mapping[str, Any]]], workload: Workload) -> dict[str, Any]:
    """Of each contestant, of one step: how sure its median is, what was not the module's own computation, bytes that
    left the nodes, the processors' seconds of all ranks, and the memory of the rank that holds most."""
    usual = medians(run.seconds)
    computing = workload.micro_steps * usual[COMPUTE]
    steps = {name: value for name, value in usual.items() if name not in (COMMUNICATION, COMPUTE)}
    return {
        "intervals": {name: asdict(interval_of_median(run.seconds[name])) for name in steps},
        "communication_share": {name: round(max(0.0, 1 - computing / value), 4) for name, value in steps.items()},
        "bytes_between_nodes": {name: round(median(run.between_nodes[name])) for name in steps},
        "processor_seconds": {name: round(sum(r["processor_seconds"] for r in told[name]), 4) for name in steps},
        "memory_bytes": {name: max(r["memory_bytes"] for r in told[name]) for name in steps},
        "optimizer_seconds": {
            name: round(optimizer_seconds([rank["optimizing"] for rank in told[name]]), 5)
            for name in steps
            if "optimizing" in told[name][0]
        },
        "strategies": {name: told[name][0]["strategy"] for name in steps if "strategy" in told[name][0]},
        "exposed_seconds": {
            name: round(told[name][0]["exposed_seconds"], 5) for name in steps if "exposed_seconds" in told[name][0]
        },
    }


def optimizer_seconds(ranks: Sequence[Sequence[Span]]) -> float:
    """By which the optimizer makes a step longer: from the last rank's begin to the last one's end, when a step of all
    can go on. (Where ranks share cores that is longer than one of them takes.) Of several turns the median."""
    return median(max(end for _, end in turn) - max(begin for begin, _ in turn) for turn in zip(*ranks, strict=True))


def floors_of(raced: Sequence[Entrant], workload: Workload, computing: float, inter: Rate | None) -> dict[str, float]:
    """Of each of ours: the least that its step can take (`floor.py`)."""
    kinds = {each.name: CandidateSpec.parse(each.name) for each in raced if each.ours}
    strategies = {name: kind.strategy(workload.topology) for name, kind in kinds.items() if kind.name != AUTO}
    return {name: round(floor_seconds(s, workload, computing, inter), 5) for name, s in strategies.items()}


def overlap_checks(
    seconds: Mapping[str, Sequence[float]],
    optimizer: Mapping[str, float],
    floors: Mapping[str, float],
    workload: Workload,
) -> list[Check]:
    """How near a step comes to that, where blocks wait: those that compute would share the cores with all else."""
    found: list[Check] = []
    for name in OVERLAPPING if workload.wait_seconds is not None else ():
        if name in floors:
            ratios = [(each - optimizer[name]) / floors[name] for each in seconds[name]]
            what, interval = f"{name}: step / floor of perfect overlap", interval_of_median(ratios)
            found.append(Check(what, median(ratios), MOST_OVER_THE_FLOOR, interval=interval))
    return found


def _told(screening: Screening) -> dict[str, dict[str, float]]:
    return {
        name: {"seconds": round(each.seconds, 5), "memory_bytes": each.memory_bytes}
        for name, each in screening.tried.items()
    }


# The command line -----------------------------------------------------------------------------------------------------


def strategies_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument(
        "--contestants",
        type=several(str),
        metavar="NAME,…",
        help="race just these, without screening: 'mics,hsdp tuned'; 'ours' and 'peers' are all of them",
    )
    parser.add_argument("--screen", action="store_true", help="screen them, too: only the best race")


def cases_of(environments: Sequence[Environment]) -> list[Case]:
    return [Case(each.name, each.workload, each.link) for each in environments]


def chosen(cases: Sequence[Any], options: argparse.Namespace) -> list[Case]:
    shapes, links, micro_steps = SHAPES, LINKS, MICRO_STEPS
    if options.quick:
        shapes, links, micro_steps = SHAPES[:1], QUICK_LINKS, (1,)
        options.width, options.depth = options.width or QUICK_WIDTH, options.depth or QUICK_DEPTH
    cases = cases_of(asked_for(options, shapes, links, micro_steps))
    for case in cases:
        entrants_of(options, case.workload)  # a name that nobody has is refused before anything starts
    return cases


def _all_cases() -> list[Case]:
    return [
        Case(e.name, e.workload, e.link)
        for shape in SHAPES
        for count in MICRO_STEPS
        for link in LINKS
        for e in (Environment(Workload(shape, count, "bfloat16"), link),)
    ]


SUITE = Suite(
    "strategies",
    __doc__ or "",
    _all_cases(),
    options=strategies_options,
    chosen=chosen,
    other_cases=OTHER_CASES,
    shown=table.strategies_table,
    in_job=True,
)
