"""The step machine, which decides what one rank does in a training step. It moves no data and does not import torch.

The engine reports events, such as the start of a unit's forward, by calling methods of `StepMachine`. They return the
actions (`core/step_state.py`) that the engine then executes in order. `Gathers` decides about weights, and `Reductions`
about gradients. The schedule and the simulator use the same machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from towpath.core.step_state import (
    Action,
    AgreeOnSizes,
    AssignSlot,
    CheckRanks,
    ForwardPass,
    Gradients,
    InvalidateViews,
    OpenGradients,
    ParamVersion,
    PlannedUnit,
    SaveBackwardCopy,
    SetGrads,
    Slot,
    Slots,
    Submit,
    Successors,
    SwapParameters,
    Task,
    UnitState,
    Wait,
    Weights,
    in_backward_order,
    slot_groups,
)
from towpath.core.strategy import TransferKind
from towpath.errors import StepError

# --- gathers ----------------------------------------------------------------------------------------------------------
#
# When a unit's weights are unsharded, in which slot, and when another unit may take that slot.


class Gathers:
    """The part of `StepMachine` that unshards and releases weights, and adds what it decides to `actions`."""

    def __init__(self, units: Sequence[UnitState], writes: ParamVersion, actions: list[Action]) -> None:
        self._units, self._writes, self._actions = units, writes, actions
        self._synced_count = writes.count
        self._in_vain: list[Task] = []  # gathers of prefetched units that were released before any use
        self.successors = Successors()
        self.slots = Slots(slot_groups([u.plan for u in units], lambda plan: plan.gathers))
        for unit in units:
            if unit.plan.gathers:
                unit.slot = self.slots.shared(unit.index)

    def param_sync(self, on_host: bool = True) -> None:
        """Submit parameter syncs of written units. Without `on_host`, those that step there wait for `gather`.

        Units that agree on sizes are always among them, because one wait of the host then serves all of them.
        """
        if self._synced_count == self._writes.count and not on_host:
            return
        self._synced_count = self._writes.count
        self._sync(u for u in self._units if on_host or not u.plan.steps_on_host or u.plan.agrees_on_sizes)

    def _sync(self, units: Iterable[UnitState]) -> None:
        written = [u for u in units if u.synced_version != u.version]
        if agreeing := tuple(u.index for u in written if u.plan.agrees_on_sizes):
            self._actions.append(AgreeOnSizes(agreeing, Task(TransferKind.MESSAGE_SIZES, agreeing[0])))
        for unit in written:
            if unit.plan.has_param_sync:
                unit.param_sync_task = self._submit(Task(TransferKind.PARAM_SYNC, unit.index))
            unit.synced_version = unit.version

    def use(self, unit: UnitState, kind: TransferKind, save_copy: bool = False) -> None:
        """Unshard the unit for the next computation, and prefetch the unit that followed it the last time."""
        if not unit.kept_unsharded:
            unit.weights_become(Weights.IN_USE)
        self.gather(unit, kind, save_copy)
        if unit.plan.root and kind is TransferKind.BACKWARD_GATHER:
            # The root always counts as the first unit of a backward pass. If it computes nothing after its last unit,
            # the gradient of that unit may arrive before the root's.
            following = self.successors.of(kind, unit.index)
        else:
            following = self.successors.runs(kind, unit.index)
        if following is not None:
            self.prefetch(self._units[following], kind, save_copy)
        self.wait(unit)
        if save_copy and unit.slot is not None and unit.plan.copies and unit.copied != unit.version:
            unit.copied = unit.version  # a unit that runs without a backward pass prefetched it, without a copy
            self._actions.append(SaveBackwardCopy(unit.index))

    def wait(self, unit: UnitState) -> None:
        """Wait until the unit's weights have arrived, and allow autograd to read them."""
        if unit.ready is not None:
            self._actions.append(Wait(unit.ready))
        self._invalidate_views(unit, invalid=False)

    def gather(self, unit: UnitState, kind: TransferKind, save_copy: bool) -> None:
        """Submit a gather of the unit's weights into its slot, unless the slot holds their current version."""
        if unit.holds == unit.version:
            return
        self._sync([unit])
        self._take_slot(unit)
        unit.holds = unit.version
        if unit.slot is None:
            unit.ready = unit.param_sync_task
            return
        if kind is TransferKind.BACKWARD_GATHER and unit.plan.copies and unit.copied != unit.version:
            kind = TransferKind.GATHER  # the backward copy is older than the weights: this forward pass kept none
        if save_copy:
            unit.copied = unit.version
        # An earlier gather that nothing used may still write to this slot, or to the copy that this gather reads.
        after = [t for t in (unit.param_sync_task, unit.ready, unit.slot.task) if t is not None]
        unit.ready = self._submit(Task(kind, unit.index, unit.slot, tuple(dict.fromkeys(after)), save_copy))
        unit.slot.task = unit.ready

    def prefetch(self, unit: UnitState, kind: TransferKind, save_copy: bool) -> None:
        """Gather the unit's weights ahead of their use, if its slot is free or holds evictable weights."""
        self._sync([unit])
        if unit.slot is None or unit.kept_unsharded or unit.holds == unit.version:
            return
        if (user := self._user(unit.slot)) is not None and user.weights is Weights.EVICTABLE:
            self.release(user)
        if unit.slot.user is None:
            self.gather(unit, kind, save_copy)
            unit.weights_become(Weights.PREFETCHED)

    def _take_slot(self, unit: UnitState) -> None:
        """Give the unit its slot. If another unit computes in it, add a slot; raise if this unit cannot be moved."""
        if unit.slot is None:
            return
        user = self._user(unit.slot)
        if user is not None and user is not unit:
            if user.idle or (user.running and user.gradients is Gradients.COMPLETE):
                self.release(user)
            elif any(not passed.done and unit.needs_weights(passed) for passed in unit.passes):
                if user.running and unit.inside and not unit.running:
                    raise StepError(
                        f"{unit} is recomputed in the backward pass of {user}, whose memory it shares: "
                        "torch.utils.checkpoint around several units, such as the whole model, would need all of "
                        "them unsharded at once. Checkpoint each block by itself, inside the model's forward. Where no "
                        "weights are sharded (ddp, zero1, zero2), a checkpoint may be around anything."
                    )
                raise StepError(
                    f"{unit} must be unsharded for its backward pass while {user}, whose memory it shares, is "
                    "still in use: the units ran in an order never seen before. Pass units= to shard() so that units "
                    "which run at the same time form one."
                )
            else:
                unit.slot = self.slots.add(unit.index, alone=True)
                self._actions.append(AssignSlot(unit.index, unit.slot))
        unit.slot.user = unit.index

    def _user(self, slot: Slot) -> UnitState | None:
        return None if slot.user is None else self._units[slot.user]

    def leave_evictable(self, unit: UnitState) -> None:
        """Make the unit evictable, because nothing computes with its weights. They stay until the slot is needed."""
        self.swap_parameters(unit, unit.kept_unsharded)
        if unit.weights is Weights.IN_USE:  # not if its forward failed before the weights were unsharded
            unit.weights_become(Weights.EVICTABLE)

    def release(self, unit: UnitState) -> None:
        """Free the unit's slot, unless the user keeps it unsharded or a call such as training_step is running in it."""
        held = unit.kept_unsharded or unit.inside > 0
        self.swap_parameters(unit, held)
        if held:
            return
        if unit.weights is Weights.PREFETCHED and unit.ready is not None:
            self._in_vain.append(unit.ready)
        unit.weights_become(Weights.SHARDED)
        if unit.slot is not None:
            self._invalidate_views(unit, invalid=True)
            if unit.slot.user == unit.index:
                unit.slot.user = None
            unit.holds = -1

    def end_prefetches(self) -> None:
        """Release prefetched units and wait for their gathers, before the user may write to the shards they read."""
        for unit in self._units:
            if unit.weights is Weights.PREFETCHED:
                self.release(unit)
        self._actions += map(Wait, self._in_vain)
        self._in_vain = []

    def _submit(self, task: Task) -> Task:
        self._actions.append(Submit(task))
        return task

    def swap_parameters(self, unit: UnitState, whole: bool) -> None:
        """Swap the modules' parameters for the unsharded weights if `whole`, or else for the shards."""
        if whole != unit.shown:
            unit.shown = whole
            self._actions.append(SwapParameters(unit.index, whole))

    def _invalidate_views(self, unit: UnitState, invalid: bool) -> None:
        if invalid != unit.invalid:
            unit.invalid = invalid
            self._actions.append(InvalidateViews(unit.index, invalid))

    def keep_unsharded(self, unit: UnitState) -> None:
        """Keep the unit unsharded until `allow_reshard`, in a slot that no other unit uses."""
        if unit.slot is not None:
            if unit.inside:
                raise StepError(
                    f"{unit}: a call into it is under way, which computes with its weights where they are now. "
                    "Enter full_parameters() before the call (of the model, or of a method that was registered)."
                )
            if any(not passed.done for passed in unit.passes):
                raise StepError(
                    f"{unit} has a forward pass whose backward pass has not run: its weights cannot be moved "
                    "now. Call backward() first, or delete the loss."
                )
            self.release(unit)
            unit.home, unit.slot = unit.slot, Slot((unit.index,))
            self._actions.append(AssignSlot(unit.index, unit.slot))
        unit.weights_become(Weights.KEPT_UNSHARDED)
        self.gather(unit, TransferKind.GATHER, save_copy=False)
        self.wait(unit)
        self.swap_parameters(unit, True)

    def allow_reshard(self, unit: UnitState) -> None:
        """Release the unit, and return it to the slot that it had before `keep_unsharded`."""
        unit.weights_become(Weights.SHARDED)
        self.release(unit)
        if unit.home is not None:
            assert unit.slot is not None
            # This gather was waited for. Its task refers to the slot, whose memory is freed with the last reference.
            unit.slot.task = unit.ready = None
            unit.slot, unit.home = unit.home, None
            self._actions.append(AssignSlot(unit.index, unit.slot))


# --- reductions -------------------------------------------------------------------------------------------------------
#
# The order in which units reduce gradients, and the slots for these. A gradient sync follows each at a boundary.


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
        if unit.gradients is not Gradients.NONE:
            return []
        unit.gradients_become(Gradients.COLLECTING)
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
        unit.gradients_become(Gradients.REDUCED)
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
        """Reset all units for the next micro-step."""
        self._next, self.syncs = 0, []
        for unit in self._order:
            unit.gradients_become(Gradients.NONE)
            unit.finished = False


class StepMachine:
    """The decisions of a training step on one rank. The engine reports an event with each call, and gets back actions.

    `writes` counts the writes to each unit's parameters. Without it, the caller reports them with `written`.
    """

    def __init__(
        self, plans: Sequence[PlannedUnit], writes: Sequence[ParamVersion] = (), modules: Sequence[int] = ()
    ) -> None:
        assert plans and plans[0].root and not any(plan.root for plan in plans[1:])
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
        # More backward passes follow before anything is reduced, such as those that compute the weights' gradients.
        self.more_passes = False
        # The model is a pipeline stage. A backward pass walks the graph of one forward pass, while others wait for
        # theirs. The caller calls `end_boundary` itself, after the other stages have received their messages.
        self.staged = False
        self._forward_walk = self._walk = 0  # `ForwardPass.walk` of the running forward, and of the running backward

    def use_plans(self, plans: Sequence[PlannedUnit]) -> None:
        """Use the plans of a step in which transports have changed."""
        for unit, plan in zip(self._units, plans, strict=True):
            unit.plan = plan

    # Queries of the engine -------------------------------------------------------------------------------------------

    def slot_of(self, index: int) -> Slot | None:
        """Return the slot of the unit's unsharded weights, or None if every rank always holds all of them."""
        return self._units[index].slot

    def is_whole(self, index: int) -> bool:
        """Return whether the unit's current weights are unsharded, or are being gathered."""
        return self._units[index].holds == self._units[index].version

    def is_kept_unsharded(self, index: int) -> bool:
        """Return whether the user keeps the unit unsharded."""
        return self._units[index].kept_unsharded

    def is_collecting(self, index: int) -> bool:
        """Return whether gradients of the unit have arrived in this backward pass, and are not reduced yet."""
        return self._units[index].gradients in (Gradients.COLLECTING, Gradients.COMPLETE)

    def is_reduced(self, index: int) -> bool:
        """Return whether the unit's gradients of this backward pass have been submitted for reduction."""
        return self._units[index].gradients is Gradients.REDUCED

    def runs_backward(self, index: int) -> bool:
        """Return whether a backward pass through the unit is running."""
        return self._units[index].running

    def is_entered(self, index: int) -> bool:
        """Return whether a call into the unit or its backward pass is running: calls inside find it unsharded."""
        unit = self._units[index]
        return (unit.shown and not unit.kept_unsharded) or unit.inside > 0

    # Events: forward ------------------------------------------------------------------------------------------------

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
            self._gathers.param_sync(on_host=False)
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
        ends = not recomputing or (unit.plan.leaf and not unit.running)
        if ends and not (unit.plan.root and graph_follows) and not unit.inside:
            self._gathers.leave_evictable(unit)
            through = unit.forwards[self._forward_walk] % unit.modules == 0 and not recomputing
            if graph_follows and through and self._gathers.successors.of(TransferKind.GATHER, index) is None:
                self._prefetch_backward()
        if unit is self._root and not graph_follows and not recomputing:
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

    def weight_gradients_begin(self, passes: Sequence[ForwardPass]) -> list[Action]:
        """Begin the second half of a backward pass: unsharded parameters show in all its units until it ends."""
        for passed in passes:
            unit = self._units[passed.unit]
            # Parts of any unit may be recomputed in this half. The weights of such units never take turns in a slot.
            assert unit.slot is None, f"{unit}: its weights may have been another unit's meanwhile"
            self.in_backward, self._walk = True, passed.walk
            unit.inside += 1
            self._gathers.swap_parameters(unit, True)
        return self._answer()

    def weight_gradients_end(self, passes: Sequence[ForwardPass]) -> list[Action]:
        """End the second half of a backward pass, after `weight_gradients_done` of each forward pass in it."""
        for passed in passes:
            unit = self._units[passed.unit]
            unit.inside -= 1
            self._gathers.swap_parameters(unit, unit.kept_unsharded or unit.inside > 0)
        return self._answer()

    def weight_gradients_done(self, passed: ForwardPass) -> list[Action]:
        """Finish the unit if this was its last pass. This is the last event of a unit's backward pass."""
        unit = self._units[passed.unit]
        unit.backwards[passed.walk] += 1
        # Passes are counted, so that all ranks decide the same: which graphs a rank keeps alive must not matter.
        if unit.backwards[passed.walk] >= unit.forwards[passed.walk] and not self._graphs and not self.more_passes:
            self._finish(unit)
        return self._answer()

    def gradient_arrives(self, index: int) -> list[Action]:
        """Prepare for gradients of the unit, when its first parameter gets one in this backward pass."""
        self._backward_of_the_model_begins()
        self._actions += self._reductions.open_gradients(self._units[index])
        return self._answer()

    def gradients_complete(self, index: int) -> list[Action]:
        """Let other units take the slot, as all parameters have gradients. Without input gradients no event follows.

        A leaf has finished then. Otherwise an embedding between two rows of blocks would hold up the first row.
        """
        unit = self._units[index]
        unit.gradients_become(Gradients.COMPLETE)
        ended = [p for p in unit.passes if unit.plan.leaf and p.running and not p.inputs]
        return [a for p in ended for a in (*self.input_gradients_done(p), *self.weight_gradients_done(p))]

    def backward_pass_ended(self) -> list[Action]:
        """Finish all units after autograd has walked the whole graph, and end the boundary unless `staged`."""
        self._end_passes()
        if self.more_passes:
            self.in_backward = False
            return self._answer()
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
        """Count a write to the unit's parameters."""
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
            if unit.plan.leaf and unit.weights is Weights.EVICTABLE and unit.holds == unit.version:
                unit.weights_become(Weights.PREFETCHED)  # no other unit needs its slot meanwhile
            elif unit.idle:
                self._gathers.release(unit)
            self._gathers.prefetch(unit, TransferKind.BACKWARD_GATHER, save_copy=False)

    def _pass_of_the_model_begins(self, first: int | None = None) -> None:
        """Release the units that the previous pass of the model used, or prefetched without a use."""
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
            for passed in unit.passes if unit.running or unit.plan.leaf else ():
                passed.running, passed.done = False, passed.done or passed.running
            unit.running_passes = 0
            self._gathers.release(unit)

    def _answer(self) -> list[Action]:
        actions = self._actions.copy()
        self._actions.clear()
        return actions
