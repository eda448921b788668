"""The steady step: every unit runs once in each pass, in the order of the model, as it did the step before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from towpath.core.actions import Action, Submit, Task
from towpath.core.pipeline import PassKind, StagePass
from towpath.core.step import StepMachine
from towpath.core.step_state import Pass, UnitFacts

# In the first step the machine learns which unit follows which, in the forward and then in the backward pass.
STEPS_BEFORE = 2


class Part(StrEnum):
    """The root holds the model's first and last layers, around all other units; these have one part in each pass."""

    FORWARD = "forward"
    FORWARD_END = "forward end"
    BACKWARD = "backward"
    BACKWARD_END = "backward end"


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
    machine = StepMachine(facts)
    machine.staged = True
    for step in range(STEPS_BEFORE + 1):
        for micro_step, action in _staged_step(machine, facts, passes):
            if isinstance(action, Submit) and step == STEPS_BEFORE:
                yield micro_step, action.task
        write_all(machine, facts)


def _staged_step(
    machine: StepMachine, facts: Sequence[UnitFacts], passes: Sequence[StagePass]
) -> Iterator[tuple[int, Action | Compute]]:
    walked = 0
    backward = (PassKind.BACKWARD, PassKind.INPUT_GRADIENTS)
    left = sum(each.kind in backward for each in passes)
    waiting: dict[int, list[Pass]] = {}
    for each in passes:
        if each.kind is PassKind.FORWARD:
            waiting[each.micro_batch] = []
            for action in _forward(machine, facts, waiting[each.micro_batch]):
                yield walked, action
        elif each.kind in backward:
            left -= 1
            machine.boundary = not left
            for action in _backward(machine, facts, waiting.pop(each.micro_batch)):
                yield walked, action
            if left:
                machine.micro_step_ended()
                walked += 1
    for action in machine.boundary_ends():
        yield walked, action
    machine.micro_step_ended()


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


def _gradients(machine: StepMachine, facts: Sequence[UnitFacts], index: int) -> Sequence[Action]:
    return machine.gradient_arrives(index) if facts[index].trains else ()
