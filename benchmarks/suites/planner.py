"""Compare predicted with measured steps of 12 strategies, and of the two that the planner itself chooses.

    planner [CASE …] [--rounds 6] [--quick] [--resume]

A case is a link rate, a shape of the cluster, a model, micro-steps, and whether its blocks compute or wait. On ranks of
their own, `towpath probe` measures the cluster, and then the ranks measure the units of the model. The predictions use
nothing else. Then every strategy runs, and the two that the planner ranks first, without and with codecs.

Cases whose names end with "exact" train in bfloat16. There every lossless strategy also runs with exact transports, in
place of those with codecs, and the planner chooses with and without them. Its predictions use the shares of exact
messages that some steps before have measured.

Figures are the error of each predicted step, the regret and the rank correlation. They also are how far apart each
transfer begins in the engine's trace and in the simulator. The regret is the step of the planner's choice over the
fastest measured step, less one.

Plans are priced twice on the same runs: with the measured collectives, and by messages alone, which is the default over
gloo. `python -m benchmarks.pricing` compares both.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import towpath
from benchmarks.harness.candidates import LabPlace, Launch, timed
from benchmarks.harness.comparison import compare, started
from benchmarks.harness.figures import Check, medians
from benchmarks.harness.suite import Settings, Suite
from benchmarks.peers import CandidateSpec, stepper
from benchmarks.workload import SQUARE, Workload
from towpath.core.queues import QUEUES
from towpath.core.strategy import WITH_TRANSPORT, Strategy, TransferKind
from towpath.engine.layout import lay_out
from towpath.observe.stats import totals
from towpath.observe.totals import Totals
from towpath.observe.trace import BETWEEN, COMPUTE, INSIDE, Interval
from towpath.outer.period import Period
from towpath.plan.bandwidth import Event, Timeline
from towpath.plan.choice import profile_model
from towpath.plan.cluster_probe import probe
from towpath.plan.model import Model
from towpath.plan.profile import Profile
from towpath.plan.request import Batching, Optimizer, Ranking, Request, codecs_for_both
from towpath.plan.solver import Solver

LOSSLESS = ("ddp", "zero1", "zero2", "zero3", "hpz", "mics", "paro-iig", "paro-nig")
LOSSY = ("zero++", "ddp gradients=int8", "mics gradients=int4:64", "zero3 weights=int8 gradients=int8")
EXACT = tuple(f"{name} exact=true" for name in LOSSLESS)
ALLOWED = ("int8", "int4:64")
AT_ONCE = 6  # candidates in memory at the same time
PROBE_SECONDS = 60.0  # the default of `towpath probe`
MOST_ERROR = {"on the cores": 0.15, "waiting": 0.10, "exact": 0.10}
MOST_REGRET, MOST_REGRET_EXACT = 0.10, 0.03
TRACED_STEPS = 3
CHOSEN = ("the plan's", "the plan's with codecs")
CHOSEN_BY_MESSAGES = ("the plan's by messages", "the plan's by messages, with codecs")
WITHOUT_EXACT = "without exact"
CHOSEN_EXACT = ("the plan's", f"the plan's {WITHOUT_EXACT}")
CHOSEN_EXACT_BY_MESSAGES = ("the plan's by messages", f"the plan's by messages, {WITHOUT_EXACT}")
SHARE_STEPS = 3  # whose exact messages are measured
DRAWN = ("zero3", "paro-iig")


@dataclass(frozen=True, slots=True)
class PlannerCase:
    """A workload on links of a rate. With `exact`, exact transports are compared instead of codecs."""

    inter: str
    workload: Workload
    exact: bool = False

    @property
    def name(self) -> str:
        """The name of the case."""
        w = self.workload
        size = "large" if w.width == 384 else "small"
        waits = ", waiting" if w.wait_seconds is not None else ""
        exact = f", {w.dtype}, exact" if self.exact else ""
        return f"{self.inter}, {w.topology}, {size}, {w.micro_steps} micro-steps{waits}{exact}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Probe, predict, measure and compare."""
        workload = self.workload.quick() if settings.quick else self.workload
        cluster = LabPlace(workload.topology, self.inter)
        seconds = 2.0 if settings.quick else PROBE_SECONDS
        with started({"probe": Launch(cluster, Planning, (workload, seconds))}, settings.say) as running:
            profile, model = running["probe"].ask("found")[0]
            shares = running["probe"].ask("encoded_shares")[0] if self.exact else ()
        plan, by_messages = (Plan(profile, model, workload, measured) for measured in (True, False))
        compared_with = EXACT if self.exact else LOSSY
        names = CHOSEN_EXACT if self.exact else CHOSEN
        names_by_messages = CHOSEN_EXACT_BY_MESSAGES if self.exact else CHOSEN_BY_MESSAGES
        strategies = {
            name: CandidateSpec.parse(name).strategy(workload.topology) for name in (*LOSSLESS, *compared_with)
        }
        chosen = dict(zip(names, self._chosen(plan), strict=True))
        others = self._chosen(by_messages)
        # Where both ways of pricing choose the same strategy, it runs once.
        chosen_by_messages = tuple(
            name if strategy == chosen[name] else other
            for name, other, strategy in zip(names, names_by_messages, others, strict=True)
        )
        chosen |= {n: s for n, s in zip(chosen_by_messages, others, strict=True) if n not in chosen}
        measured: dict[str, list[float]] = {}
        traces: dict[str, list[list[Interval]]] = {}
        strategies |= chosen
        for first in range(0, len(strategies), AT_ONCE):
            some = list(strategies)[first : first + AT_ONCE]
            launches = {name: Launch(cluster, TracedStep, (strategies[name], workload), warm_up=2) for name in some}
            with started(launches, settings.say) as running:
                measured |= compare(running, settings.rounds, settings.say).seconds
                traces |= {name: running[name].ask("traced")[0] for name in some}
        predicted, others_predicted = (
            {name: round(each.seconds(strategy), 5) for name, strategy in strategies.items()}
            for each in (plan, by_messages)
        )
        found = compared(predicted, measured, names)
        by_default = compared(others_predicted, measured, chosen_by_messages)
        return {
            "checks": self._checks(by_default),
            "predicted_seconds": predicted,
            "by_messages": {
                "predicted_seconds": others_predicted,
                "chosen": chosen_by_messages,
                **by_default,
            },
            "measured_seconds": {name: [round(s, 5) for s in values] for name, values in measured.items()},
            "chosen": {name: strategy.to_toml() for name, strategy in chosen.items()},
            "computing_seconds": round(plan.computing, 5),
            "encoded_shares": {f"{codec} of {dtype}": share for (codec, dtype), share in shares},
            "profile": profile.to_json(),
            **found,
            **self._timelines(by_messages, strategies, traces, measured),
        }

    def _chosen(self, plan: Plan) -> tuple[Strategy, Strategy]:
        """Return the two strategies that the planner chooses."""
        without = plan.best((), exact=False)
        return (plan.best((), exact=None), without) if self.exact else (without, plan.best(ALLOWED, exact=False))

    def _timelines(
        self,
        plan: Plan,
        strategies: Mapping[str, towpath.Strategy],
        traces: Mapping[str, Sequence[Sequence[Interval]]],
        measured: Mapping[str, Sequence[float]],
    ) -> dict[str, Any]:
        """Return the comparison of all tasks, and for some strategies what a picture needs."""
        tasks, drawn = dict[str, Any](), dict[str, Any]()
        for name, steps in traces.items():
            simulated = plan.timeline(strategies[name])
            engine = usual([of_trace(step) for step in steps])
            seconds = statistics.median(measured[name])
            tasks[name] = compared_tasks(engine, of_replay(simulated.events, strategies[name]), seconds)
            if name in DRAWN:
                drawn[name] = {"engine": recorded(steps[-1]), "simulated": recorded(simulated.intervals)}
        return {"timelines": tasks, "drawn": drawn}

    def _checks(self, found: Mapping[str, Any]) -> list[Check]:
        how = "exact" if self.exact else "waiting" if self.workload.wait_seconds is not None else "on the cores"
        most = MOST_REGRET_EXACT if self.exact else MOST_REGRET
        return [
            Check("mean |predicted / measured − 1|", found["mean_error"], MOST_ERROR[how]),
            *(Check(f"regret, {which}", regret, most) for which, regret in found["regret"].items()),
            Check("rank correlation", found["rank_correlation"], at_least=0.9),
        ]


def compared(
    predicted: Mapping[str, float], measured: Mapping[str, Sequence[float]], chosen: Sequence[str] = CHOSEN
) -> dict[str, Any]:
    """Return the figures of one case. The spread of repeated steps stands next to the errors.

    `chosen` are the planner's choices without and with codecs, or with and without exact transports.
    """
    steps = medians(measured)
    errors = {name: predicted[name] / steps[name] - 1 for name in steps}
    lossless = [seconds for name, seconds in steps.items() if name not in LOSSY and "with codecs" not in name]
    second, pool = "with codecs", list(steps.values())
    if WITHOUT_EXACT in chosen[1]:
        second, pool = WITHOUT_EXACT, [s for name, s in steps.items() if name in LOSSLESS or WITHOUT_EXACT in name]
    return {
        "errors": {name: round(error, 4) for name, error in errors.items()},
        "spread": {name: round((max(v) - min(v)) / steps[name], 4) for name, v in measured.items()},
        "mean_error": statistics.fmean(map(abs, errors.values())),
        "regret": {
            "lossless": steps[chosen[0]] / min(lossless) - 1,
            second: steps[chosen[1]] / min(pool) - 1,
        },
        "rank_correlation": rank_correlation([predicted[n] for n in steps], list(steps.values())),
    }


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation of lists without ties."""
    places = [[1.0 * sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(places[0], places[1])


@dataclass(frozen=True)
class Plan:
    """Predictions for a measured cluster and model, priced with measured collectives or by messages alone."""

    profile: Profile
    model: Model
    workload: Workload
    measured_collectives: bool = True

    def best(self, allowed: Sequence[str], exact: bool | None) -> towpath.Strategy:
        """Return the strategy that the planner ranks first, with these codecs allowed.

        With `exact` None it may have exact transports.
        """
        found = self._solver(allowed, exact).solve(best=1)
        assert isinstance(found, Ranking)
        return found.ranked[0].strategy

    def seconds(self, strategy: towpath.Strategy) -> float:
        """Return the predicted seconds of a step."""
        return self._solver(()).predict(strategy, self._batching).seconds

    def timeline(self, strategy: towpath.Strategy) -> Timeline:
        """Return the simulated step."""
        return self._solver(()).timeline(strategy, self._batching)

    def period(self, strategy: towpath.Strategy) -> Period:
        """Return the simulated period of a strategy with outer steps."""
        return self._solver(()).of_island(strategy).period(strategy, self._batching)

    @property
    def computing(self) -> float:
        """Seconds of a step that compute."""
        return self._solver(()).predict(towpath.strategy("ddp", self.workload.topology), self._batching).computing

    @property
    def _batching(self) -> Batching:
        return Batching(1, self.workload.micro_steps)

    def _solver(self, allowed: Sequence[str], exact: bool | None = None) -> Solver:
        weights, gradients = codecs_for_both(allowed)
        request = Request(
            self.workload.micro_steps * self.workload.topology.world,
            self.profile.memory,
            self.workload.precision,
            optimizer=Optimizer.named("adamw"),
            weights=weights,
            gradients=gradients,
            micro_batches=(1,),
            checkpointing=False,
            exact=exact,
        )
        cluster = self.profile.cluster(measured_collectives=self.measured_collectives)
        return Solver(self.model, cluster, request)


class Planning:
    """A worker that measures the cluster and the model."""

    def __init__(self, rank: int, world: int, workload: Workload, seconds: float) -> None:
        inputs, tokens = next(workload.data(0)), workload.batch * workload.length
        model, precision = workload.model(), workload.precision
        self._workload, self._rank = workload, rank
        self._profile = probe(workload.topology, seconds)
        device = torch.device("cpu")
        dist.barrier()
        self._model = profile_model(model, lay_out(model), lambda _: inputs, [1], tokens, device, precision)

    def found(self) -> tuple[Profile, Model]:
        """Return what was measured."""
        return self._profile, self._model

    def encoded_shares(self) -> tuple[tuple[tuple[str, str], float], ...]:
        """Return what exact messages take in some steps of `zero1`, after one that sends values instead."""
        strategy = towpath.strategy("zero1", self._workload.topology, exact=True)
        stepped = TracedStep(self._rank, self._workload.topology.world, strategy, self._workload)
        seen: list[Totals] = []
        for _ in range(1 + SHARE_STEPS):
            stepped.sample()
            seen.append(totals(stepped.model))
        return tuple(seen[-1].since(seen[0]).encoded_shares.items())


class TracedStep:
    """A worker whose sample is one optimizer step, and that can trace steps."""

    def __init__(self, rank: int, world: int, strategy: towpath.Strategy, workload: Workload) -> None:
        self.model: Any = towpath.shard(workload.model(), strategy, precision=workload.precision)
        self._work = stepper(
            self.model,
            lambda model, last: nullcontext() if last else model.no_sync(),
            workload.data(rank),
            workload.micro_steps,
        )

    def sample(self) -> float:
        """Take a step and return its seconds."""
        return timed(self._work)

    def traced(self) -> list[Sequence[Interval]]:
        """Return the intervals of some steps."""
        found: list[Sequence[Interval]] = []
        for _ in range(TRACED_STEPS):
            with towpath.tracing.trace(self.model) as trace:
                self._work()
            found.append(trace.intervals)
        return found


# Tasks of a step ------------------------------------------------------------------------------------------------------

# The kind, the unit and the micro-step of a task.
TaskKey = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """When a task starts and ends."""

    start: float
    end: float


def of_trace(intervals: Iterable[Interval]) -> dict[TaskKey, TaskTimes]:
    """Return the tasks of a trace. A task may have several messages, on two classes of links."""
    found: dict[TaskKey, TaskTimes] = {}
    for interval in intervals:
        if interval.track in (BETWEEN, INSIDE):
            args = interval.args
            key = (str(args["kind"]), str(args["unit"]), int(args["micro_step"]))
            before = found.get(key, TaskTimes(interval.start_seconds, interval.end_seconds))
            start, end = min(before.start, interval.start_seconds), max(before.end, interval.end_seconds)
            found[key] = TaskTimes(start, end)
    return found


def of_replay(events: Iterable[Event], strategy: Strategy) -> dict[TaskKey, TaskTimes]:
    """Return the tasks of a simulation that send something."""
    sending = {TransferKind.UNUSED_PARAMS, *(kind for kind in WITH_TRANSPORT if getattr(strategy.moves, kind.value))}
    return {
        (
            TransferKind(event.kind).value,
            "root" if event.kind is TransferKind.UNUSED_PARAMS else event.unit or "root",
            event.micro_step,
        ): TaskTimes(event.start, event.end)
        for event in events
        if event.kind in sending and event.track in QUEUES.values()
    }


def usual(steps: Sequence[Mapping[TaskKey, TaskTimes]]) -> dict[TaskKey, TaskTimes]:
    """Return the median of each task that all of several traced steps have."""
    shared = [key for key in steps[0] if all(key in step for step in steps)]
    return {
        key: TaskTimes(*(statistics.median(getattr(step[key], end) for step in steps) for end in ("start", "end")))
        for key in shared
    }


def compared_tasks(
    engine: Mapping[TaskKey, TaskTimes], simulated: Mapping[TaskKey, TaskTimes], step_seconds: float
) -> dict[str, Any]:
    """Compare a traced with a simulated step.

    `start_error` is the mean distance between the starts of a task, as a share of the measured step.
    """
    shared = [key for key in engine if key in simulated]
    return {
        "tasks": len(shared),
        "only_in_engine": sorted(map(str, set(engine) - set(simulated))),
        "only_in_simulator": sorted(map(str, set(simulated) - set(engine))),
        "same_order": all(
            _order(engine, shared, queue) == _order(simulated, shared, queue) for queue in set(QUEUES.values())
        ),
        "start_error": statistics.fmean(abs(engine[k].start - simulated[k].start) for k in shared) / step_seconds,
    }


def _order(spans: Mapping[TaskKey, TaskTimes], keys: Iterable[TaskKey], queue: str) -> list[TaskKey]:
    mine = [key for key in keys if QUEUES[TransferKind(key[0])] == queue]
    return sorted(mine, key=lambda key: spans[key].start)


def recorded(intervals: Iterable[Interval]) -> list[dict[str, Any]]:
    """Return what a picture needs of the intervals of a step."""
    wanted = (COMPUTE, BETWEEN, INSIDE)
    return [
        {name: value for name, value in asdict(interval).items() if name != "args"}
        for interval in intervals
        if interval.track in wanted
    ]


# Cases ----------------------------------------------------------------------------------------------------------------

FOUR, THREE = towpath.Topology(4, 2), towpath.Topology(3, 1)


def cases() -> Iterator[PlannerCase]:
    """Yield the cases of the suite."""
    for inter in ("50mbit", "200mbit", "1gbit"):
        yield PlannerCase(inter, Workload(SQUARE, width=192, depth=6))
    yield PlannerCase("200mbit", Workload(SQUARE, 4, width=192, depth=6))
    yield PlannerCase("200mbit", Workload(THREE, width=192, depth=6))
    yield PlannerCase("200mbit", Workload(FOUR, width=192, depth=6))
    for inter, micro_steps in (("50mbit", 1), ("200mbit", 1), ("200mbit", 4)):
        yield PlannerCase(
            inter, Workload(SQUARE, micro_steps, batch=1, length=16, wait_seconds=0.02, width=192, depth=6)
        )
    yield PlannerCase("200mbit", Workload(THREE, 4, batch=1, length=16, wait_seconds=0.02, width=192, depth=6))
    yield PlannerCase("200mbit", Workload(SQUARE, width=384, depth=9))
    yield PlannerCase("1gbit", Workload(SQUARE, width=384, depth=9))
    yield PlannerCase("1gbit", Workload(FOUR, 4, width=384, depth=9))
    for inter, topology, micro_steps in (
        *(("50mbit", SQUARE, 1), ("200mbit", SQUARE, 1), ("1gbit", SQUARE, 1)),
        *(("200mbit", SQUARE, 4), ("200mbit", THREE, 1)),
    ):
        yield PlannerCase(inter, Workload(topology, micro_steps, "bfloat16", width=192, depth=6), exact=True)
    yield PlannerCase("200mbit", Workload(dtype="bfloat16", width=384, depth=9), exact=True)


SUITES = (Suite("planner", __doc__ or "", list(cases())),)
