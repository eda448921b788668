"""The steady step: every unit runs once in each pass, in the order of the model, as it did the step before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from towpath.core.actions import Action, Submit, Task
from towpath.core.pipeline import PassKind, StagePass
from towpath.core.step import StepMachine
from towpath.core.step_state import Pass, UnitFacts, in_backward_order

# In the first step the machine learns which unit follows which, in the forward and then in the backward pass.
STEPS_BEFORE = 2


class Part(StrEnum):
    """The root holds the model's first and last layers, around all other units; these have one part in each pass."""

    FORWARD = "forward"
    FORWARD_END = "forward end"
    BACKWARD = "backward"
    BACKWARD_END = "backward end"
    # The two halves of a backward pass, of any unit.
    INPUT_GRADIENTS = "input gradients"
    WEIGHT_GRADIENTS = "weight gradients"


@dataclass(frozen=True, slots=True)
class Compute:
    """What the thread that trains computes at this point."""

    unit: int
    part: Part


def steady_tasks(facts: Sequence[UnitFacts], micro_steps: int) -> Iterator[tuple[int, Task]]:
    """What a machine submits in one optimizer step after others like it, and in which micro-step."""
    machine = settled(facts)
    for micro_step, action in steady_step(machine, facts, micro_steps):
        if isinstance(action, Submit):
            yield micro_step, action.task


def settled(facts: Sequence[UnitFacts]) -> StepMachine:
    """A machine at the beginning of a step, after others like it."""
    machine = StepMachine(facts)
    for _ in range(STEPS_BEFORE):
        for _ in steady_step(machine, facts, 1):
            pass
        write_all(machine, facts)
    return machine


def write_all(machine: StepMachine, facts: Sequence[UnitFacts]) -> None:
    """The optimizer's step."""
    for index, unit in enumerate(facts):
        if unit.trains:
            machine.written(index)


def staged_tasks(facts: Sequence[UnitFacts], passes: Sequence[StagePass]) -> Iterator[tuple[int, Task]]:
    """The same of a pipeline's stage that computes these passes in each step. Micro-steps are counted as backward
    passes end."""
    stage = settled_stage(facts, passes)
    for each in passes:
        for action in stage.walk(each):
            if isinstance(action, Submit):
                yield stage.micro_step, action.task
    for action in stage.boundary_ends():
        if isinstance(action, Submit):
            yield stage.micro_step, action.task


def settled_stage(facts: Sequence[UnitFacts], passes: Sequence[StagePass]) -> SteadyStage:
    """At the beginning of a step, after others like it."""
    stage = SteadyStage(facts, passes)
    for _ in range(STEPS_BEFORE):
        for each in passes:
            for _ in stage.walk(each):
                pass
        for _ in stage.boundary_ends():
            pass
        write_all(stage.machine, facts)
    return stage


class SteadyStage:
    """A stage of a pipeline, whose passes interleave."""

    def __init__(self, facts: Sequence[UnitFacts], passes: Sequence[StagePass]) -> None:
        self.machine = StepMachine(facts)
        self.machine.staged = True
        self._facts = facts
        self._micro_batches = sum(each.kind is PassKind.FORWARD for each in passes)
        self._passes: dict[int, list[Pass]] = {}  # by micro-batch, those whose gradients are still to come
        self.micro_step = 0  # backward passes that have ended

    def walk(self, each: StagePass) -> Iterator[Action | Compute]:
        """What is computed in one of its passes, and what the machine answers."""
        match each.kind:
            case PassKind.FORWARD:
                passes = self._passes[each.micro_batch] = []
                yield from _forward(self.machine, self._facts, passes)
                return
            case PassKind.INPUT_GRADIENTS:
                yield from _input_gradients(self.machine, self._passes[each.micro_batch])
                return
            case PassKind.BACKWARD:
                rest = _backward
            case PassKind.WEIGHT_GRADIENTS:
                rest = _weight_gradients
        last = self.micro_step == self._micro_batches - 1
        self.machine.boundary = last
        yield from rest(self.machine, self._facts, self._passes.pop(each.micro_batch))
        if not last:
            self.machine.micro_step_ended()
            self.micro_step += 1

    def boundary_ends(self) -> Iterator[Action]:
        yield from self.machine.boundary_ends()
        self.machine.micro_step_ended()
        self.micro_step = 0


def steady_step(
    machine: StepMachine, facts: Sequence[UnitFacts], micro_steps: int
) -> Iterator[tuple[int, Action | Compute]]:
    """What is computed in each of its micro-steps, and what the machine answers."""
    for micro_step in range(micro_steps):
        machine.boundary = micro_step == micro_steps - 1
        for action in _one_micro_step(machine, facts):
            yield micro_step, action


def _one_micro_step(machine: StepMachine, facts: Sequence[UnitFacts]) -> Iterator[Action | Compute]:
    passes: list[Pass] = []
    yield from _forward(machine, facts, passes)
    yield from _backward(machine, facts, passes)
    machine.micro_step_ended()


def _forward(machine: StepMachine, facts: Sequence[UnitFacts], passes: list[Pass]) -> Iterator[Action | Compute]:
    """`passes` gets those of all units, the root's first."""
    root, *others = range(len(facts))
    for index in (root, *others):
        machine.entered(index)
        yield from machine.forward_begins(index, comes_back=True)
        passes.append(machine.graph_made(index))
        yield Compute(index, Part.FORWARD)
        if index != root:
            yield from machine.forward_ends(index, graph_follows=True)
    yield Compute(root, Part.FORWARD_END)
    yield from machine.forward_ends(root, graph_follows=True)


def _backward(machine: StepMachine, facts: Sequence[UnitFacts], passes: Sequence[Pass]) -> Iterator[Action | Compute]:
    """The end of the root's pass is that of the whole backward pass."""
    first, *rest = passes
    yield from machine.backward_begins(first)
    yield Compute(first.unit, Part.BACKWARD)
    yield from _gradients(machine, facts, first.unit)
    for passed in reversed(rest):
        yield from machine.backward_begins(passed)
        yield Compute(passed.unit, Part.BACKWARD)
        yield from _gradients(machine, facts, passed.unit)
        yield from machine.input_gradients_done(passed)
        yield from machine.weight_gradients_done(passed)
    yield Compute(first.unit, Part.BACKWARD_END)
    yield from machine.backward_pass_ended()


def _input_gradients(machine: StepMachine, passes: Sequence[Pass]) -> Iterator[Action | Compute]:
    first, *rest = passes
    machine.more_passes = True
    yield from machine.backward_begins(first)
    yield Compute(first.unit, Part.INPUT_GRADIENTS)
    for passed in reversed(rest):
        yield from machine.backward_begins(passed)
        yield Compute(passed.unit, Part.INPUT_GRADIENTS)
        yield from machine.input_gradients_done(passed)
    yield from machine.backward_pass_ended()
    machine.more_passes = False


def _weight_gradients(
    machine: StepMachine, facts: Sequence[UnitFacts], passes: Sequence[Pass]
) -> Iterator[Action | Compute]:
    yield from machine.weight_gradients_begin(passes)
    for passed in in_backward_order(passes):
        yield Compute(passed.unit, Part.WEIGHT_GRADIENTS)
        yield from _gradients(machine, facts, passed.unit)
        yield from machine.weight_gradients_done(passed)
    yield from machine.weight_gradients_end(passes)
    yield from machine.backward_pass_ended()


def _gradients(machine: StepMachine, facts: Sequence[UnitFacts], index: int) -> Sequence[Action]:
    return machine.gradient_arrives(index) if facts[index].trains else ()
