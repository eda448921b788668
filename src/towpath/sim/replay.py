"""One training step, replayed: what the step machine asks for, carried out by a clock instead of an engine.

The thread that trains computes, submits and waits, as `core/schedule.py` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from towpath.core.owner_stepped import Iterate, MatrixPlan, step_actions
from towpath.core.schedule import Compute, Part, settled, steady_step
from towpath.core.strategy import Strategy
from towpath.core.unit_plan import UnitPlan
from towpath.sim.clock import Thread, run
from towpath.sim.engine import SimulatedEngine
from towpath.sim.fluid import BandwidthModel
from towpath.sim.hardware import Hardware
from towpath.sim.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Seconds:
    """What one rank computes, if nothing else goes on: in each unit's passes (the root's come first), in the root's
    after those of all others, and in the optimizer's step. `share`: of the passes' seconds, those in which the
    processor works, and not something beside it that takes nothing from what moves and encodes bytes.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    forward_end: float
    backward_end: float
    optimizer: float = 0.0
    share: float = 1.0

    @property
    def micro_step(self) -> float:
        """All but the optimizer's."""
        return sum(self.forward) + sum(self.backward) + self.forward_end + self.backward_end

    def of(self, compute: Compute) -> float:
        match compute.part:
            case Part.FORWARD:
                return self.forward[compute.unit]
            case Part.BACKWARD:
                return self.backward[compute.unit]
            case Part.FORWARD_END:
                return self.forward_end
            case Part.BACKWARD_END:
                return self.backward_end
            case Part.INPUT_GRADIENTS | Part.WEIGHT_GRADIENTS:  # as many products in one half as in the other
                return self.backward[compute.unit] / 2


@dataclass(frozen=True, slots=True)
class SteppedWhole:
    """Matrices that their owners step whole. `seconds_per_flop`: of the products in their iteration."""

    plan: MatrixPlan
    seconds_per_flop: float


class Replay:
    """`plans`: the root's first. `stepped`: what the optimizer steps whole, if it needs whole matrices. `say`: told how
    many micro-steps are done, and of how many."""

    def __init__(
        self,
        strategy: Strategy,
        plans: Sequence[UnitPlan],
        hardware: Hardware,
        seconds: Seconds,
        micro_steps: int,
        stepped: SteppedWhole | None = None,
        say: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._say = say
        self._seconds, self._micro_steps, self._stepped = seconds, micro_steps, stepped
        self._fluid, self._timeline = BandwidthModel(hardware.capacities), Timeline()
        self._engine = SimulatedEngine(strategy, plans, hardware, self._fluid, self._timeline)

    def run(self) -> Timeline:
        """The step, its optimizer's part included."""
        run(self._fluid, [self._thread()], [self._engine])
        self._timeline.seconds = self._fluid.now
        return self._timeline

    def _thread(self) -> Thread:
        engine, plans = self._engine, self._engine.plans
        said = 0
        for micro_step, action in steady_step(settled(plans), plans, self._micro_steps):
            if micro_step > said:
                said = micro_step
                self._say(said, self._micro_steps)
            if isinstance(action, Compute):
                name = f"{action.part.value} of {plans[action.unit].name or 'root'}"
                yield from engine.compute(self._seconds.of(action), name, self._seconds.share)
            else:
                yield from engine.execute(action, micro_step)
        yield from engine.compute(self._seconds.optimizer, "optimizer")
        if self._stepped is not None:
            yield from self._step_whole(self._stepped)

    def _step_whole(self, stepped: SteppedWhole) -> Thread:
        plan = stepped.plan
        rounds = plan.step()
        for action in step_actions(plan, rounds):
            if isinstance(action, Iterate):
                seconds = stepped.seconds_per_flop * rounds[action.round].flops
                yield from self._engine.compute(seconds, f"optimizer, round {action.round}")
            else:
                yield from self._engine.execute(action, self._micro_steps - 1)
