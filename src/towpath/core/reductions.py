"""In which order units reduce their gradients, the same on every rank, and where they collect them until then."""

from __future__ import annotations

from collections.abc import Sequence

from towpath.core.actions import Action, Collect, Submit, Task, Wait
from towpath.core.step_state import Gradients, Slots, UnitState, in_backward_order
from towpath.core.strategy import Kind


class Reductions:
    """`slots`: how many units beside the root may collect at a time; the root does all the while."""

    def __init__(self, units: Sequence[UnitState], slots: int) -> None:
        root, *others = units
        travelling = [u.index for u in others if u.facts.trains and u.facts.reduces]
        self.slots = Slots(travelling, slots if travelling else 0)
        if root.facts.trains and root.facts.reduces:
            self.slots.reserve(root.index)
        # Whatever order the gradients arrive in: collectives must match.
        self._order = [u for u in in_backward_order(units) if u.facts.trains]
        self._next = 0  # of the order: the next to be reduced
        self.syncs: list[Task] = []  # at a boundary

    def collect(self, unit: UnitState) -> list[Action]:
        """Its first gradient of this backward pass arrives."""
        if unit.gradients is not Gradients.NONE:
            return []
        unit.gradients_become(Gradients.COLLECTING)
        if not unit.facts.reduces:
            return [Collect(unit.index, None)]
        slot = unit.collects_in = self.slots.next_free(unit.index)
        read, slot.task, slot.user = slot.task, None, unit.index
        return [*([] if read is None else [Wait(read)]), Collect(unit.index, slot)]

    def finish(self, unit: UnitState, boundary: bool) -> list[Action]:
        """No more gradients of it will come: it is reduced as soon as those before it in the order are."""
        unit.finished = True
        actions: list[Action] = []
        while self._next < len(self._order) and self._order[self._next].finished:
            actions += self._reduce(self._order[self._next], boundary)
            self._next += 1
        return actions

    def _reduce(self, unit: UnitState, boundary: bool) -> list[Action]:
        actions = self.collect(unit)  # where no gradient came, zeros take part in the sum
        unit.gradients_become(Gradients.REDUCED)
        after: tuple[Task, ...] = ()
        if unit.collects_in is not None:
            slot, unit.collects_in = unit.collects_in, None
            slot.user, slot.task = None, Task(Kind.REDUCE, unit.index, slot)
            after = (slot.task,)
            actions.append(Submit(slot.task))
        if boundary:
            self.syncs.append(Task(Kind.SYNC, unit.index, after=after))
            actions.append(Submit(self.syncs[-1]))
        return actions

    def abandon(self) -> list[Action]:
        """What is under way is waited for; what was collected is nobody's."""
        waits: list[Action] = [*map(Wait, self.syncs), *(Wait(s.task) for s in self.slots.all if s.task is not None)]
        for unit in self._order:
            unit.collects_in = None
        for slot in self.slots.all:
            slot.user = None
        return waits

    def restart(self) -> None:
        """For the next micro-step."""
        self._next, self.syncs = 0, []
        for unit in self._order:
            unit.gradients_become(Gradients.NONE)
            unit.finished = False
