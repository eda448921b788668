"""Steps of every strategy of ours against PyTorch's own, configured as their experts would, and how steps scale."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import towpath
from benchmarks.environment import (
    COMMUNICATION,
    COMPUTE,
    OTHER_CASES,
    Environment,
    NodeLink,
    Rates,
    Screening,
    add_options,
    environments_of,
    launch_of,
    recorded_ratio,
    screen,
    several,
)
from benchmarks.harness.candidates import CaseError
from benchmarks.harness.comparison import Comparison, compare
from benchmarks.harness.figures import Check, medians
from benchmarks.harness.suite import Settings, Suite
from benchmarks.peers import AUTO, CandidateSpec, Period
from benchmarks.report import comparison_table
from benchmarks.selection import QUICK, Candidate, candidates_of, every_name, expanded, finalists, pairs
from benchmarks.workload import Workload
from lab import Rate
from towpath.comparison import interval_of_median
from towpath.core.formats import Codec
from towpath.core.strategy import WITH_TRANSPORT, Strategy
from towpath.core.unit_plan import plan_unit
from towpath.engine.layout import lay_out
from towpath.errors import ConfigError
from towpath.plan.hardware import CodecSpeed, Hardware
from towpath.plan.hardware import Link as SimulatedLink
from towpath.plan.replay import ComputeSeconds, Replay, SimulatedStage
from towpath.topology.cluster import Topology

SHAPES = (Topology(2, 2), Topology(4, 2), Topology(2, 4))
COMM_RATIOS = (8.0, 4.0, 2.0, 1.0, 0.5)
MICRO_STEPS = (1, 4)
LINKS = (*(NodeLink(comm_ratio=ratio) for ratio in COMM_RATIOS), NodeLink())
QUICK_LINKS = (NodeLink(inter="100mbit"), NodeLink())
QUICK_WIDTH, QUICK_DEPTH = 192, 6
SCREENING_SAMPLES = 1

# Where blocks wait: the strategies whose step is compared with its lower bound, and the limit of the ratio.
OVERLAPPING, MOST_OVER_THE_BOUND = ("mics", "paro-iig", "zero++"), 1.15

STRATEGIES = """Compare steps of every strategy of ours with PyTorch's own and DeepSpeed's, each tuned by its experts.

    strategies --quick                  two environments and six candidates
    strategies                          all cases, for hours; --resume continues
    strategies 2x2-ratio4-micro1        one case
    strategies --nodes 2 --ranks 2 --comm-ratio 8,4 --micro-steps 1

An environment is a lab. With a comm ratio of 4, FSDP2's communication alone takes four times what the bare module
computes, and the link rate that gives this is searched for first. All candidates are screened once, in the first of the
environments that differ only in their links. The best five of ours, the best peer of each library and the pair of equal
rank then take part in the comparison. The pairs:

    lossless                 our best lossless strategy against the best
                             lossless peer, which may use our ring instead
                             of gloo's reduce-scatter
    lossless, as they come   the same without our ring
    against DeepSpeed        the same, with DeepSpeed's ZeRO if it is installed
    lossy against lossless   our best strategy with codecs against the best
                             lossless peer
    low rank                 ddp with low-rank gradients against DDP's
                             PowerSGD hook of the same rank

Where blocks wait (--waiting), the steps of mics, paro-iig and zero++ are also compared with their lower bound: the
simulator's step with perfect overlap, without the optimizer.
"""

# Trials and screenings of this process, which the next environment uses. Screenings have the name of their case.
_RATES = Rates()
_SCREENINGS: dict[tuple[Workload, tuple[str, ...]], tuple[str, Screening]] = {}


@dataclass(frozen=True, slots=True)
class StrategiesCase:
    """A comparison in one environment."""

    name: str
    workload: Workload
    link: NodeLink

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Search for the link rate, screen the candidates, and compare the best."""
        workload, derived = self.workload, None
        usual_names = QUICK if settings.options.quick else every_name(workload.micro_steps)
        names = expanded(settings.options.candidates or usual_names, workload.micro_steps)
        candidates = candidates_of(names, workload)
        settings.pool.keep([launch_of(name, workload, None) for name in (*names, COMMUNICATION, COMPUTE)])
        inter = Rate.parse(self.link.inter) if self.link.inter is not None else None
        if self.link.comm_ratio is not None:
            derived = _RATES.of(self.link.comm_ratio, workload, settings.say, settings.pool)
            inter = derived.rate
        screened_in, screening = self.screened(candidates, inter, settings)
        compared = list(candidates) if screening is None else finalists(candidates, screening.seconds)
        found, failures = measured(compared, inter, workload, settings)
        compared = [each for each in compared if each.name not in failures]
        seconds: dict[str, list[float]] = found.pop("comparison").seconds
        usual = medians(seconds)
        found_ratio = usual[COMMUNICATION] / usual[COMPUTE]
        comm_ratio, warnings = recorded_ratio(derived, found_ratio)
        bounds = lower_bounds(compared, workload, usual[COMPUTE], inter)
        checks = [pair.check(seconds) for pair in pairs(compared, usual, self.link.comm_ratio or found_ratio)]
        return {
            "checks": [
                *checks,
                *overlap_checks(seconds, found["optimizer_seconds"], bounds, workload),
                *bits_checks(found["bits_between_nodes"]),
            ],
            "lower_bound_seconds": bounds,
            "warnings": warnings,
            "inter": None if inter is None else str(inter),
            "comm_ratio": comm_ratio,
            "candidates": {each.name: asdict(each) for each in (compared if screening is None else candidates)},
            "screened": {}
            if screening is None
            else {
                name: {"seconds": round(each.seconds, 5), "memory_bytes": each.memory_bytes}
                for name, each in screening.tried.items()
            },
            "screened_in": screened_in,
            "skipped": ({} if screening is None else screening.skipped) | failures,
            **found,
        }

    def screened(
        self, candidates: Sequence[Candidate], inter: Rate | None, settings: Settings
    ) -> tuple[str | None, Screening | None]:
        """Return the screening, and the case that it ran in. Without more candidates than can run, there is none."""
        options = settings.options
        if settings.quick or (options.candidates and not options.screen):
            return None, None
        names = tuple(each.name for each in candidates)
        if (self.workload, names) not in _SCREENINGS:
            found = screen(names, self.workload, inter, SCREENING_SAMPLES, settings.say)
            _SCREENINGS[self.workload, names] = self.name, found
        return _SCREENINGS[self.workload, names]


def measured(
    compared: Sequence[Candidate], inter: Rate | None, workload: Workload, settings: Settings
) -> tuple[dict[str, Any], dict[str, str]]:
    """Compare candidates and the two parts of the comm ratio. Return the figures, and why some candidates failed."""
    names = [*(each.name for each in compared), COMMUNICATION, COMPUTE]
    launches = {name: launch_of(name, workload, inter) for name in names}
    failures: dict[str, str] = {}
    settings.pool.keep(launches.values())
    with settings.pool.started(launches, settings.say, failures) as made:
        _check_ratio(failures)
        for one in made.values():
            one.ask("forget")
        comparison = compare(made, settings.rounds, settings.say, failures)
        _check_ratio(failures)
        facts = {name: one.ask("facts") for name, one in made.items() if name not in failures}
    return {
        "comparison": comparison,
        **comparison.recorded(),
        **figures_of(comparison, facts, workload),
    }, failures


def _check_ratio(failures: Mapping[str, str]) -> None:
    """Fail if one of the two parts of the comm ratio did."""
    for name in (COMMUNICATION, COMPUTE):
        if name in failures:
            raise CaseError(failures[name])


def figures_of(
    comparison: Comparison, facts: Mapping[str, Sequence[Mapping[str, Any]]], workload: Workload
) -> dict[str, Any]:
    """Return the figures of one step of each candidate.

    They are the interval of the median, the share that is not the module's own computation, and the bytes between
    nodes. Processor seconds are those of all ranks. Memory is that of the rank that holds most.
    """
    usual = medians(comparison.seconds)
    computing = workload.micro_steps * usual[COMPUTE]
    steps = {name: value for name, value in usual.items() if name not in (COMMUNICATION, COMPUTE)}
    return {
        "intervals": {name: interval_of_median(comparison.seconds[name])._asdict() for name in steps},
        "communication_share": {name: round(max(0.0, 1 - computing / value), 4) for name, value in steps.items()},
        "bytes_between_nodes": {name: round(median(comparison.between_nodes[name])) for name in steps},
        "processor_seconds": {name: round(sum(r["processor_seconds"] for r in facts[name]), 4) for name in steps},
        "memory_bytes": {name: max(r["memory_bytes"] for r in facts[name]) for name in steps},
        "optimizer_seconds": {
            name: round(optimizer_seconds([rank["optimizing"] for rank in facts[name]]), 5)
            for name in steps
            if "optimizing" in facts[name][0]
        },
        "strategies": {name: facts[name][0]["strategy"] for name in steps if "strategy" in facts[name][0]},
        "exposed_seconds": {
            name: round(facts[name][0]["exposed_seconds"], 5) for name in steps if "exposed_seconds" in facts[name][0]
        },
        "bits_between_nodes": {name: bits for name in steps if (bits := facts[name][0].get("bits_between_nodes"))},
    }


BITS = "bits per element between nodes"


def bits_checks(bits: Mapping[str, Mapping[str, float]]) -> list[Check]:
    """Return what an element took of each kind of transfer, for candidates with exact transport."""
    return [Check(f"{name}, {kind}: {BITS}", found) for name, kinds in bits.items() for kind, found in kinds.items()]


def optimizer_seconds(ranks: Sequence[Sequence[Period]]) -> float:
    """Return by how much the optimizer makes a step longer, as the median over the samples.

    It is the time from the last rank's begin to the last rank's end, when the step of all ranks can go on.
    """
    return median(max(end for _, end in step) - max(begin for begin, _ in step) for step in zip(*ranks, strict=True))


_INSTANT = 1e18  # bytes, or elements, a second


def lower_bound(strategy: Strategy, workload: Workload, computing: float, inter: Rate | None) -> float:
    """Return the least seconds of a step without its optimizer: the simulator's, with perfect overlap.

    Only blocks and the links between nodes take time. `computing` is the time of the module's forward and backward pass
    in one micro-step, which its blocks share equally.
    """
    plans = [plan_unit(strategy, unit.spec, workload.precision) for unit in lay_out(workload.model())]
    blocks = len(plans) - 1
    forward = computing / blocks / 3  # the backward pass takes twice as long
    seconds = ComputeSeconds((0.0, *[forward] * blocks), (0.0, *[2 * forward] * blocks), 0.0, 0.0)
    codecs = {w.codec.name for w in map(strategy.transport, WITH_TRANSPORT) if isinstance(w.codec, Codec)}
    hardware = Hardware(
        strategy.topology,
        intra=SimulatedLink(_INSTANT, 0.0),
        inter=SimulatedLink(_INSTANT if inter is None else inter.bytes_per_second, 0.0),
        memory_rate=_INSTANT,
        sum_rate=_INSTANT,
        codecs=tuple((name, CodecSpeed(_INSTANT, _INSTANT)) for name in sorted(codecs)),
    )
    stage = SimulatedStage(strategy, plans, seconds)
    return Replay([stage], hardware, micro_steps=workload.micro_steps).run().seconds


def lower_bounds(
    compared: Sequence[Candidate], workload: Workload, computing: float, inter: Rate | None
) -> dict[str, float]:
    """Return the lower bound of each strategy of ours, except `auto`."""
    specs = {each.name: CandidateSpec.parse(each.name) for each in compared if each.ours}
    known = {name: spec for name, spec in specs.items() if not spec.foreign and spec.name != AUTO}
    strategies = {name: spec.strategy(workload.topology) for name, spec in known.items()}
    return {name: round(lower_bound(s, workload, computing, inter), 5) for name, s in strategies.items()}


def overlap_checks(
    seconds: Mapping[str, Sequence[float]],
    optimizer: Mapping[str, float],
    bounds: Mapping[str, float],
    workload: Workload,
) -> list[Check]:
    """Return steps over their lower bounds, where blocks wait. Blocks that compute share the cores with all else."""
    found: list[Check] = []
    for name in OVERLAPPING if workload.wait_seconds is not None else ():
        if name in bounds:
            ratios = [(each - optimizer[name]) / bounds[name] for each in seconds[name]]
            what, interval = f"{name}: step / lower bound with perfect overlap", interval_of_median(ratios)
            found.append(Check(what, median(ratios), MOST_OVER_THE_BOUND, interval=interval))
    return found


def strategies_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suite."""
    add_options(parser)
    parser.add_argument(
        "--candidates",
        type=several(str),
        metavar="NAME,…",
        help="compare just these, without screening: 'mics,hsdp tuned'; 'ours' and 'peers' are groups",
    )
    parser.add_argument("--screen", action="store_true", help="screen them as well, and compare the best")


def chosen_strategies(cases: Sequence[Any], options: argparse.Namespace) -> list[StrategiesCase]:
    """Return the cases of the options. An unknown candidate is refused before anything starts."""
    shapes, links, micro_steps = SHAPES, LINKS, MICRO_STEPS
    if options.quick:
        shapes, links, micro_steps = SHAPES[:1], QUICK_LINKS, (1,)
        options.width, options.depth = options.width or QUICK_WIDTH, options.depth or QUICK_DEPTH
    found = environments_of(options, shapes, links, micro_steps)
    for each in found if options.candidates else ():
        candidates_of(expanded(options.candidates, each.workload.micro_steps), each.workload)
    return [StrategiesCase(each.name, each.workload, each.link) for each in found]


_CASES = [
    StrategiesCase(each.name, each.workload, each.link)
    for shape in SHAPES
    for count in MICRO_STEPS
    for link in LINKS
    for each in (Environment(Workload(shape, count, "bfloat16"), link),)
]


# Scaling --------------------------------------------------------------------------------------------------------------

SCALING = """Measure steps on 1, 2, 4 and 8 nodes: weak scaling, with constant work per rank, and strong scaling.

    scaling [CASE …] [--ranks 2] [--inter 200mbit] [--candidates mics,paro-iig]

The figures are seconds of a step, bytes between nodes, exposed seconds, and processor seconds of all ranks. On a
machine with fewer cores than ranks, the cores limit the wall time. "accounted" is the processor seconds of a step over
its wall time and the cores. Near 1, the cores are the limit. Bytes of ours must be within 3 % of the schedule. Where
blocks wait (--wait 0.1), the exposed seconds of a step stand next to those of the simulator with perfect overlap.
"""

NODES = (1, 2, 4, 8)
RANKS_PER_NODE = 2
SCALING_LINK = NodeLink(inter="200mbit")
SCALING_CANDIDATES = ("mics", "paro-iig", "zero3", "hsdp tuned ring", "fsdp2 tuned ring")
# Sequences of all ranks together in strong scaling: two for each rank of eight nodes.
STRONG_BATCH = 32
LEAST_BYTES, MOST_BYTES = 0.97, 1.03
SCALING_WIDTH, SCALING_DEPTH = 192, 6
SCALING_WAIT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ScalingCase:
    """A number of nodes. `kind` is "weak" or "strong"."""

    name: str
    kind: str
    workload: Workload
    link: NodeLink
    candidates: Sequence[str] = SCALING_CANDIDATES

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the candidates on so many nodes."""
        workload = self.workload.quick() if settings.quick else self.workload
        inter = Rate.parse(self.link.inter) if self.link.inter is not None else None
        candidates = [Candidate.of(name, workload.topology, workload.dtype) for name in self.candidates]
        found, failures = measured(candidates, inter, workload, settings)
        usual = medians(found.pop("comparison").seconds)
        compared = [each for each in candidates if each.name not in failures]
        cores = len(os.sched_getaffinity(0))
        bounds = lower_bounds(compared, workload, usual[COMPUTE], inter)
        accounted = {each.name: found["processor_seconds"][each.name] / usual[each.name] / cores for each in compared}
        return {
            "checks": [
                *(Check(f"{name}: seconds of a step", usual[name]) for name in accounted),
                *(Check(f"{name}: accounted", value) for name, value in accounted.items()),
                *bytes_checks(found["bytes_between_nodes"], compared, workload),
                *exposed_checks(usual, found["optimizer_seconds"], bounds, workload),
            ],
            "lower_bound_seconds": bounds,
            "kind": self.kind,
            "inter": None if inter is None else str(inter),
            "candidates": {
                each.name: {"ours": each.ours, "lossless": each.lossless, "helped": each.helped} for each in compared
            },
            "skipped": failures,
            **found,
        }


def bytes_checks(sent: Mapping[str, int], compared: Sequence[Candidate], workload: Workload) -> Iterator[Check]:
    """Yield, for each candidate of ours, the bytes by the kernel's counters over those of the schedule."""
    for each in compared if workload.topology.nodes > 1 else ():
        spec = CandidateSpec.parse(each.name)
        if not spec.foreign and spec.name != AUTO:
            strategy = spec.strategy(workload.topology)
            schedule = towpath.schedule(strategy, workload.model(), workload.micro_steps, workload.precision)
            ratio = sent[each.name] / schedule.inter_bytes
            yield Check(f"{each.name}: bytes / the schedule's", ratio, at_most=MOST_BYTES, at_least=LEAST_BYTES)


def exposed_checks(
    usual: Mapping[str, float], optimizer: Mapping[str, float], bounds: Mapping[str, float], workload: Workload
) -> Iterator[Check]:
    """Yield exposed seconds, measured and simulated, where blocks wait and share the cores with nothing."""
    computing = workload.micro_steps * usual[COMPUTE]
    for name, bound in bounds.items() if workload.wait_seconds is not None else ():
        yield Check(f"{name}: exposed seconds", usual[name] - optimizer[name] - computing)
        yield Check(f"{name}: exposed seconds, the schedule's", bound - computing)


def scaling_cases(
    environments: Sequence[Environment], candidates: Sequence[str] = SCALING_CANDIDATES
) -> list[ScalingCase]:
    """Return two cases for each environment: with its own batch, and with its share of a batch of all ranks."""
    found: list[ScalingCase] = []
    for each in environments:
        workload = each.workload
        share = max(1, STRONG_BATCH // workload.topology.world)
        found.append(ScalingCase(f"weak-{each.name}", "weak", workload, each.link, candidates))
        wait = None if workload.wait_seconds is None else workload.wait_seconds * share / workload.batch
        strong = replace(workload, batch=share, wait_seconds=wait)
        found.append(ScalingCase(f"strong-{each.name}", "strong", strong, each.link, candidates))
    return found


def chosen_scaling(cases: Sequence[Any], options: argparse.Namespace) -> list[ScalingCase]:
    """Return the cases of the options."""
    if options.comm_ratio:
        raise ConfigError("--comm-ratio: links keep their rate here, whatever the number of nodes; give --inter RATE.")
    options.width, options.depth = options.width or SCALING_WIDTH, options.depth or SCALING_DEPTH
    ranks = options.ranks or (RANKS_PER_NODE,)
    nodes = NODES[:2] if options.quick else NODES
    if options.waiting and options.wait is None:
        options.wait = SCALING_WAIT_SECONDS  # the same for each rank on every number of nodes
    environments = environments_of(options, [Topology(n, r) for r in ranks for n in nodes], [SCALING_LINK], (1,))
    found = scaling_cases(environments, options.candidates or SCALING_CANDIDATES)
    for case in found:
        candidates_of(case.candidates, case.workload)
        if case.kind == "strong" and STRONG_BATCH % case.workload.topology.world:
            raise ConfigError(
                f"{case.workload.topology} has {case.workload.topology.world} ranks, which cannot share "
                f"{STRONG_BATCH} sequences evenly: give --nodes and --ranks whose product divides {STRONG_BATCH}."
            )
    return found


def scaling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suite."""
    add_options(parser)
    usual = ",".join(SCALING_CANDIDATES)
    parser.add_argument("--candidates", type=several(str), metavar="NAME,…", help=f"default: {usual}")


def _scaling_workload(nodes: int) -> Workload:
    return Workload(Topology(nodes, RANKS_PER_NODE), 1, "bfloat16", width=SCALING_WIDTH, depth=SCALING_DEPTH)


SUITES = (
    Suite(
        "strategies",
        STRATEGIES,
        _CASES,
        options=strategies_options,
        chosen=chosen_strategies,
        other_cases=OTHER_CASES,
        shown=comparison_table,
    ),
    Suite(
        "scaling",
        SCALING,
        scaling_cases([Environment(_scaling_workload(nodes), SCALING_LINK) for nodes in NODES]),
        options=scaling_options,
        chosen=chosen_scaling,
        other_cases=OTHER_CASES,
        shown=comparison_table,
    ),
)
