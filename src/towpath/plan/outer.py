"""The replay of one period of outer steps, in which every fragment is exchanged once.

A rank of one island represents all ranks of all islands. Steps in which nothing is exchanged are equal, so only the
first of them is replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from towpath.core.outer_plan import OuterPlan, plan_outer
from towpath.core.outer_steps import OuterSteps
from towpath.core.steady_step import settled, steady_step, write_all
from towpath.core.strategy import OUTER_KINDS, Strategy, TransferKind
from towpath.core.unit_plan import UnitPlan
from towpath.plan.bandwidth import BandwidthModel, Thread, run_threads
from towpath.plan.hardware import Hardware
from towpath.plan.replay import ComputeSeconds, computed
from towpath.plan.simulated_engine import SimulatedEngine
from towpath.plan.timeline import Timeline


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


class PeriodReplay:
    """The replay of a period, without pipeline stages. The root's plan comes first.

    `hardware` has the topology of one island.
    """

    def __init__(
        self,
        strategy: Strategy,
        plans: Sequence[UnitPlan],
        hardware: Hardware,
        seconds: ComputeSeconds,
        micro_steps: int,
    ) -> None:
        plan = plan_outer(strategy, plans, hardware.form)
        assert plan is not None
        self._plan, self._plans, self._seconds, self._micro_steps = plan, plans, seconds, micro_steps
        self._bandwidth, self.timeline = BandwidthModel(hardware.capacities), Timeline()
        self._engine = SimulatedEngine(
            strategy, plans, hardware, self._bandwidth, self.timeline, copies=strategy.islands, outer=plan
        )
        self._durations: list[float] = []
        self._alone: float | None = None
        self._second_began = 0.0

    def run(self) -> Period:
        """Replay two periods. In the first one, exchanges begin. Return the second one."""
        run_threads(self._bandwidth, [self._thread()], [self._engine])
        self.timeline.seconds = self._bandwidth.now
        every = self._plan.settings.every
        steps = tuple(self._durations[every:])
        alone = min(self._durations) if self._alone is None else self._alone
        in_flight: Counter[TransferKind] = Counter()
        for event in self.timeline.events:
            if event.kind in OUTER_KINDS and event.track != "waiting" and event.start >= self._second_began:
                in_flight[event.kind] += (event.end - event.start) / every  # pyright: ignore[reportArgumentType]
        return Period(self._plan, steps, alone, dict(in_flight))

    def _thread(self) -> Thread:
        steps, machine, every = OuterSteps(self._plan), settled(self._plans), self._plan.settings.every
        for step in range(2 * every):
            actions, began = steps.advance(step), self._bandwidth.now
            if step == every:
                self._second_began = began
            is_alone = not actions and not steps.under_way
            if is_alone and self._alone is not None:
                self._durations.append(self._alone)
                continue
            for action in actions:
                yield from self._engine.execute(action, 0)
            for micro_step, action in steady_step(machine, self._plans, self._micro_steps):
                yield from computed(self._engine, self._seconds, action, micro_step)
            yield from self._engine.compute(self._seconds.optimizer, "optimizer")
            write_all(machine, self._plans)
            self._durations.append(self._bandwidth.now - began)
            if is_alone:
                self._alone = self._durations[-1]
