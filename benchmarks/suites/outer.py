"""Measure what islands with outer steps send, what an exchange costs a step, and how well steps are predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import mean, median
from typing import Any

import towpath
from benchmarks.environment import waiting
from benchmarks.harness import figures, results
from benchmarks.harness.candidates import LabPlace, Launch, RunningCandidate
from benchmarks.harness.comparison import started
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.islands import (
    EVERY,
    PRESET,
    TRANSPORTS,
    FreeSteps,
    OuterSpec,
    begun_in,
    by_step,
    mean_step,
    outer_of,
    under_way_in,
)
from benchmarks.suites.planner import PROBE_SECONDS, Plan, Planning
from benchmarks.workload import SHORT, SQUARE, Workload
from towpath import Outer, Topology

FOUR = Topology(4, 1)
PERIODS = 2  # that are measured, after one in which exchanges settle
QUICK_EVERY = 4


def quick(spec: OuterSpec) -> OuterSpec:
    """Return settings of a short period, which run the same code."""
    return replace(spec, every=QUICK_EVERY, fragments=min(spec.fragments, 2), delay=min(spec.delay, 1))


# Bytes ----------------------------------------------------------------------------------------------------------------

# Ten million parameters, and few tokens: bytes do not depend on what is computed.
SMALL_STEPS = Workload(SQUARE, 1, "bfloat16", batch=1, length=SHORT, width=384, depth=5)
DDP = "torch-ddp tuned bf16"
DDP_STEPS = 3
LEAST_BYTES, MOST_BYTES = 0.97, 1.03  # over those of the schedule
MOST_BETWEEN = 0.001  # of DDP's bytes cross in a step without an exchange
MOST_ON_AVERAGE = 0.01  # of DDP's bytes, with int4 and the usual period


@dataclass(frozen=True, slots=True)
class BytesCase:
    """The bytes between nodes of each step, by the kernel's counters, next to DDP's with gradients in bf16."""

    name: str
    spec: OuterSpec
    topology: Topology = SQUARE

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Take the steps of some periods, and a few with DDP."""
        spec = quick(self.spec) if settings.quick else self.spec
        workload, strategy = replace(SMALL_STEPS, topology=self.topology), spec.strategy(self.topology)
        place, outer = LabPlace(self.topology), outer_of(strategy)
        launches = {
            PRESET: Launch(place, FreeSteps, (strategy, workload)),
            DDP: Launch(place, FreeSteps, (DDP, workload)),
        }
        with started(launches, settings.say) as made:
            made[PRESET].ask("steps", spec.every)
            made[DDP].ask("steps", 1)
            found = [
                (is_outer, steps, sent_in(made[PRESET], steps))
                for is_outer, steps in stretches(outer, spec.every + 1, settings.rounds * spec.every)
            ]
            of_ddp = sent_in(made[DDP], DDP_STEPS) / DDP_STEPS
        scheduled = towpath.schedule(strategy, workload.model(), precision=workload.precision).outer
        assert scheduled is not None
        return {
            "checks": list(bytes_checks(outer, found, scheduled.inter_bytes, of_ddp)),
            "strategy": str(strategy),
            "scheduled_bytes": scheduled.inter_bytes,
            "stretches": found,
            "ddp_bytes": of_ddp,
        }


def sent_in(candidate: RunningCandidate, steps: int) -> int:
    """Take steps, and return the bytes that all nodes sent to others in the meantime."""
    before = sum(link.sent_bytes for link in candidate.counters())
    candidate.ask("steps", steps)
    return sum(link.sent_bytes for link in candidate.counters()) - before


def stretches(outer: Outer, first: int, count: int) -> list[tuple[bool, int]]:
    """Return the lengths of stretches of steps with an exchange under way and without, in turn, from a step on."""
    grouped = groupby(range(first, first + count), lambda step: under_way_in(outer, step))
    return [(is_outer, len(list(steps))) for is_outer, steps in grouped]


def bytes_checks(
    outer: Outer, found: Sequence[tuple[bool, int, int]], scheduled: int, of_ddp: float
) -> Iterator[Check]:
    """Yield the figures of whole periods, from stretches with their steps and bytes.

    `scheduled` are the bytes of a period in the schedule, and `of_ddp` those of one step of DDP.
    """
    between = [sent / steps for is_outer, steps, sent in found if not is_outer]
    if between:
        yield Check("step without an exchange / DDP's step, bytes", max(between) / of_ddp, MOST_BETWEEN)
    total_steps, sent = sum(steps for _, steps, _ in found), sum(sent for *_, sent in found)
    exchanged = sum(sent for is_outer, _, sent in found if is_outer)
    what = "steps with exchanges / the schedule's outer steps, bytes"
    yield Check(what, exchanged * outer.every / (total_steps * scheduled), MOST_BYTES, LEAST_BYTES)
    limited = outer.every == EVERY and outer.islands == 2 and outer.transport.codec == TRANSPORTS["int4"].codec
    what = "mean step / DDP's step with gradients in bf16, bytes"
    yield Check(what, sent / total_steps / of_ddp, MOST_ON_AVERAGE if limited else None)


BYTES = """Measure what islands with outer steps send between nodes, by the kernel's interface counters.

    outer_bytes [CASE …] [--rounds 2] [--quick] [--resume]

Four ranks train ten million parameters in bf16, in two islands or four. A round is a period of 32 steps. Between outer
steps, next to nothing crosses. Outer steps send the bytes of the schedule. The bytes of a mean step stand next to those
of DDP with gradients in bf16. A case takes about a minute.
"""
_BYTES_CASES = (
    BytesCase("2x2-fp32", OuterSpec("fp32")),
    BytesCase("2x2-int4", OuterSpec("int4")),
    BytesCase("2x2-int4-streaming", OuterSpec("int4", fragments=4, delay=4)),
    BytesCase("4x1-int4", OuterSpec("int4"), FOUR),
)

# Steps with an exchange under way -------------------------------------------------------------------------------------


def planned(workload: Workload, place: LabPlace, settings: Settings) -> Plan:
    """Probe the cluster and measure the model, as the suite `planner` does, and return the predictions."""
    seconds = 2.0 if settings.quick else PROBE_SECONDS
    with started({"probe": Launch(place, Planning, (workload, seconds))}, settings.say) as running:
        profile, model = running["probe"].ask("found")[0]
    return Plan(profile, model, workload, measured_collectives=False)


def measured(
    strategy: towpath.Strategy, every: int, workload: Workload, place: LabPlace, settings: Settings
) -> list[list[float]]:
    """Return the seconds of each step of some periods by rank, after one period that is not counted."""
    launch = Launch(place, FreeSteps, (strategy, workload))
    with started({str(strategy.outer): launch}, settings.say) as made:
        [candidate] = made.values()
        candidate.ask("steps", every)
        return candidate.ask("steps", settings.rounds * every)


# A delay is long enough if the mean step of the simulated period is as short as with the longest delay.
LONG_ENOUGH = 1.001
MOST_SLOWER = 1.03


def shortest_delay(plan: Plan, spec: OuterSpec, topology: Topology) -> int:
    """Return the shortest delay with which the simulator sees no step wait for an exchange."""

    def simulated(delay: int) -> float:
        return plan.seconds(replace(spec, delay=delay).strategy(topology))

    longest = simulated(spec.every - 1)
    return next(delay for delay in range(spec.every) if simulated(delay) <= LONG_ENOUGH * longest)


@dataclass(frozen=True, slots=True)
class OverlapCase:
    """Steps of blocks that wait, with an exchange under way and without. The simulator chooses the delay."""

    name: str
    inter: str
    spec: OuterSpec
    workload: Workload

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Choose the delay, and take the steps of some periods."""
        workload = self.workload.quick() if settings.quick else self.workload
        spec, place = quick(self.spec) if settings.quick else self.spec, LabPlace(workload.topology, self.inter)
        plan = planned(workload, place, settings)
        spec = replace(spec, delay=shortest_delay(plan, spec, workload.topology))
        strategy = spec.strategy(workload.topology)
        settings.say(f"{spec}: {plan.seconds(strategy):.4g} s a step predicted")
        ranks = measured(strategy, spec.every, workload, place, settings)
        return {
            "checks": list(overlap_checks(outer_of(strategy), by_step(ranks))),
            "delay": spec.delay,
            "strategy": str(strategy),
            "predicted_seconds": round(plan.seconds(strategy), 5),
            "step_seconds": [[round(s, 5) for s in steps] for steps in ranks],
        }


def overlap_checks(outer: Outer, seconds: Sequence[float]) -> Iterator[Check]:
    """Yield steps with an exchange under way over steps without, in periods that begin after an uncounted one."""
    numbered = [(outer.every + 1 + number, step) for number, step in enumerate(seconds)]
    within = [step for number, step in numbered if under_way_in(outer, number)]
    without = [step for number, step in numbered if not under_way_in(outer, number)]
    begun = [step for number, step in numbered if begun_in(outer, number)]
    yield Check("delay, steps", outer.delay)
    if without:  # in short periods, an exchange is always under way
        yield Check("step with an exchange under way / step without, means", mean(within) / mean(without), MOST_SLOWER)
        yield Check("the same, medians", median(within) / median(without))
        yield Check("step that begins an exchange / step without, means", mean(begun) / mean(without))


OVERLAP = """Measure what an exchange between islands costs the steps in which it is under way, where blocks wait.

    outer_overlap [CASE …] [--rounds 2] [--quick] [--resume]

Two islands of two ranks train 17 million parameters in bf16. Their blocks wait, as for a device. `towpath probe`
measures the cluster, and the simulator chooses the shortest delay with which no step waits for an exchange. A round is
a period of 32 steps. Ranks do not wait for each other between steps, except inside their island. A case takes about two
minutes.
"""
_WAITING = waiting(Workload(SQUARE, dtype="bfloat16"))
_OVERLAP_CASES = (
    OverlapCase("50mbit-fp32", "50mbit", OuterSpec("fp32"), _WAITING),
    OverlapCase("10mbit-int4", "10mbit", OuterSpec("int4"), _WAITING),
    OverlapCase("200mbit-fp32-4-fragments", "200mbit", OuterSpec("fp32", fragments=4), _WAITING),
)

# Predicted and measured steps -----------------------------------------------------------------------------------------

MOST_ERROR = 0.10
SIMULATED_EVERY = 16


@dataclass(frozen=True, slots=True)
class SimulatorCase:
    """The mean step of a period, predicted and measured."""

    inter: str
    spec: OuterSpec
    workload: Workload

    @property
    def name(self) -> str:
        """The name of the case."""
        waits = ", waiting" if self.workload.wait_seconds is not None else ""
        return f"{self.inter}, {self.workload.topology.nodes} islands, {self.spec}{waits}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Probe, predict and measure."""
        workload = self.workload.quick() if settings.quick else self.workload
        spec, place = quick(self.spec) if settings.quick else self.spec, LabPlace(workload.topology, self.inter)
        strategy, plan = spec.strategy(workload.topology), planned(workload, place, settings)
        period = plan.period(strategy)
        ranks = measured(strategy, spec.every, workload, place, settings)
        found = mean_step(ranks)
        return {
            "checks": [
                Check("|predicted / measured − 1|", abs(period.mean / found - 1), MOST_ERROR),
                Check("predicted / measured − 1", period.mean / found - 1),
                Check("measured mean step, seconds", found),
            ],
            "strategy": str(strategy),
            "predicted_seconds": [round(s, 5) for s in period.steps],
            "predicted_alone": round(period.alone, 5),
            "step_seconds": [[round(s, 5) for s in steps] for steps in ranks],
            "profile": plan.profile.to_json(),
        }


def mean_error(lines: Mapping[str, Mapping[str, Any]]) -> Check | None:
    """Return the mean over the cases of the error of the mean step, or None without cases."""
    errors = [line["checks"][0]["found"] for line in lines.values() if line["checks"]]
    what = f"mean of |predicted / measured − 1| over {len(errors)} cases"
    return Check(what, mean(errors), MOST_ERROR) if errors else None


def simulator_summary() -> str:
    """Return the mean error of the committed results."""
    check = mean_error(results.last(results.read(results.file_of("outer_simulator"))))
    return "no results" if check is None else figures.verdict(check.recorded())


SIMULATOR = """Compare predicted with measured steps of islands, as the mean over a period of 16 steps.

    outer_simulator [CASE …] [--rounds 2] [--quick] [--resume]

`towpath probe` measures the cluster, and then the ranks measure the units of the model. The predictions use nothing
else. A round is a period. A case takes about two minutes. `python -m benchmarks report outer_simulator` has the mean
error.
"""


def simulator_cases() -> Iterator[SimulatorCase]:
    """Yield the cases of the suite."""
    computing = Workload(SQUARE, width=192, depth=6)
    waits = replace(computing, batch=1, length=SHORT, wait_seconds=0.02)
    for inter, codec, fragments, delay, workload in (
        ("200mbit", "fp32", 1, 0, computing),
        ("50mbit", "int4", 1, 0, computing),
        ("50mbit", "fp32", 4, 2, waits),
        ("10mbit", "fp32", 1, 8, waits),
        ("10mbit", "int4", 2, 0, replace(waits, topology=FOUR)),
    ):
        yield SimulatorCase(inter, OuterSpec(codec, SIMULATED_EVERY, fragments, delay), workload)


SUITES = (
    Suite("outer_bytes", BYTES, _BYTES_CASES, rounds=PERIODS),
    Suite("outer_overlap", OVERLAP, _OVERLAP_CASES, rounds=PERIODS),
    Suite("outer_simulator", SIMULATOR, list(simulator_cases()), rounds=PERIODS, summary=simulator_summary),
)
