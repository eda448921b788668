"""The replay of one period of outer steps, in which every fragment is exchanged once.

A rank of one island represents all ranks of all islands. Steps in which nothing is exchanged are equal, so only the
first of them is replayed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from towpath.core.schedule import settled, steady_step, write_all
from towpath.core.strategy import OUTER_KINDS, TransferKind
from towpath.outer.exchanges import OuterPlan, OuterSteps, plan_outer
from towpath.plan.bandwidth import BandwidthModel, Thread, Timeline, run_threads
from towpath.plan.hardware import Hardware
from towpath.plan.replay import SimulatedStage, computed
from towpath.plan.simulated_engine import SimulatedEngine


@dataclass(frozen=True, slots=True)
class Period:
    """The simulated steps of one period."""

    plan: OuterPlan  # what is exchanged
    steps: tuple[float, ...]  # the seconds of each step of the period, in order
    alone: float  # the seconds of a step in which no exchange is begun, under way or applied
    in_flight: dict[TransferKind, float]  # the seconds for which exchanges run, as the mean of a step

    @property
    def mean(self) -> float:
        """The mean seconds of a step."""
        return sum(self.steps) / len(self.steps)


def replay_period(model: SimulatedStage, hardware: Hardware, micro_steps: int) -> Period:
    """Replay two periods of a whole model on one island's `hardware`, and return the second one."""
    strategy, plans, seconds = model.strategy, model.plans, model.seconds
    plan = plan_outer(strategy, plans, hardware.form)
    assert plan is not None
    bandwidth, timeline, every = BandwidthModel(hardware.capacities), Timeline(), plan.settings.every
    engine = SimulatedEngine(strategy, plans, hardware, bandwidth, timeline, copies=strategy.islands, outer=plan)
    starts: list[float] = []  # of each step
    durations: list[float] = []
    alone: list[float] = []  # the duration of the first step in which nothing is exchanged

    def train() -> Thread:
        steps, machine = OuterSteps(plan), settled(plans)
        for step in range(2 * every):
            actions = steps.advance(step)
            starts.append(bandwidth.now)
            is_alone = not actions and not steps.under_way
            if is_alone and alone:
                durations.append(alone[0])
                continue
            for action in actions:
                yield from engine.execute(action, 0)
            for micro_step, action in steady_step(machine, plans, micro_steps):
                yield from computed(engine, seconds, action, micro_step)
            yield from engine.compute(seconds.optimizer, "optimizer")
            write_all(machine, plans)
            durations.append(bandwidth.now - starts[step])
            if is_alone:
                alone.append(durations[step])

    run_threads(bandwidth, [train()], [engine])
    in_flight: Counter[TransferKind] = Counter()
    for event in timeline.events:
        # In the first period exchanges only begin, so its steps are not those of a long run.
        if event.kind in OUTER_KINDS and event.track != "waiting" and event.start >= starts[every]:
            in_flight[event.kind] += (event.end - event.start) / every  # pyright: ignore[reportArgumentType]
    return Period(plan, tuple(durations[every:]), min(alone or durations), dict(in_flight))
