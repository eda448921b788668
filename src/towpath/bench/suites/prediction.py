"""An environment of benchmarks/planner.py: what is predicted there, what is measured, and how they compare."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import towpath
from towpath.auto.measure import describe_measured
from towpath.auto.probe import probe
from towpath.bench.harness import race
from towpath.bench.harness.contestants import Cluster, Entry
from towpath.bench.harness.figures import Check
from towpath.bench.harness.pool import started
from towpath.bench.harness.suite import Settings
from towpath.bench.harness.worker import timed
from towpath.bench.peers import CandidateSpec
from towpath.bench.steps import stepper
from towpath.bench.suites import timelines
from towpath.bench.workload import Workload
from towpath.engine.layout import lay_out
from towpath.observing import Interval
from towpath.planner.model import Model
from towpath.planner.profile import Profile
from towpath.planner.request import Optimizer, Request, codecs_for_both
from towpath.planner.solver import Batching, Ranking, Solver
from towpath.sim.timeline import Timeline
from towpath.train.trace import simulated_intervals

LOSSLESS = ("ddp", "zero1", "zero2", "zero3", "hpz", "mics", "paro-iig", "paro-nig")
LOSSY = ("zero++", "ddp gradients=int8", "mics gradients=int4:64", "zero3 weights=int8 gradients=int8")
ALLOWED = ("int8", "int4:64")
AT_ONCE = 6  # contestants whose ranks live at the same time: memory
PROBE_SECONDS = 20.0
MOST_ERROR = {"on the cores": 0.15, "waiting": 0.10}
MOST_REGRET = 0.10
TRACED_STEPS = 3
DRAWN = ("zero3", "paro-iig")


@dataclass(frozen=True, slots=True)
class Environment:
    inter: str
    workload: Workload

    @property
    def name(self) -> str:
        w = self.workload
        size = "large" if w.width == 384 else "small"
        waits = ", waiting" if w.wait_seconds is not None else ""
        return f"{self.inter}, {w.topology}, {size}, {w.micro_steps} micro-steps{waits}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        workload = self.workload.quick() if settings.quick else self.workload
        cluster = Cluster(workload.topology, self.inter)
        seconds = 2.0 if settings.quick else PROBE_SECONDS
        with started({"probe": Entry(cluster, Planning, (workload, seconds))}, settings.say) as running:
            profile, model = running["probe"].ask("found")[0]
        plan = Plan(profile, model, workload)
        strategies = {name: made(name, workload.topology) for name in (*LOSSLESS, *LOSSY)}
        chosen = {"the plan's": plan.best(()), "the plan's with codecs": plan.best(ALLOWED)}
        measured: dict[str, list[float]] = {}
        traces: dict[str, list[list[Interval]]] = {}
        strategies |= chosen
        for first in range(0, len(strategies), AT_ONCE):
            names = list(strategies)[first : first + AT_ONCE]
            entries = {name: Entry(cluster, Step, (strategies[name], workload), warm_turns=2) for name in names}
            with started(entries, settings.say) as running:
                measured |= race.run(running, settings.rounds, settings.say).seconds
                traces |= {name: running[name].ask("traced")[0] for name in names}
        predicted = {name: plan.seconds(strategy) for name, strategy in strategies.items()}
        found = compared(predicted, measured)
        return {
            "checks": self._checks(found),
            "predicted_seconds": {name: round(value, 5) for name, value in predicted.items()},
            "measured_seconds": {name: [round(s, 5) for s in values] for name, values in measured.items()},
            "chosen": {name: strategy.to_toml() for name, strategy in chosen.items()},
            "computing_seconds": round(plan.computing, 5),
            "profile": profile.to_json(),
            **found,
            **self._timelines(plan, strategies, traces, measured),
        }

    def _timelines(
        self,
        plan: Plan,
        strategies: Mapping[str, towpath.Strategy],
        traces: Mapping[str, Sequence[Sequence[Interval]]],
        measured: Mapping[str, Sequence[float]],
    ) -> dict[str, Any]:
        """Task by task, and of some strategies what a picture of both needs."""
        compared, drawn = dict[str, Any](), dict[str, Any]()
        for name, steps in traces.items():
            events = plan.timeline(strategies[name]).events
            engine = timelines.usual([timelines.of_trace(step) for step in steps])
            seconds = statistics.median(measured[name])
            compared[name] = timelines.compared(engine, timelines.of_replay(events, strategies[name]), seconds)
            if name in DRAWN:
                drawn[name] = {
                    "engine": timelines.drawn(steps[-1]),
                    "simulated": timelines.drawn(simulated_intervals(events)),
                }
        return {"timelines": compared, "drawn": drawn}

    def _checks(self, found: Mapping[str, Any]) -> list[Check]:
        how = "waiting" if self.workload.wait_seconds is not None else "on the cores"
        return [
            Check("mean |predicted / measured − 1|", found["mean_error"], MOST_ERROR[how]),
            Check("regret, lossless", found["regret"]["lossless"], MOST_REGRET),
            Check("regret, with codecs", found["regret"]["with codecs"], MOST_REGRET),
            Check("rank correlation", found["rank_correlation"], at_least=0.9),
        ]


def compared(predicted: Mapping[str, float], measured: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Figures of one environment. The spread of the repeated steps stands beside the errors."""
    medians = {name: statistics.median(values) for name, values in measured.items()}
    errors = {name: predicted[name] / medians[name] - 1 for name in medians}
    lossless = [medians[name] for name in (*LOSSLESS, "the plan's")]
    return {
        "errors": {name: round(error, 4) for name, error in errors.items()},
        "spread": {name: round((max(v) - min(v)) / medians[name], 4) for name, v in measured.items()},
        "mean_error": statistics.fmean(map(abs, errors.values())),
        "regret": {
            "lossless": medians["the plan's"] / min(lossless) - 1,
            "with codecs": medians["the plan's with codecs"] / min(medians.values()) - 1,
        },
        "rank_correlation": rank_correlation([predicted[n] for n in medians], list(medians.values())),
    }


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, without ties."""
    places = [[1.0 * sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(places[0], places[1])


@dataclass(frozen=True)
class Plan:
    profile: Profile
    model: Model
    workload: Workload

    def best(self, allowed: Sequence[str]) -> towpath.Strategy:
        found = self._solver(allowed).solve(best=1)
        assert isinstance(found, Ranking)
        return found.ranked[0].strategy

    def seconds(self, strategy: towpath.Strategy) -> float:
        return self._solver(()).predict(strategy, self._batching).seconds

    def timeline(self, strategy: towpath.Strategy) -> Timeline:
        return self._solver(()).timeline(strategy, self._batching)

    @property
    def computing(self) -> float:
        return self._solver(()).predict(towpath.strategy("ddp", self.workload.topology), self._batching).computing

    @property
    def _batching(self) -> Batching:
        return Batching(1, self.workload.micro_steps)

    def _solver(self, allowed: Sequence[str]) -> Solver:
        weights, gradients = codecs_for_both(allowed)
        request = Request(
            self.workload.micro_steps * self.workload.topology.world,
            self.profile.memory,
            towpath.Precision(self.workload.torch_dtype),
            optimizer=Optimizer.named("adamw"),
            weights=weights,
            gradients=gradients,
            micro_batches=(1,),
            checkpointing=False,
        )
        return Solver(self.model, self.profile.cluster(), request)


class Planning:
    """The worker: measures the cluster and the model."""

    def __init__(self, rank: int, world: int, workload: Workload, seconds: float) -> None:
        self._profile = probe(workload.topology, seconds)
        inputs, tokens = next(workload.data(0)), workload.batch * workload.length
        model, precision = workload.model(), towpath.Precision(workload.torch_dtype)
        device = torch.device("cpu")
        dist.barrier()
        self._model = describe_measured(model, lay_out(model), lambda _: inputs, [1], tokens, device, precision)

    def found(self) -> tuple[Profile, Model]:
        return self._profile, self._model


def made(text: str, topology: towpath.Topology) -> towpath.Strategy:
    return CandidateSpec.parse(text).strategy(topology)


class Step:
    """A turn is one optimizer step."""

    def __init__(self, rank: int, world: int, strategy: towpath.Strategy, workload: Workload) -> None:
        self._model: Any = towpath.shard(workload.model(), strategy, precision=towpath.Precision(workload.torch_dtype))
        self._work = stepper(self._model, between, workload.data(rank), workload.micro_steps)

    def turn(self) -> float:
        return timed(self._work)

    def traced(self) -> list[Sequence[Interval]]:
        """Of some steps, each from the moment at which all ranks begin it."""
        found: list[Sequence[Interval]] = []
        for _ in range(TRACED_STEPS):
            with towpath.tracing(self._model) as trace:
                self._work()
            found.append(trace.intervals)
        return found


def between(model: Any, last: bool) -> AbstractContextManager[Any]:
    """Before the boundary nothing is reduced further than gradients are kept."""
    return nullcontext() if last else model.no_sync()
