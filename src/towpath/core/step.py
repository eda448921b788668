"""The step machine, which decides what one rank does in a training step. It moves no data and does not import torch.

The engine reports events, such as the start of a unit's forward, by calling methods of `StepMachine`. They return the
actions (`core/step_state.py`) that the engine then executes in order. `Gathers` decides about weights, and `Reductions`
about gradients. `OuterSteps` (`outer/exchanges.py`) decides when islands synchronize. The schedule and the simulator
use the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from towpath.core.gathers import Gathers
from towpath.core.step_state import (
    Action,
    CheckRanks,
    ForwardPass,
    GradientState,
    OpenGradients,
    ParamVersion,
    SetGrads,
    Slot,
    Slots,
    Submit,
    Successors,
    Task,
    UnitState,
    Wait,
    WeightState,
    in_backward_order,
    slot_groups,
)
from towpath.core.strategy import TransferKind
from towpath.core.unit_plan import UnitPlan
from towpath.errors import StepError


class Reductions:
    """The part of `StepMachine` that reduces gradients."""

    def __init__(self, units: Sequence[UnitState]) -> None:
        self.slots = Slots(slot_groups([u.plan for u in units], lambda plan: plan.trains and plan.reduces))
        # Collectives must match, so all ranks reduce in this order, whatever order gradients arrive in.
        self._order = [u for u in in_backward_order(units) if u.plan.trains]
        self._next = 0  # the position in `_order` of the next unit to reduce
        self.syncs: list[Task] = []  # those submitted in the backward pass that ends at the boundary

    def open_gradients(self, unit: UnitState) -> list[Action]:
        """Return the actions that open a place for the unit's gradients, before the first of this backward pass."""
        if unit.gradients is not GradientState.NONE:
            return []
        unit.gradients_become(GradientState.COLLECTING)
        if not unit.plan.reduces:
            return [OpenGradients(unit.index, None)]
        slot = unit.collects_in = self.slots.next_free(unit.index)
        read, slot.task, slot.user = slot.task, None, unit.index
        return [*([] if read is None else [Wait(read)]), OpenGradients(unit.index, slot)]

    def finish(self, unit: UnitState, boundary: bool) -> list[Action]:
        """Note that the unit gets no more gradients, and reduce every unit whose turn in the order has come."""
        unit.finished = True
        actions: list[Action] = []
        while self._next < len(self._order) and self._order[self._next].finished:
            actions += self._reduce(self._order[self._next], boundary)
            self._next += 1
        return actions

    def _reduce(self, unit: UnitState, boundary: bool) -> list[Action]:
        actions = self.open_gradients(unit)  # a unit that got no gradient adds zeros to the sum
        unit.gradients_become(GradientState.REDUCED)
        after: tuple[Task, ...] = ()
        if unit.collects_in is not None:
            slot, unit.collects_in = unit.collects_in, None
            slot.user, slot.task = None, Task(TransferKind.REDUCE, unit.index, slot)
            after = (slot.task,)
            actions.append(Submit(slot.task))
        if boundary:
            self.syncs.append(Task(TransferKind.GRAD_SYNC, unit.index, after=after))
            actions.append(Submit(self.syncs[-1]))
        return actions

    def abandon(self) -> list[Action]:
        """Return waits for all reductions and gradient syncs under way, and free the gradient slots."""
        waits: list[Action] = [*map(Wait, self.syncs), *(Wait(s.task) for s in self.slots.all if s.task is not None)]
        for unit in self._order:
            unit.collects_in = None
        for slot in self.slots.all:
            slot.user = None
        return waits

    def restart(self) -> None:
        self._next, self.syncs = 0, []
        for unit in self._order:
            unit.gradients_become(GradientState.NONE)
            unit.finished = False


class StepMachine:
    """The decisions of a training step on one rank. The engine reports an event with each call, and gets back actions.

    `writes` counts the writes to each unit's parameters. Without it, the caller reports them with `written`.
    """

    def __init__(
        self, plans: Sequence[UnitPlan], writes: Sequence[ParamVersion] = (), modules: Sequence[int] = ()
    ) -> None:
        assert plans and plans[0].spec.root and not any(plan.spec.root for plan in plans[1:])
        of_model = (writes[0].of if writes else None) or ParamVersion()
        writes, modules = writes or [ParamVersion(of_model) for _ in plans], modules or [1] * len(plans)
        self._units = [UnitState(*state) for state in zip(range(len(plans)), plans, writes, modules, strict=True)]
        self._root = self._units[0]
        self._actions: list[Action] = []
        self._gathers = Gathers(self._units, of_model, self._actions)
        self._reductions = Reductions(self._units)
        self.weight_slots, self.gradient_slots = self._gathers.slots, self._reductions.slots
        self.in_backward = False  # a backward pass of the model is running
        self.failed = False  # the last backward pass failed, and its gradients are still to be dropped
        self._graphs = 0  # passes left that may walk another's graph: their units finish at the end of the pass only
        self.boundary = True  # the running backward pass, or else the next, is the last before the optimizer's step
        # The model is a pipeline stage. A backward pass walks the graph of one forward pass, while others wait for
        # theirs. The caller calls `end_boundary` itself, after the other stages have received their messages.
        self.staged = False
        self._forward_walk = self._walk = 0  # `ForwardPass.walk` of the running forward, and of the running backward

    def use_plans(self, plans: Sequence[UnitPlan]) -> None:
        """Use the plans of a step in which transports have changed."""
        for unit, plan in zip(self._units, plans, strict=True):
            unit.plan, unit.agreed = plan, -1

    # Queries of the engine -------------------------------------------------------------------------------------------

    def slot_of(self, index: int) -> Slot | None:
        """Return the slot of the unit's unsharded weights, or None if every rank always holds all of them."""
        return self._units[index].slot

    def is_whole(self, index: int) -> bool:
        """Return whether the unit's current weights are unsharded, or are being gathered."""
        return self._units[index].holds == self._units[index].version

    def is_kept_unsharded(self, index: int) -> bool:
        return self._units[index].kept_unsharded

    def is_collecting(self, index: int) -> bool:
        """Return whether gradients of the unit have arrived in this backward pass, and are not reduced yet."""
        return self._units[index].gradients in (GradientState.COLLECTING, GradientState.COMPLETE)

    def is_reduced(self, index: int) -> bool:
        """Return whether the unit's gradients of this backward pass have been submitted for reduction."""
        return self._units[index].gradients is GradientState.REDUCED

    def runs_backward(self, index: int) -> bool:
        return self._units[index].running

    def is_entered(self, index: int) -> bool:
        """Return whether a call into the unit or its backward pass is running: calls inside find it unsharded."""
        unit = self._units[index]
        return (unit.shown and not unit.kept_unsharded) or unit.inside > 0

    # Events: forward ------------------------------------------------------------------------------------------------

    def optimizers_stepped(self) -> list[Action]:
        """Agree on the sizes of messages, and send what the next forward pass needs first.

        Call it when all parameters with gradients were stepped. Otherwise, the next forward pass agrees.
        """
        if any(unit.plan.agrees_on_sizes for unit in self._units):
            self._gathers.optimizers_stepped()
        return self._answer()

    def entered(self, index: int) -> None:
        """Record a call into the unit, of one of its modules or of a method, before `forward_begins`."""
        self._units[index].inside += 1

    def param_sync(self) -> list[Action]:
        """Return the actions that send what was written to every rank's P shards, before units are unsharded."""
        self._gathers.param_sync()
        return self._answer()

    def forward_begins(self, index: int, *, comes_back: bool, recomputing: bool = False) -> list[Action]:
        """Unshard the unit for a forward. `comes_back`: a backward pass may follow. `recomputing`: one is running."""
        unit = self._units[index]
        if not recomputing:
            self._gathers.param_sync(everything=False)
            if unit is self._root:
                self._pass_of_the_model_begins()
                self._forward_walk += self.staged
            if comes_back:
                unit.forwards[self._forward_walk] += 1
        kind = TransferKind.BACKWARD_GATHER if recomputing else TransferKind.GATHER
        self._gathers.use(unit, kind, comes_back and not recomputing)
        self._gathers.swap_parameters(unit, True)
        return self._answer()

    def graph_made(self, index: int) -> ForwardPass:
        """Record that the forward that began last makes a graph, and return the pass that backward events name."""
        unit = self._units[index]
        made = ForwardPass(index, unit.version, self._forward_walk)
        unit.passes.add(made)
        return made

    def graph_dropped(self, passed: ForwardPass) -> None:
        """Forget a pass whose forward made no graph after all."""
        self._units[passed.unit].passes.discard(passed)

    def forward_ends(self, index: int, *, graph_follows: bool, recomputing: bool = False) -> list[Action]:
        """Let other units take the slot after a forward. `graph_follows`: its outputs lead to a backward pass."""
        unit = self._units[index]
        unit.inside -= 1
        self._gathers.swap_parameters(unit, unit.kept_unsharded or unit.running or unit.inside > 0)
        # The root stays unsharded, because backward begins with it. A recomputed unit already runs its backward pass.
        # A recomputed leaf may still wait for its own.
        ends = not recomputing or (unit.plan.spec.leaf and not unit.running)
        if ends and not (unit.plan.spec.root and graph_follows) and not unit.inside:
            self._gathers.leave_evictable(unit)
            through = unit.forwards[self._forward_walk] % unit.modules == 0 and not recomputing
            if graph_follows and through and self._gathers.successors.of(TransferKind.GATHER, index) is None:
                self._prefetch_backward()
        if recomputing:
            return self._answer()
        if unit is not self._root:
            self._gathers.sync_ahead()
            return self._answer()
        self._gathers.sync_due(None)  # units that did not run
        if not graph_follows:
            self._gathers.end_prefetches()
        return self._answer()

    # Events: backward -----------------------------------------------------------------------------------------------

    def backward_begins(self, passed: ForwardPass, *, graph: bool = False) -> list[Action]:
        """Unshard the unit when a gradient first reaches an output of the pass. `graph`: `create_graph=True` is set."""
        unit = self._units[passed.unit]
        if graph:
            # The unit's slot may change before the graph that this pass makes reads its weights again.
            if unit.slot is not None and not unit.kept_unsharded:
                raise StepError(
                    f"{unit}: a graph made with create_graph=True reads the weights again after they are released. "
                    "Run forward, autograd.grad(...) and backward() inside `with towpath.full_parameters(model):`."
                )
            self._graphs = 2  # this backward pass and the next
        self._backward_of_the_model_begins()
        self._walk = passed.walk
        if passed.version != unit.version:
            raise StepError(
                f"{unit}: its parameters were written between this forward pass and its backward pass, whose "
                "gradients would be of other weights. Step the optimizer after backward()."
            )
        passed.running, passed.done = True, False
        if unit.needs_weights(passed):
            unit.running_passes += 1
            self._gathers.use(unit, TransferKind.BACKWARD_GATHER)
            self._gathers.swap_parameters(unit, True)  # for what is recomputed inside the unit
        return self._answer()

    def input_gradients_done(self, passed: ForwardPass) -> list[Action]:
        """Allow other units to take this unit's memory: its backward has computed the gradients of its inputs."""
        unit = self._units[passed.unit]
        unit.running_passes -= passed.running and unit.needs_weights(passed)
        passed.running, passed.done = False, True
        if not unit.running and not unit.inside:
            self._gathers.leave_evictable(unit)
        return self._answer()

    def weight_gradients_done(self, passed: ForwardPass) -> list[Action]:
        """Finish the unit if this was its last pass. This is the last event of a unit's backward pass."""
        unit = self._units[passed.unit]
        unit.backwards[passed.walk] += 1
        # Passes are counted, so that all ranks decide the same: which graphs a rank keeps alive must not matter.
        if unit.backwards[passed.walk] >= unit.forwards[passed.walk] and not self._graphs:
            self._finish(unit)
        return self._answer()

    def gradient_arrives(self, index: int) -> list[Action]:
        """Prepare for gradients of the unit, when its first parameter gets one in this backward pass."""
        self._backward_of_the_model_begins()
        self._actions += self._reductions.open_gradients(self._units[index])
        return self._answer()

    def gradients_complete(self, index: int) -> list[Action]:
        """Let other units take the slot, as all parameters have gradients. Without input gradients no event follows."""
        # A leaf has finished then. Otherwise an embedding between two rows of blocks would hold up the first row.
        unit = self._units[index]
        unit.gradients_become(GradientState.COMPLETE)
        ended = [p for p in unit.passes if unit.plan.spec.leaf and p.running and not p.inputs]
        return [a for p in ended for a in (*self.input_gradients_done(p), *self.weight_gradients_done(p))]

    def backward_pass_ended(self) -> list[Action]:
        """Finish all units after autograd has walked the whole graph, and end the boundary unless `staged`."""
        self._end_passes()
        for unit in self._units:
            self._finish(unit)
        self._gathers.end_prefetches()
        return self._answer() if self.staged or not self.boundary else self.end_boundary()

    def end_boundary(self) -> list[Action]:
        """Compare ranks, wait for the gradient syncs and set `.grad`, after the backward pass or the pipeline step."""
        syncs = (Wait(sync, self._units[sync.unit].plan.steps_on_host) for sync in self._reductions.syncs)
        self._actions += [CheckRanks(), *syncs, SetGrads()]
        return self._answer()

    def micro_step_ended(self) -> None:
        """Reset for the next micro-step, after the engine has executed the last actions of the backward pass."""
        self.in_backward = self.failed = False
        self._graphs = max(self._graphs - 1, 0)
        self._reductions.restart()
        for unit in self._units:
            for passes in (unit.forwards, unit.backwards):
                passes.pop(self._walk, None)

    def backward_pass_failed(self) -> list[Action]:
        """Set no `.grad` after a failed pass. Forget the order of units, in case ranks differ in what they ran."""
        self.failed = True
        self._gathers.successors = Successors()
        self._end_passes()
        return self._answer()

    def abandoned(self) -> list[Action]:
        """Drop the gradients that were accumulated since the last boundary."""
        self._actions += self._reductions.abandon()
        self.micro_step_ended()
        for unit in self._units:
            unit.forwards.clear()
            unit.backwards.clear()
        self._end_passes()
        self._gathers.end_prefetches()
        return self._answer()

    # Events: writes and units that the user keeps unsharded ---------------------------------------------------------

    def written(self, index: int) -> None:
        self._units[index].writes.written()

    def keep_unsharded(self, index: int) -> list[Action]:
        """Keep the unit unsharded until `allow_reshard`, in memory that no other unit uses. Call `param_sync` first."""
        self._gathers.keep_unsharded(self._units[index])
        return self._answer()

    def allow_reshard(self, index: int) -> list[Action]:
        """Release a unit that `keep_unsharded` has kept unsharded."""
        self._gathers.allow_reshard(self._units[index])
        return self._answer()

    def _finish(self, unit: UnitState) -> None:
        """Release the unit's weights. In a backward pass, also reduce its gradients when its turn has come."""
        self._gathers.release(unit)
        self._actions += self._reductions.finish(unit, self.boundary) if self.in_backward else []

    def _prefetch_backward(self) -> None:
        """Prefetch the first unit of the backward pass, while the root still computes the model's last layers."""
        if (first := self._gathers.successors.of(TransferKind.BACKWARD_GATHER, self._root.index)) is not None:
            unit = self._units[first]
            if unit.plan.spec.leaf and unit.weights is WeightState.EVICTABLE and unit.holds == unit.version:
                unit.weights_become(WeightState.PREFETCHED)  # no other unit needs its slot meanwhile
            elif unit.idle:
                self._gathers.release(unit)
            self._gathers.prefetch(unit, TransferKind.BACKWARD_GATHER, save_copy=False)

    def _pass_of_the_model_begins(self, first: int | None = None) -> None:
        """Release the units that the previous pass of the model used, or prefetched without a use."""
        self._gathers.successors.pass_begins(first)
        for unit in self._units:
            prefetched = unit.weights is WeightState.PREFETCHED and not self.in_backward
            if unit.weights is WeightState.EVICTABLE or prefetched:
                self._gathers.release(unit)

    def _backward_of_the_model_begins(self) -> None:
        if not self.in_backward:
            self.in_backward = True
            self._gathers.sync_due(None)  # if the forward pass was not one of the root
            self._pass_of_the_model_begins(self._root.index)

    def _end_passes(self) -> None:
        for unit in self._units:
            for passed in unit.passes if unit.running or unit.plan.spec.leaf else ():
                passed.running, passed.done = False, passed.done or passed.running
            unit.running_passes = 0
            self._gathers.release(unit)

    def _answer(self) -> list[Action]:
        actions = self._actions.copy()
        self._actions.clear()
        return actions
