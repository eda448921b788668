"""The part of the step machine that unshards and releases weights.

It decides when a unit's weights are unsharded, in which slot, and when another unit may take that slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from towpath.core.step_state import (
    Action,
    AgreeOnSizes,
    AssignSlot,
    GradientState,
    InvalidateViews,
    ParamVersion,
    SaveBackwardCopy,
    Slot,
    Slots,
    Submit,
    Successors,
    SwapParameters,
    Task,
    UnitState,
    Wait,
    WeightState,
    slot_groups,
)
from towpath.core.strategy import TransferKind
from towpath.errors import StepError

# How many deferred parameter syncs are submitted after each unit's forward. More of them than units leave the queue of
# syncs always filled.
SYNCS_AHEAD = 2


class Gathers:
    """The part of `StepMachine` that unshards and releases weights, and adds what it decides to `actions`."""

    def __init__(self, units: Sequence[UnitState], writes: ParamVersion, actions: list[Action]) -> None:
        self._units, self._writes, self._actions = units, writes, actions
        self._synced_count = writes.count
        self._deferred: deque[UnitState] = deque()  # written units whose parameter syncs are not due yet
        self._in_vain: list[Task] = []  # gathers of prefetched units that were released before any use
        self.successors = Successors()
        self.slots = Slots(slot_groups([u.plan for u in units], lambda plan: plan.gathers))
        for unit in units:
            if unit.plan.gathers:
                unit.slot = self.slots.shared(unit.index)

    def param_sync(self, everything: bool = True) -> None:
        """Submit parameter syncs of written units. Without `everything`, deferred ones wait until they are due."""
        if self._synced_count == self._writes.count and not everything:
            return
        self._synced_count = self._writes.count
        self.agree()
        for unit in self._units:
            if unit.synced_version != unit.version and (everything or not _is_deferred(unit)):
                self._sync(unit)
        self._defer()

    def agree(self) -> None:
        """Agree with all ranks on the sizes of messages, of all units that were written since. The host waits here."""
        # One wait serves all units, and not only the unit that is due next.
        written = [u for u in self._units if u.plan.agrees_on_sizes and u.version not in (u.synced_version, u.agreed)]
        for unit in written:
            unit.agreed = unit.version
        if agreeing := tuple(unit.index for unit in written):
            self._actions.append(AgreeOnSizes(agreeing, Task(TransferKind.MESSAGE_SIZES, agreeing[0])))

    def optimizers_stepped(self) -> None:
        """Agree on sizes, and submit the parameter syncs of the root and of the first unit."""
        self.agree()
        self._defer()
        # Not of the unit that this rank ran first: after the last step, too, all ranks must have submitted the same.
        self.sync_due(self._units[:2][-1])

    def _defer(self) -> None:
        self._deferred = deque(u for u in self._units if u.synced_version != u.version and _is_deferred(u))

    def sync_due(self, unit: UnitState | None) -> None:
        """Submit deferred parameter syncs up to that of `unit`, which is used next; with None, all that are left."""
        # Ranks that share no weights may run other units, in another order, and yet send to each other here. So
        # deferred syncs have one order on all ranks, as reductions have.
        while self._deferred and (unit is None or self._deferred[0].index <= unit.index):
            self._sync(self._deferred.popleft())
        if unit is not None:
            self._sync(unit)

    def sync_ahead(self) -> None:
        """Submit a few parameter syncs that are not due yet, after the computation of a unit was launched."""
        # Without them, a large output layer would only be sent while the last block computes.
        for _ in range(SYNCS_AHEAD):
            if self._deferred and self._deferred[0].plan.agrees_on_sizes:
                self._sync(self._deferred.popleft())

    def _sync(self, unit: UnitState) -> None:
        if unit.synced_version == unit.version:
            return
        if unit.plan.agrees_on_sizes and unit.agreed != unit.version:
            self.agree()
        if unit.plan.has_param_sync:
            unit.param_sync_task = self._submit(Task(TransferKind.PARAM_SYNC, unit.index))
        unit.synced_version = unit.version

    def use(self, unit: UnitState, kind: TransferKind, save_copy: bool = False) -> None:
        """Unshard the unit for the next computation, and prefetch the unit that followed it the last time."""
        if not unit.kept_unsharded:
            unit.weights_become(WeightState.IN_USE)
        self.gather(unit, kind, save_copy)
        if unit.plan.spec.root and kind is TransferKind.BACKWARD_GATHER:
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
        self.sync_due(unit)
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
        self.sync_due(unit)
        if unit.slot is None or unit.kept_unsharded or unit.holds == unit.version:
            return
        if (user := self._user(unit.slot)) is not None and user.weights is WeightState.EVICTABLE:
            self.release(user)
        if unit.slot.user is None:
            self.gather(unit, kind, save_copy)
            unit.weights_become(WeightState.PREFETCHED)

    def _take_slot(self, unit: UnitState) -> None:
        """Give the unit its slot. If another unit computes in it, add a slot; raise if this unit cannot be moved."""
        if unit.slot is None:
            return
        user = self._user(unit.slot)
        if user is not None and user is not unit:
            if user.idle or (user.running and user.gradients is GradientState.COMPLETE):
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
        if unit.weights is WeightState.IN_USE:  # not if its forward failed before the weights were unsharded
            unit.weights_become(WeightState.EVICTABLE)

    def release(self, unit: UnitState) -> None:
        """Free the unit's slot, unless the user keeps it unsharded or a call such as training_step is running in it."""
        held = unit.kept_unsharded or unit.inside > 0
        self.swap_parameters(unit, held)
        if held:
            return
        if unit.weights is WeightState.PREFETCHED and unit.ready is not None:
            self._in_vain.append(unit.ready)
        unit.weights_become(WeightState.SHARDED)
        if unit.slot is not None:
            self._invalidate_views(unit, invalid=True)
            if unit.slot.user == unit.index:
                unit.slot.user = None
            unit.holds = -1

    def end_prefetches(self) -> None:
        """Release prefetched units and wait for their gathers, before the user may write to the shards they read."""
        for unit in self._units:
            if unit.weights is WeightState.PREFETCHED:
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
        unit.weights_become(WeightState.KEPT_UNSHARDED)
        self.gather(unit, TransferKind.GATHER, save_copy=False)
        self.wait(unit)
        self.swap_parameters(unit, True)

    def allow_reshard(self, unit: UnitState) -> None:
        """Release the unit, and return it to the slot that it had before `keep_unsharded`."""
        unit.weights_become(WeightState.SHARDED)
        self.release(unit)
        if unit.home is not None:
            assert unit.slot is not None
            # This gather was waited for. Its task refers to the slot, whose memory is freed with the last reference.
            unit.slot.task = unit.ready = None
            unit.slot, unit.home = unit.home, None
            self._actions.append(AssignSlot(unit.index, unit.slot))


def _is_deferred(unit: UnitState) -> bool:
    """Return whether the parameter sync of the unit is submitted when its weights are due, and not at once.

    A sync that copies from the host can only begin then. And where the host has waited for sizes, the device has
    nothing to compute until the syncs before the first computation are launched.
    """
    return unit.plan.steps_on_host or unit.plan.agrees_on_sizes
