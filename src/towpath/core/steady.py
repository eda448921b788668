"""The steady step: every unit runs once in each pass, in the order of the model, as it did the step before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from towpath.core.actions import Action, Submit, Task
from towpath.core.step import StepMachine
from towpath.core.step_state import Pass, UnitFacts

# In the first step the machine learns which unit follows which, in the forward and then in the backward pass.
_STEPS_BEFORE = 2


def steady_tasks(facts: Sequence[UnitFacts], micro_steps: int) -> Iterator[tuple[int, Task]]:
    """What a machine submits in one optimizer step after others like it, and in which micro-step."""
    machine = StepMachine(facts)
    for step in range(_STEPS_BEFORE + 1):
        for micro_step, action in steady_step(machine, facts, micro_steps):
            if step == _STEPS_BEFORE and isinstance(action, Submit):
                yield micro_step, action.task
        for index, unit in enumerate(facts):
            if unit.trains:  # the optimizer writes it
                machine.written(index)


def steady_step(machine: StepMachine, facts: Sequence[UnitFacts], micro_steps: int) -> Iterator[tuple[int, Action]]:
    """What the machine answers to each of its micro-steps."""
    for micro_step in range(micro_steps):
        machine.boundary = micro_step == micro_steps - 1
        for action in _one_micro_step(machine, facts):
            yield micro_step, action


def _one_micro_step(machine: StepMachine, facts: Sequence[UnitFacts]) -> Iterator[Action]:
    """The root holds the model's first and last layers: the end of its pass is that of the whole backward pass."""
    passes: list[Pass] = []
    root, *others = range(len(facts))
    for index in (root, *others):
        machine.entered(index)
        yield from machine.forward_begins(index, comes_back=True)
        passes.append(machine.graph_made(index))
        if index != root:
            yield from machine.forward_ends(index, graph_follows=True)
    yield from machine.forward_ends(root, graph_follows=True)
    first, *rest = passes
    yield from machine.backward_begins(first)
    yield from _gradients(machine, facts, root)
    for passed in reversed(rest):
        yield from machine.backward_begins(passed)
        yield from _gradients(machine, facts, passed.unit)
        yield from machine.input_gradients_done(passed)
        yield from machine.weight_gradients_done(passed)
    yield from machine.backward_pass_ended()
    machine.micro_step_ended()


def _gradients(machine: StepMachine, facts: Sequence[UnitFacts], index: int) -> Sequence[Action]:
    return machine.gradient_arrives(index) if facts[index].trains else ()
