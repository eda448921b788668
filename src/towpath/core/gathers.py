"""When a unit's weights are made whole, in which slot, and until when another unit may have it."""

from __future__ import annotations

from collections.abc import Sequence

from towpath.core.actions import Action, Keep, Place, Seal, Show, Slot, Submit, Task, Wait
from towpath.core.step_state import Gradients, Slots, Successors, UnitState, Weights, WriteMark
from towpath.core.strategy import Kind
from towpath.errors import StepError


class Gathers:
    """`slots`: how many units beside the root may be whole at a time. What is to be done is added to `actions`."""

    def __init__(self, units: Sequence[UnitState], slots: int, writes: WriteMark, actions: list[Action]) -> None:
        self._units, self._writes, self._actions = units, writes, actions
        self._published = writes.version
        self._in_vain: list[Task] = []  # prefetches that nothing has waited for, and nothing will
        self.successors = Successors()
        root, *others = units
        gathered = [u.index for u in others if u.facts.gathers]
        self.slots = Slots(gathered, slots if gathered else 0)
        for number, unit in enumerate(others):
            if unit.facts.gathers:  # neighbours in forward order never share one
                unit.slot = self.slots.neighbour(number)
        if root.facts.gathers:
            root.slot = self.slots.reserve(0)

    def publish(self) -> None:
        if self._published == self._writes.version:
            return
        self._published = self._writes.version
        for unit in self._units:
            if unit.published != unit.version and unit.facts.publishes:
                if unit.facts.steps_on_host and unit.publication is not None:
                    # The host now writes to the memory that this one copied from.
                    self._actions.append(Wait(unit.publication, on_host=True))
                unit.publication = self._submit(Task(Kind.PUBLISH, unit.index))
            unit.published = unit.version

    def use(self, unit: UnitState, kind: Kind, keep_copy: bool = False) -> None:
        """Whole for what computes next; meanwhile the unit that came next the last time is prefetched."""
        if not unit.pinned:
            unit.weights_become(Weights.IN_USE)
        self.gather(unit, kind, keep_copy)
        if unit.facts.root and kind is Kind.BACKWARD_GATHER:
            # First in any case: where it computes nothing after its last unit, that unit's gradient may come before.
            following = self.successors.of(kind, unit.index)
        else:
            following = self.successors.runs(kind, unit.index)
        if following is not None:
            self.prefetch(self._units[following], kind, keep_copy)
        self.wait(unit)
        if keep_copy and unit.slot is not None and unit.facts.copies and unit.copied != unit.version:
            unit.copied = unit.version  # it was prefetched by a unit that runs without a backward pass
            self._actions.append(Keep(unit.index))

    def wait(self, unit: UnitState) -> None:
        if unit.ready is not None:
            self._actions.append(Wait(unit.ready))
        self._seal(unit, False)

    def gather(self, unit: UnitState, kind: Kind, keep_copy: bool) -> None:
        if unit.holds == unit.version:
            return
        self._take_slot(unit)
        unit.holds = unit.version
        if unit.slot is None:
            unit.ready = unit.publication
            return
        if kind is Kind.BACKWARD_GATHER and unit.facts.copies and unit.copied != unit.version:
            kind = Kind.GATHER  # the copy is of older weights: this forward pass kept none
        if keep_copy:
            unit.copied = unit.version
        # What was gathered in vain may still arrive: where this arrives, or in the copy that this one reads.
        after = [t for t in (unit.publication, unit.ready, unit.slot.task) if t is not None]
        unit.ready = self._submit(Task(kind, unit.index, unit.slot, tuple(dict.fromkeys(after)), keep_copy))
        unit.slot.task = unit.ready

    def prefetch(self, unit: UnitState, kind: Kind, keep_copy: bool) -> None:
        """If there is room."""
        if unit.slot is None or unit.pinned or unit.holds == unit.version:
            return
        if (user := self._user(unit.slot)) is not None and user.weights is Weights.EVICTABLE:
            self.release(user)
        if unit.slot.user is None:
            self.gather(unit, kind, keep_copy)
            unit.weights_become(Weights.PREFETCHED)

    def _take_slot(self, unit: UnitState) -> None:
        """Another unit's, if nothing computes with that; else a new one of this unit's own."""
        if unit.slot is None:
            return
        user = self._user(unit.slot)
        if user is not None and user is not unit:
            if user.idle or (user.running and user.gradients is Gradients.COMPLETE):
                self.release(user)
            elif any(not passed.done for passed in unit.passes):
                if user.running and unit.inside and not unit.running:
                    raise StepError(
                        f"{unit.facts} is recomputed in the backward pass of {user.facts}, whose memory it shares: "
                        "torch.utils.checkpoint around several units, such as the whole model, would need them all "
                        "whole at once. Checkpoint each block by itself, inside the model's forward. Where weights "
                        "are whole all the time (ddp, zero1, zero2), a checkpoint may be around anything."
                    )
                raise StepError(
                    f"{unit.facts} must be whole for its backward pass while {user.facts}, whose memory it shares, is "
                    "still in use: the units ran in an order never seen before. Pass units= to shard() so that units "
                    "which run at the same time form one."
                )
            else:
                unit.slot = self.slots.add(unit.index)
                self._actions.append(Place(unit.index, unit.slot))
        unit.slot.user = unit.index

    def _user(self, slot: Slot) -> UnitState | None:
        return None if slot.user is None else self._units[slot.user]

    def leave_evictable(self, unit: UnitState) -> None:
        """Nothing computes with its weights now; they stay as long as nobody wants the slot."""
        self.show(unit, unit.pinned)
        if unit.weights is Weights.IN_USE:  # not where its forward failed before they were whole
            unit.weights_become(Weights.EVICTABLE)

    def release(self, unit: UnitState) -> None:
        """Another unit may have the slot; but not while a call into it is under way (a training_step)."""
        held = unit.pinned or unit.inside > 0
        self.show(unit, held)
        if held:
            return
        if unit.weights is Weights.PREFETCHED and unit.ready is not None:
            self._in_vain.append(unit.ready)
        unit.weights_become(Weights.SHARDED)
        if unit.slot is not None:
            self._seal(unit, True)
            if unit.slot.user == unit.index:
                unit.slot.user = None
            unit.holds = -1

    def end_prefetches(self) -> None:
        """Before the user may write to the shards that they read."""
        for unit in self._units:
            if unit.weights is Weights.PREFETCHED:
                self.release(unit)
        self._actions += map(Wait, self._in_vain)
        self._in_vain = []

    def _submit(self, task: Task) -> Task:
        self._actions.append(Submit(task))
        return task

    def show(self, unit: UnitState, whole: bool) -> None:
        if whole != unit.shown:
            unit.shown = whole
            self._actions.append(Show(unit.index, whole))

    def _seal(self, unit: UnitState, sealed: bool) -> None:
        if sealed != unit.sealed:
            unit.sealed = sealed
            self._actions.append(Seal(unit.index, sealed))

    # Until told otherwise -------------------------------------------------------------------------------------------

    def pin(self, unit: UnitState) -> None:
        """In memory of its own."""
        if unit.slot is not None:
            if unit.inside:
                raise StepError(
                    f"{unit.facts}: a call into it is under way, which computes with its weights where they are now. "
                    "Enter full_parameters() before the call (of the model, or of a method that was registered)."
                )
            if any(not passed.done for passed in unit.passes):
                raise StepError(
                    f"{unit.facts} has a forward pass whose backward pass has not run: its weights cannot be moved "
                    "now. Call backward() first, or delete the loss."
                )
            self.release(unit)
            unit.home, unit.slot = unit.slot, Slot((unit.index,))
            self._actions.append(Place(unit.index, unit.slot))
        unit.weights_become(Weights.PINNED)
        self.gather(unit, Kind.GATHER, keep_copy=False)
        self.wait(unit)
        self.show(unit, True)

    def unpin(self, unit: UnitState) -> None:
        unit.weights_become(Weights.SHARDED)
        self.release(unit)
        if unit.home is not None:
            assert unit.slot is not None
            unit.slot.task = unit.ready = None  # it was waited for; and the memory goes with the last that names it
            unit.slot, unit.home = unit.home, None
            self._actions.append(Place(unit.index, unit.slot))
