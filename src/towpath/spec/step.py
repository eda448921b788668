"""The step machine: what is done in a training step on one rank, in which memory, and after what. It moves no data.

Its methods are events: what the engine's hooks see, and what the user does between. They answer with actions
(`actions.py`), to be carried out in their order, by the engine; `steady.py` replays them for a step like every other.

A forward makes a unit's weights whole, in a slot that units take turns in, and prefetches the unit that came next the
last time. A backward does the same from the backward copy; when the last of a unit's gradients is there they are
reduced. At a boundary they are synchronised as well; what the optimizer then writes is published before a forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from towpath.errors import StepError
from towpath.spec.actions import Action, Compare, Deliver, Place, Seal, Show, Slot, Submit, Task, Wait
from towpath.spec.reductions import Reductions
from towpath.spec.step_state import Gradients, Pass, Slots, Successors, UnitFacts, UnitState, Weights, WriteMark
from towpath.spec.strategy import Kind

# How many units may be whole at once, beside the root: the one that computes, and the one that is prefetched meanwhile.
UNITS_IN_FLIGHT = 2


class StepMachine:
    """`marks`: what counts the writes to each unit's parameters; without them the machine is told (`written`)."""

    def __init__(self, facts: Sequence[UnitFacts], marks: Sequence[WriteMark] | None = None) -> None:
        assert facts and facts[0].root and not any(f.root for f in facts[1:])
        self._writes = (marks[0].of if marks else None) or WriteMark()
        self._published = self._writes.version
        marks = marks or [WriteMark(self._writes) for _ in facts]
        self._units = [UnitState(index, f, mark) for index, (f, mark) in enumerate(zip(facts, marks, strict=True))]
        self._root, others = self._units[0], self._units[1:]
        ways = min(UNITS_IN_FLIGHT, len(others))
        gathered = [u.index for u in others if u.facts.gathers]
        self.weight_slots = Slots(gathered, ways if gathered else 0)
        for number, unit in enumerate(others):
            if unit.facts.gathers:  # neighbours in forward order never share one
                unit.slot = self.weight_slots.neighbour(number)
        if self._root.facts.gathers:
            self._root.slot = self.weight_slots.reserve(0)
        self._reductions = Reductions(self._units, ways)
        self._successors = Successors()
        self.in_backward = False  # a backward pass of the model is under way
        self._graphs = 0  # backward passes that may walk a graph of another: units then end with the whole pass
        self._actions: list[Action] = []
        self.boundary = True  # the next backward pass ends a step of the optimizer
        self.more_passes = False  # after it further ones come before anything is reduced, as in a pipeline

    # What the hands may ask -----------------------------------------------------------------------------------------

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
        self._publish()
        return self._answer()

    def forward_begins(self, index: int, *, comes_back: bool, recomputing: bool = False) -> list[Action]:
        """`comes_back`: a backward pass may follow. `recomputing`: inside a backward pass."""
        unit = self._units[index]
        if not recomputing:
            self._publish()
            unit.forwards += comes_back
            if unit is self._root:
                self._pass_of_the_model_begins()
        self._use(unit, Kind.BACKWARD_GATHER if recomputing else Kind.GATHER, comes_back and not recomputing)
        self._show(unit, True)
        return self._answer()

    def graph_made(self, index: int) -> Pass:
        """The forward that began last makes a graph: what its backward pass is spoken of by."""
        unit = self._units[index]
        made = Pass(index, unit.version)
        unit.passes.add(made)
        return made

    def graph_dropped(self, passed: Pass) -> None:
        """It made none after all."""
        self._units[passed.unit].passes.discard(passed)

    def forward_ends(self, index: int, *, graph_follows: bool, recomputing: bool = False) -> list[Action]:
        unit = self._units[index]
        unit.inside -= 1
        self._show(unit, unit.pinned or unit.running or unit.inside > 0)
        # The root is needed again at once, when backward begins; a recomputed unit is in its backward pass already.
        if not recomputing and not (unit.facts.root and graph_follows) and not unit.inside:
            self._rest(unit)
            last = self._successors.of(Kind.GATHER, index) is None and unit.forwards % unit.facts.modules == 0
            if graph_follows and last:
                self._expect_backward()
        return self._answer()

    # Events: backward -----------------------------------------------------------------------------------------------

    def backward_begins(self, passed: Pass, *, graph: bool = False) -> list[Action]:
        """The first gradient reaches an output of that pass. `graph`: the walk makes a graph in turn (create_graph)."""
        unit = self._units[passed.unit]
        if graph:
            self._check_graph(unit)
        self._backward_of_the_model_begins()
        if passed.version != unit.version:
            raise StepError(
                f"{unit.facts}: its parameters were written between this forward pass and its backward pass, whose "
                "gradients would be of other weights. Step the optimizer after backward()."
            )
        passed.running, passed.done = True, False
        unit.running_passes += 1
        self._use(unit, Kind.BACKWARD_GATHER)
        self._show(unit, True)  # for what is recomputed inside the unit
        return self._answer()

    def input_gradients_done(self, passed: Pass) -> list[Action]:
        """The gradients of its inputs are there: nothing reads the weights any more."""
        unit = self._units[passed.unit]
        unit.running_passes -= passed.running
        passed.running, passed.done = False, True
        if not unit.running and not unit.inside:
            self._rest(unit)
        return self._answer()

    def weight_gradients_done(self, passed: Pass) -> list[Action]:
        """And those of its weights: the last event of its backward pass, at once or later."""
        unit = self._units[passed.unit]
        unit.backwards += 1
        # Counted, so that it is decided alike on every rank: what a rank happens to keep alive must not matter.
        if unit.backwards >= unit.forwards and not self._graphs and not self.more_passes:
            self._finish(unit)
        return self._answer()

    def gradient_arrives(self, index: int) -> list[Action]:
        """The first of the unit's parameters has one, in this backward pass."""
        self._backward_of_the_model_begins()
        self._actions += self._reductions.collect(self._units[index])
        return self._answer()

    def gradients_complete(self, index: int) -> None:
        """Each of its parameters has one: its slot may be taken. Where its inputs want none, nothing else tells."""
        self._units[index].gradients = Gradients.COMPLETE

    def backward_pass_ended(self) -> list[Action]:
        """autograd has walked a whole graph."""
        self._end_passes()
        if self.more_passes:
            self.in_backward = False
            return self._answer()
        for unit in self._units:
            self._finish(unit)
        if self.boundary:
            self._actions += [Compare(), *map(Wait, self._reductions.syncs), Deliver()]
        return self._answer()

    def micro_step_ended(self) -> None:
        """What was asked for at the end of the backward pass is done."""
        self.in_backward = False
        self._graphs = max(self._graphs - 1, 0)
        self._reductions.restart()
        for unit in self._units:
            unit.forwards = unit.backwards = 0

    def backward_pass_failed(self) -> list[Action]:
        """Nothing of it is delivered, and what ranks that ran different units would prefetch is forgotten."""
        self._successors = Successors()
        self._end_passes()
        return self._answer()

    def abandoned(self) -> list[Action]:
        """What was accumulated since the last boundary is dropped."""
        self._actions += self._reductions.abandon()
        self.micro_step_ended()
        self._end_passes()
        return self._answer()

    # Events: what the user does -------------------------------------------------------------------------------------

    def written(self, index: int) -> None:
        """To parameters of the unit."""
        self._units[index].mark.written()

    def pin(self, index: int) -> list[Action]:
        """Whole until `unpin`, in memory of its own. After `publish`."""
        unit = self._units[index]
        if unit.slot is not None:
            if any(not passed.done for passed in unit.passes):
                raise StepError(
                    f"{unit.facts} has a forward pass whose backward pass has not run: its weights cannot be moved "
                    "now. Call backward() first, or delete the loss."
                )
            self._release(unit)
            unit.home, unit.slot = unit.slot, Slot((index,))
            self._actions.append(Place(index, unit.slot))
        unit.weights = Weights.PINNED
        self._gather(unit, Kind.GATHER, keep_copy=False)
        self._wait(unit)
        self._show(unit, True)
        return self._answer()

    def unpin(self, index: int) -> list[Action]:
        unit = self._units[index]
        unit.weights = Weights.SHARDED
        self._release(unit)
        if unit.home is not None:
            unit.slot, unit.home = unit.home, None
            self._actions.append(Place(index, unit.slot))
        return self._answer()

    # Weights --------------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        if self._published == self._writes.version:
            return
        self._published = self._writes.version
        for unit in self._units:
            if unit.published != unit.version and unit.facts.publishes:
                unit.publication = self._submit(Task(Kind.PUBLISH, unit.index))
            unit.published = unit.version

    def _use(self, unit: UnitState, kind: Kind, keep_copy: bool = False) -> None:
        """Whole for what computes next; meanwhile the unit that came next the last time is prefetched."""
        if not unit.pinned:
            unit.weights = Weights.IN_USE
        self._gather(unit, kind, keep_copy)
        following = self._successors.runs(kind, unit.index)
        if following is not None:
            self._prefetch(self._units[following], kind, keep_copy)
        self._wait(unit)

    def _wait(self, unit: UnitState) -> None:
        if unit.ready is not None:
            self._actions.append(Wait(unit.ready))
        self._seal(unit, False)

    def _gather(self, unit: UnitState, kind: Kind, keep_copy: bool) -> None:
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

    def _prefetch(self, unit: UnitState, kind: Kind, keep_copy: bool) -> None:
        """If there is room."""
        if unit.slot is None or unit.pinned or unit.holds == unit.version:
            return
        if (user := self._user(unit.slot)) is not None and user.weights is Weights.EVICTABLE:
            self._release(user)
        if unit.slot.user is None:
            self._gather(unit, kind, keep_copy)
            unit.weights = Weights.PREFETCHED

    def _take_slot(self, unit: UnitState) -> None:
        """Another unit's, if nothing computes with that; else a new one of this unit's own."""
        if unit.slot is None:
            return
        user = self._user(unit.slot)
        if user is not None and user is not unit:
            if user.idle or (user.running and user.gradients is Gradients.COMPLETE):
                self._release(user)
            elif any(not passed.done for passed in unit.passes):
                raise StepError(
                    f"{unit.facts} must be whole for its backward pass while {user.facts}, whose memory it shares, is "
                    "still in use: the units ran in an order never seen before. Pass units= to shard() so that units "
                    "which run at the same time form one."
                )
            else:
                unit.slot = self.weight_slots.add(unit.index)
                self._actions.append(Place(unit.index, unit.slot))
        unit.slot.user = unit.index

    def _user(self, slot: Slot) -> UnitState | None:
        return None if slot.user is None else self._units[slot.user]

    def _rest(self, unit: UnitState) -> None:
        """Nothing computes with its weights now; they stay as long as nobody wants the slot."""
        self._show(unit, unit.pinned)
        if not unit.pinned:
            unit.weights = Weights.EVICTABLE

    def _release(self, unit: UnitState) -> None:
        """Another unit may have the slot; but not while a call into it is under way (a training_step)."""
        held = unit.pinned or unit.inside > 0
        self._show(unit, held)
        if held:
            return
        unit.weights = Weights.SHARDED
        if unit.slot is not None:
            self._seal(unit, True)
            if unit.slot.user == unit.index:
                unit.slot.user = None
            unit.holds = -1

    def _finish(self, unit: UnitState) -> None:
        """No more gradients of it will come: it is reduced as soon as those before it in the order are."""
        self._release(unit)
        self._actions += self._reductions.finish(unit, self.boundary) if self.in_backward else []

    def _expect_backward(self) -> None:
        """The last unit is through: the first that backward needs is prefetched, while the root computes its end."""
        if (first := self._successors.of(Kind.BACKWARD_GATHER, self._root.index)) is not None:
            unit = self._units[first]
            if unit.idle:
                self._release(unit)
            self._prefetch(unit, Kind.BACKWARD_GATHER, keep_copy=False)

    # Passes of the model --------------------------------------------------------------------------------------------

    def _pass_of_the_model_begins(self) -> None:
        """What the one before used, or prefetched in vain, is let go."""
        self._successors.pass_begins()
        for unit in self._units:
            prefetched = unit.weights is Weights.PREFETCHED and not self.in_backward
            if unit.weights is Weights.EVICTABLE or prefetched:
                self._release(unit)

    def _backward_of_the_model_begins(self) -> None:
        if not self.in_backward:
            self.in_backward = True
            self._pass_of_the_model_begins()

    def _end_passes(self) -> None:
        for unit in self._units:
            for passed in unit.passes if unit.running else ():
                passed.running, passed.done = False, passed.done or passed.running
            unit.running_passes = 0
            self._release(unit)

    def _check_graph(self, unit: UnitState) -> None:
        """Under create_graph=True, what a backward pass computes with is read again when its graph is walked."""
        if unit.slot is not None and not unit.pinned:
            raise StepError(
                f"{unit.facts}: a graph made with create_graph=True reads the weights again after they are released. "
                "Run forward, autograd.grad(...) and backward() inside `with towpath.full_parameters(model):`."
            )
        self._graphs = 2  # this one and the next

    # Answers --------------------------------------------------------------------------------------------------------

    def _submit(self, task: Task) -> Task:
        self._actions.append(Submit(task))
        return task

    def _show(self, unit: UnitState, whole: bool) -> None:
        if whole != unit.shown:
            unit.shown = whole
            self._actions.append(Show(unit.index, whole))

    def _seal(self, unit: UnitState, sealed: bool) -> None:
        if sealed != unit.sealed:
            unit.sealed = sealed
            self._actions.append(Seal(unit.index, sealed))

    def _answer(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions
