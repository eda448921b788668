"""The step machine: what is done in a training step on one rank, in which memory, and after what. It moves no data.

Its methods are events: what the engine's hooks see, and what the user does between. They answer with actions
(`actions.py`), to be carried out in their order, by the engine; `steady_step.py` has those of a step like every other.

A forward makes a unit's weights whole, in a slot that units take turns in, and prefetches the unit that came next the
last time. A backward does the same from the backward copy; when the last of a unit's gradients is there they are
reduced. At a boundary they are synchronised as well; what the optimizer then writes is published before a forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from towpath.core.step_state import (
    Action,
    AssignSlot,
    CheckRanks,
    ForwardPass,
    Gradients,
    InvalidateViews,
    OpenGradients,
    ParamVersion,
    SaveBackwardCopy,
    SetGrads,
    Slot,
    Slots,
    Submit,
    Successors,
    SwapParameters,
    Task,
    UnitFacts,
    UnitState,
    Wait,
    Weights,
    in_backward_order,
)
from towpath.core.strategy import Kind
from towpath.errors import StepError

# --- gathers ----------------------------------------------------------------------------------------------------------
#
# When a unit's weights are made whole, in which slot, and until when another unit may have it.


class Gathers:
    """`slots`: how many units beside the root may be whole at a time. What is to be done is added to `actions`."""

    def __init__(self, units: Sequence[UnitState], slots: int, writes: ParamVersion, actions: list[Action]) -> None:
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
            self._actions.append(SaveBackwardCopy(unit.index))

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
                self._actions.append(AssignSlot(unit.index, unit.slot))
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
            self._actions.append(SwapParameters(unit.index, whole))

    def _seal(self, unit: UnitState, sealed: bool) -> None:
        if sealed != unit.sealed:
            unit.sealed = sealed
            self._actions.append(InvalidateViews(unit.index, sealed))

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
            self._actions.append(AssignSlot(unit.index, unit.slot))
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
            self._actions.append(AssignSlot(unit.index, unit.slot))


# --- reductions -------------------------------------------------------------------------------------------------------
#
# In which order units reduce their gradients, the same on every rank, and where they collect them until then.


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
            return [OpenGradients(unit.index, None)]
        slot = unit.collects_in = self.slots.next_free(unit.index)
        read, slot.task, slot.user = slot.task, None, unit.index
        return [*([] if read is None else [Wait(read)]), OpenGradients(unit.index, slot)]

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


# How many units may be whole at once, beside the root: the one that computes, and the one that is prefetched meanwhile.
UNITS_IN_FLIGHT = 2


class StepMachine:
    """`marks`: what counts the writes to each unit's parameters; without them the machine is told (`written`)."""

    def __init__(self, facts: Sequence[UnitFacts], marks: Sequence[ParamVersion] | None = None) -> None:
        assert facts and facts[0].root and not any(f.root for f in facts[1:])
        writes = (marks[0].of if marks else None) or ParamVersion()
        marks = marks or [ParamVersion(writes) for _ in facts]
        self._units = [UnitState(index, f, mark) for index, (f, mark) in enumerate(zip(facts, marks, strict=True))]
        self._root, others = self._units[0], self._units[1:]
        self._actions: list[Action] = []
        slots = min(UNITS_IN_FLIGHT, len(others))
        self._gathers = Gathers(self._units, slots, writes, self._actions)
        self._reductions = Reductions(self._units, slots)
        self.in_backward = False  # a backward pass of the model is under way
        self.failed = False  # the last one did, and its gradients are still to be dropped
        self._graphs = 0  # backward passes that may walk a graph of another: units then end with the whole pass
        self.boundary = True  # this backward pass, or the next, is the last before the optimizer's step
        # After it further ones come before anything is reduced: as where the gradients of the weights come later.
        self.more_passes = False
        # As in a pipeline: a backward pass walks the graph of one forward pass, while others wait for theirs; and the
        # mean gradients are delivered by `boundary_ends`, once those behind have got what they wait for.
        self.staged = False
        self._forward_walk = self._walk = 0  # the number of what runs forward, and of what is walked backward

    # What the engine may ask -----------------------------------------------------------------------------------------

    @property
    def weight_slots(self) -> Slots:
        return self._gathers.slots

    @property
    def gradient_slots(self) -> Slots:
        return self._reductions.slots

    def slot_of(self, index: int) -> Slot | None:
        """Where the unit's whole weights live; none where they always are whole."""
        return self._units[index].slot

    def is_whole(self, index: int) -> bool:
        """Whether its weights are whole and fresh, or on their way."""
        return self._units[index].holds == self._units[index].version

    def is_pinned(self, index: int) -> bool:
        return self._units[index].pinned

    def is_collecting(self, index: int) -> bool:
        """Whether gradients of it have arrived in this backward pass, and are not reduced yet."""
        return self._units[index].gradients in (Gradients.COLLECTING, Gradients.COMPLETE)

    def is_reduced(self, index: int) -> bool:
        """Whether its gradients of this backward pass are."""
        return self._units[index].gradients is Gradients.REDUCED

    def runs_backward(self, index: int) -> bool:
        return self._units[index].running

    def is_entered(self, index: int) -> bool:
        """Whether a call into it is under way, or its backward pass: what is called now finds it whole."""
        unit = self._units[index]
        return (unit.shown and not unit.pinned) or unit.inside > 0

    # Events: forward ------------------------------------------------------------------------------------------------

    def entered(self, index: int) -> None:
        """A call into the unit: of one of its modules, or of a method. Before `forward_begins`."""
        self._units[index].inside += 1

    def publish(self) -> list[Action]:
        """Before units are made whole: what was written is sent to every rank's shards."""
        self._gathers.publish()
        return self._answer()

    def forward_begins(self, index: int, *, comes_back: bool, recomputing: bool = False) -> list[Action]:
        """`comes_back`: a backward pass may follow. `recomputing`: inside a backward pass."""
        unit = self._units[index]
        if not recomputing:
            self._gathers.publish()
            if unit is self._root:
                self._pass_of_the_model_begins()
                self._forward_walk += self.staged
            if comes_back:
                unit.forwards[self._forward_walk] += 1
        self._gathers.use(unit, Kind.BACKWARD_GATHER if recomputing else Kind.GATHER, comes_back and not recomputing)
        self._gathers.show(unit, True)
        return self._answer()

    def graph_made(self, index: int) -> ForwardPass:
        """The forward that began last makes a graph: what its backward pass is spoken of by."""
        unit = self._units[index]
        made = ForwardPass(index, unit.version, self._forward_walk)
        unit.passes.add(made)
        return made

    def graph_dropped(self, passed: ForwardPass) -> None:
        """It made none after all."""
        self._units[passed.unit].passes.discard(passed)

    def forward_ends(self, index: int, *, graph_follows: bool, recomputing: bool = False) -> list[Action]:
        unit = self._units[index]
        unit.inside -= 1
        self._gathers.show(unit, unit.pinned or unit.running or unit.inside > 0)
        # The root is needed again at once, when backward begins; a recomputed unit is in its backward pass already.
        if not recomputing and not (unit.facts.root and graph_follows) and not unit.inside:
            self._gathers.leave_evictable(unit)
            through = unit.forwards[self._forward_walk] % unit.facts.modules == 0
            if graph_follows and through and self._gathers.successors.of(Kind.GATHER, index) is None:
                self._expect_backward()
        if unit is self._root and not graph_follows and not recomputing:
            self._gathers.end_prefetches()
        return self._answer()

    # Events: backward -----------------------------------------------------------------------------------------------

    def backward_begins(self, passed: ForwardPass, *, graph: bool = False) -> list[Action]:
        """The first gradient reaches an output of that pass. `graph`: the walk makes a graph in turn (create_graph)."""
        unit = self._units[passed.unit]
        if graph:
            self._check_graph(unit)
        self._backward_of_the_model_begins()
        self._walk = passed.walk
        if passed.version != unit.version:
            raise StepError(
                f"{unit.facts}: its parameters were written between this forward pass and its backward pass, whose "
                "gradients would be of other weights. Step the optimizer after backward()."
            )
        passed.running, passed.done = True, False
        unit.running_passes += 1
        self._gathers.use(unit, Kind.BACKWARD_GATHER)
        self._gathers.show(unit, True)  # for what is recomputed inside the unit
        return self._answer()

    def input_gradients_done(self, passed: ForwardPass) -> list[Action]:
        """The gradients of its inputs are there: nothing reads the weights any more."""
        unit = self._units[passed.unit]
        unit.running_passes -= passed.running
        passed.running, passed.done = False, True
        if not unit.running and not unit.inside:
            self._gathers.leave_evictable(unit)
        return self._answer()

    def weight_gradients_begin(self, passes: Sequence[ForwardPass]) -> list[Action]:
        """The second half of a backward pass begins, for all its units. Their weights have stayed whole, and stay so
        until `weight_gradients_end`: inside any of them something may be recomputed."""
        for passed in passes:
            unit = self._units[passed.unit]
            assert unit.slot is None, f"{unit.facts}: its weights may have been another unit's meanwhile"
            self.in_backward, self._walk = True, passed.walk
            unit.inside += 1
            self._gathers.show(unit, True)
        return self._answer()

    def weight_gradients_end(self, passes: Sequence[ForwardPass]) -> list[Action]:
        """After `weight_gradients_done` of each."""
        for passed in passes:
            unit = self._units[passed.unit]
            unit.inside -= 1
            self._gathers.show(unit, unit.pinned or unit.inside > 0)
        return self._answer()

    def weight_gradients_done(self, passed: ForwardPass) -> list[Action]:
        """The gradients of its weights are there, too: the last event of its backward pass, right after
        `input_gradients_done` or later."""
        unit = self._units[passed.unit]
        unit.backwards[passed.walk] += 1
        # Counted, so that it is decided alike on every rank: what a rank happens to keep alive must not matter.
        if unit.backwards[passed.walk] >= unit.forwards[passed.walk] and not self._graphs and not self.more_passes:
            self._finish(unit)
        return self._answer()

    def gradient_arrives(self, index: int) -> list[Action]:
        """The first of the unit's parameters has one, in this backward pass."""
        self._backward_of_the_model_begins()
        self._actions += self._reductions.collect(self._units[index])
        return self._answer()

    def gradients_complete(self, index: int) -> None:
        """Each of its parameters has one: its slot may be taken. Where its inputs want none, nothing else tells."""
        self._units[index].gradients_become(Gradients.COMPLETE)

    def backward_pass_ended(self) -> list[Action]:
        """autograd has walked a whole graph."""
        self._end_passes()
        if self.more_passes:
            self.in_backward = False
            return self._answer()
        for unit in self._units:
            self._finish(unit)
        self._gathers.end_prefetches()
        return self._answer() if self.staged or not self.boundary else self.boundary_ends()

    def boundary_ends(self) -> list[Action]:
        """What was synchronised is delivered: at the end of the backward pass, or of the whole pipeline."""
        syncs = (Wait(sync, self._units[sync.unit].facts.steps_on_host) for sync in self._reductions.syncs)
        self._actions += [CheckRanks(), *syncs, SetGrads()]
        return self._answer()

    def micro_step_ended(self) -> None:
        """What was asked for at the end of the backward pass is done."""
        self.in_backward = self.failed = False
        self._graphs = max(self._graphs - 1, 0)
        self._reductions.restart()
        for unit in self._units:
            for passes in (unit.forwards, unit.backwards):
                passes.pop(self._walk, None)

    def backward_pass_failed(self) -> list[Action]:
        """Nothing of it is delivered, and what ranks that ran different units would prefetch is forgotten."""
        self.failed = True
        self._gathers.successors = Successors()
        self._end_passes()
        return self._answer()

    def abandoned(self) -> list[Action]:
        """What was accumulated since the last boundary is dropped."""
        self._actions += self._reductions.abandon()
        self.micro_step_ended()
        for unit in self._units:
            unit.forwards.clear()
            unit.backwards.clear()
        self._end_passes()
        self._gathers.end_prefetches()
        return self._answer()

    # Events: what the user does -------------------------------------------------------------------------------------

    def written(self, index: int) -> None:
        """To parameters of the unit."""
        self._units[index].mark.written()

    def pin(self, index: int) -> list[Action]:
        """Whole until `unpin`, in memory of its own. After `publish`."""
        self._gathers.pin(self._units[index])
        return self._answer()

    def unpin(self, index: int) -> list[Action]:
        self._gathers.unpin(self._units[index])
        return self._answer()

    # Passes of the model --------------------------------------------------------------------------------------------

    def _finish(self, unit: UnitState) -> None:
        """No more gradients of it will come: it is reduced as soon as those before it in the order are."""
        self._gathers.release(unit)
        self._actions += self._reductions.finish(unit, self.boundary) if self.in_backward else []

    def _expect_backward(self) -> None:
        """The last unit is through: the first that backward needs is prefetched, while the root computes its end."""
        if (first := self._gathers.successors.of(Kind.BACKWARD_GATHER, self._root.index)) is not None:
            unit = self._units[first]
            if unit.idle:
                self._gathers.release(unit)
            self._gathers.prefetch(unit, Kind.BACKWARD_GATHER, keep_copy=False)

    def _pass_of_the_model_begins(self, first: int | None = None) -> None:
        """What the one before used, or prefetched in vain, is let go."""
        self._gathers.successors.pass_begins(first)
        for unit in self._units:
            prefetched = unit.weights is Weights.PREFETCHED and not self.in_backward
            if unit.weights is Weights.EVICTABLE or prefetched:
                self._gathers.release(unit)

    def _backward_of_the_model_begins(self) -> None:
        if not self.in_backward:
            self.in_backward = True
            self._pass_of_the_model_begins(self._root.index)

    def _end_passes(self) -> None:
        for unit in self._units:
            for passed in unit.passes if unit.running else ():
                passed.running, passed.done = False, passed.done or passed.running
            unit.running_passes = 0
            self._gathers.release(unit)

    def _check_graph(self, unit: UnitState) -> None:
        """Under create_graph=True, what a backward pass computes with is read again when its graph is walked."""
        if unit.slot is not None and not unit.pinned:
            raise StepError(
                f"{unit.facts}: a graph made with create_graph=True reads the weights again after they are released. "
                "Run forward, autograd.grad(...) and backward() inside `with towpath.full_parameters(model):`."
            )
        self._graphs = 2  # this one and the next

    # Answers --------------------------------------------------------------------------------------------------------

    def _answer(self) -> list[Action]:
        actions = self._actions.copy()
        self._actions.clear()
        return actions
