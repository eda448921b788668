"""The steady step: every unit runs once in each pass, in the order of the model, as in the step before.

The schedule lists the transfers of its tasks, and the simulator replays its computations and actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from towpath.core.passes import PassKind, StagePass
from towpath.core.step import StepMachine
from towpath.core.step_state import Action, AgreeOnSizes, ForwardPass, Submit, Task
from towpath.core.unit_plan import UnitPlan

# How many steps the machine runs before a steady one. In the first, it learns in which order units run in each pass.
STEPS_BEFORE = 2


class PassPart(StrEnum):
    """The parts of a pass that a unit computes.

    Other units compute one part in each pass. The root holds the model's first and last layers, so its pass has a
    second part (`..._END`) after all other units.
    """

    FORWARD = "forward"
    FORWARD_END = "forward end"
    BACKWARD = "backward"
    BACKWARD_END = "backward end"


@dataclass(frozen=True, slots=True)
class Compute:
    """A computation of the training thread, placed among the actions of the step machine. The simulator times it."""

    unit: int
    part: PassPart


def steady_tasks(
    plans: Sequence[UnitPlan], micro_steps: int, passes: Sequence[StagePass] = ()
) -> Iterator[tuple[int, Task]]:
    """Yield the tasks that a machine submits in one steady optimizer step, each with the number of its micro-step.

    A pipeline stage computes `passes` in every step. The number of its micro-step rises when a backward pass ends.
    """
    steps = settled_stage(plans, passes).step() if passes else steady_step(settled(plans), plans, micro_steps)
    for micro_step, action in steps:
        if isinstance(action, (Submit, AgreeOnSizes)):
            yield micro_step, action.task


def settled(plans: Sequence[UnitPlan]) -> StepMachine:
    """Return a machine at the beginning of a steady step: it has already run `STEPS_BEFORE` steps."""
    machine = StepMachine(plans)
    for _ in range(STEPS_BEFORE):
        for _ in steady_step(machine, plans, 1):
            pass
        write_all(machine, plans)
    return machine


def write_all(machine: StepMachine, plans: Sequence[UnitPlan]) -> None:
    """Report an optimizer step to the machine: it writes to every unit that trains."""
    for index, plan in enumerate(plans):
        if plan.trains:
            machine.written(index)


def settled_stage(plans: Sequence[UnitPlan], passes: Sequence[StagePass]) -> SteadyStage:
    """Return a stage at the beginning of a steady step: it has already run `STEPS_BEFORE` steps."""
    stage = SteadyStage(plans, passes)
    for _ in range(STEPS_BEFORE):
        for _ in stage.step():
            pass
        write_all(stage.machine, plans)
    return stage


class SteadyStage:
    """The steady step of one pipeline stage, whose passes of different micro-batches interleave."""

    def __init__(self, plans: Sequence[UnitPlan], passes: Sequence[StagePass]) -> None:
        self.machine = StepMachine(plans)
        self.machine.staged = True
        self._plans, self._order = plans, passes
        self._micro_batches = sum(each.kind is PassKind.FORWARD for each in passes)
        self._passes: dict[int, list[ForwardPass]] = {}  # by micro-batch, the passes whose backward is still to come
        self.micro_step = 0  # how many backward passes of this step have ended

    def step(self) -> Iterator[tuple[int, Action | Compute]]:
        """Yield the computations and actions of one step, each with the number of its micro-step."""
        for each in self._order:
            for action in self.walk(each):
                yield self.micro_step, action
        for action in self.end_boundary():
            yield self.micro_step, action

    def walk(self, each: StagePass) -> Iterator[Action | Compute]:
        """Yield the computations of one pass of the stage, and the actions of the machine around them."""
        if each.kind is PassKind.FORWARD:
            passes = self._passes[each.micro_batch] = []
            yield from _forward(self.machine, self._plans, passes)
            return
        last = self.micro_step == self._micro_batches - 1
        self.machine.boundary = last
        yield from _backward(self.machine, self._plans, self._passes.pop(each.micro_batch))
        if not last:
            self.machine.micro_step_ended()
            self.micro_step += 1

    def end_boundary(self) -> Iterator[Action]:
        """Yield the actions that end the step, after the last pass."""
        yield from self.machine.end_boundary()
        self.machine.micro_step_ended()
        self.micro_step = 0


def steady_step(
    machine: StepMachine, plans: Sequence[UnitPlan], micro_steps: int
) -> Iterator[tuple[int, Action | Compute]]:
    """Yield the computations and actions of one optimizer step, each with the number of its micro-step."""
    for micro_step in range(micro_steps):
        machine.boundary = micro_step == micro_steps - 1
        for action in _one_micro_step(machine, plans):
            yield micro_step, action


def _one_micro_step(machine: StepMachine, plans: Sequence[UnitPlan]) -> Iterator[Action | Compute]:
    passes: list[ForwardPass] = []
    yield from _forward(machine, plans, passes)
    yield from _backward(machine, plans, passes)
    machine.micro_step_ended()


def _forward(machine: StepMachine, plans: Sequence[UnitPlan], passes: list[ForwardPass]) -> Iterator[Action | Compute]:
    """Run the forward of all units, and append their forward passes to `passes`, the root's first."""
    root, *others = range(len(plans))
    for index in (root, *others):
        machine.entered(index)
        yield from machine.forward_begins(index, comes_back=True)
        passes.append(machine.graph_made(index))
        passes[-1].inputs = 0 if plans[index].lookup else 1
        yield Compute(index, PassPart.FORWARD)
        if index != root:
            yield from machine.forward_ends(index, graph_follows=True)
    yield Compute(root, PassPart.FORWARD_END)
    yield from machine.forward_ends(root, graph_follows=True)


def _backward(
    machine: StepMachine, plans: Sequence[UnitPlan], passes: Sequence[ForwardPass]
) -> Iterator[Action | Compute]:
    """Run the backward of all units. It ends with the last part of the root."""
    first, *rest = passes
    yield from machine.backward_begins(first)
    yield Compute(first.unit, PassPart.BACKWARD)
    yield from _gradients(machine, plans, first.unit)
    for passed in reversed(rest):
        yield from machine.backward_begins(passed)
        yield Compute(passed.unit, PassPart.BACKWARD)
        yield from _gradients(machine, plans, passed.unit)
        yield from machine.input_gradients_done(passed)
        yield from machine.weight_gradients_done(passed)
    yield Compute(first.unit, PassPart.BACKWARD_END)
    yield from machine.backward_pass_ended()


def _gradients(machine: StepMachine, plans: Sequence[UnitPlan], index: int) -> Sequence[Action]:
    return machine.gradient_arrives(index) if plans[index].trains else ()
