"""The data of the step machine (`core/step.py`): the actions that it returns, and the state of each unit.

The engine and the simulator execute the actions. A unit's plan never changes. The states of its weights and gradients
change from event to event.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer

if TYPE_CHECKING:
    from towpath.core.unit_plan import UnitPlan


@dataclass(slots=True, eq=False, weakref_slot=True)
class Slot:
    """Memory for the unsharded weights or gradients of one unit at a time. Units take turns in it."""

    fits: tuple[int, ...]  # the indices of all units that may use it
    user: int | None = None  # the unit that uses it now
    task: Task | None = None  # the last task that fills or reads it


@dataclass(slots=True, eq=False)
class Task:
    """One transfer of a unit, or of an optimizer's step on full matrices.

    A task starts after everything that was computed before its submission, after the earlier tasks of its queue that
    use the same wire buffers, and after the tasks in `after`.
    """

    kind: TransferKind
    unit: int  # the unit's index; for an optimizer's step, the number of the round; for outer steps, of the fragment
    slot: Slot | None = None  # the memory that it fills or reads
    after: tuple[Task, ...] = ()
    save_copy: bool = False  # a gather only: keep this rank's part of the result as the backward copy
    transfers: tuple[Transfer, ...] = ()  # of an optimizer's step or outer steps: a unit's are in its plan
    handle: object = None  # the engine's or simulator's handle of the submitted task

    def __str__(self) -> str:
        if self.transfers:
            return f"{self.kind.value} of {self.transfers[0].payload}"
        return f"{self.kind.value} of unit {self.unit}"


@dataclass(frozen=True, slots=True)
class Submit:
    """The action that puts a task into its queue."""

    task: Task


@dataclass(frozen=True, slots=True)
class Wait:
    """The action that makes later computation wait for a task's results.

    With `on_host` the host waits as well, because it reads or overwrites memory that the task copies.
    """

    task: Task
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class AgreeOnSizes:
    """The action before parameter syncs with exactly encoded messages, in the form of collectives.

    The parameter syncs of `units` are encoded. Then the host waits for the sizes of these messages, and `task` finds
    the largest size of each over all ranks. Collectives send as many bytes from every rank. It follows the optimizer's
    step, so that no forward pass waits.
    """

    units: tuple[int, ...]
    task: Task


@dataclass(frozen=True, slots=True)
class SwapParameters:
    """The action that replaces the modules' parameters with the unsharded weights (`whole`), or with the shards."""

    unit: int
    whole: bool


@dataclass(frozen=True, slots=True)
class InvalidateViews:
    """The action that makes autograd refuse to read a unit's unsharded weights (`invalid`), or allows it again.

    Autograd must not read them while their memory may hold the weights of another unit.
    """

    unit: int
    invalid: bool


@dataclass(frozen=True, slots=True)
class AssignSlot:
    """The action that moves a unit's unsharded weights to another slot, for all later gathers."""

    unit: int
    slot: Slot


@dataclass(frozen=True, slots=True)
class SaveBackwardCopy:
    """The action that keeps this rank's part of a unit's unsharded weights, for the gather of the backward pass."""

    unit: int


@dataclass(frozen=True, slots=True)
class OpenGradients:
    """The action before a unit's first gradient of a backward pass: where its gradients are collected.

    Without a slot, they are added to the G shard.
    """

    unit: int
    slot: Slot | None


@dataclass(frozen=True, slots=True)
class ApplyOuter:
    """The action that applies the result of an exchange between islands to the weights of a fragment.

    `exchange` is the task of the exchange, which was waited for. `gather` then sends the result inside the island, if
    ranks hold copies of the same optimizer slice. With `average`, the weights become their mean over the islands,
    without the outer optimizer.
    """

    fragment: int
    exchange: Task
    gather: Task | None
    average: bool = False


@dataclass(frozen=True, slots=True)
class CheckRanks:
    """The action at the boundary in which ranks exchange which parameters got a gradient, and compare what they ran."""


@dataclass(frozen=True, slots=True)
class SetGrads:
    """The last action of the boundary, which sets every `.grad` to the mean gradient."""


Action = (
    Submit
    | Wait
    | AgreeOnSizes
    | SwapParameters
    | InvalidateViews
    | AssignSlot
    | SaveBackwardCopy
    | OpenGradients
    | ApplyOuter
    | CheckRanks
    | SetGrads
)


Unit = TypeVar("Unit")


def in_backward_order(units: Sequence[Unit]) -> Sequence[Unit]:
    """Return one item per unit (the root's first) in the order in which a backward pass finishes the units."""
    # The root comes last: its backward begins before all others, and ends after them.
    return (*reversed(units[1:]), units[0])


class ParamVersion:
    """A counter of writes to the parameters of one bucket, one unit or the model.

    Each write also counts in the next larger one, `of`: a bucket's in its unit, a unit's in the model.
    """

    __slots__ = ("_end_of_read", "_is_replaced", "count", "of")

    def __init__(self, of: ParamVersion | None = None) -> None:
        self.count = 0
        self.of = of
        self._end_of_read: Callable[[], None] | None = None
        self._is_replaced = False

    def read_until(self, end_of_read: Callable[[], None]) -> None:
        """Call `end_of_read` before the next write: a copy reads the memory while the host goes on."""
        self._end_of_read = end_of_read

    def wait_for_read(self) -> None:
        """Return once no copy reads the memory. The host must call this before it writes to it."""
        if self._end_of_read is not None:
            end_of_read, self._end_of_read = self._end_of_read, None
            end_of_read()

    def written(self) -> None:
        self.count += 1
        if self.of is not None:
            self.of.written()

    def replaced(self) -> None:
        """Count a write of values that do not follow from those before, as a load does. Call it before the write."""
        self.wait_for_read()
        self._is_replaced = True
        self.written()

    def take_replaced(self) -> bool:
        """Return whether values were replaced since the last call."""
        found, self._is_replaced = self._is_replaced, False
        return found


class WeightState(Enum):
    """The state of a unit's weights. `WEIGHTS_CHANGE` has the allowed changes.

    SHARDED ──prefetch──▶ PREFETCHED ──a pass begins──▶ IN_USE ──it ends──▶ EVICTABLE ──a pass begins──▶ IN_USE
       │                                                   ▲
       └───────────────────── a pass begins ───────────────┘

    A leaf goes from EVICTABLE to PREFETCHED if its backward pass follows its forward pass.
    PREFETCHED, IN_USE and EVICTABLE become SHARDED if another unit needs the slot, or when the model's pass ends.
    `keep_unsharded` leads from SHARDED to KEPT_UNSHARDED, and `allow_reshard` back. For weights that are never gathered
    it may also lead there from EVICTABLE.
    """

    SHARDED = "sharded"  # from the release of the slot until the next prefetch, pass or `keep_unsharded`
    PREFETCHED = "prefetched"  # from the submission of the prefetch until a pass of the unit begins
    IN_USE = "in use"  # from the beginning of a forward or backward of the unit until its end
    EVICTABLE = "evictable"  # from the end of a pass until the unit runs again, or its slot is needed
    KEPT_UNSHARDED = "kept unsharded"  # from `keep_unsharded` until `allow_reshard`


class GradientState(Enum):
    """The state of a unit's gradients in one backward pass. `GRADIENTS_CHANGE` has the allowed changes.

    NONE ──the first arrives──▶ COLLECTING ──all have arrived──▶ COMPLETE ──reduced──▶ REDUCED ──the pass ends──▶ NONE
                                    └──────────── those that do not come count as zero ─────▲

    If the backward pass fails, every state becomes NONE.
    """

    NONE = "none"  # from the beginning of the micro-step until the unit's first gradient arrives
    COLLECTING = "collecting"  # from the first gradient until all parameters have one, or the unit is reduced
    COMPLETE = "complete"  # from the last gradient until the unit's turn to reduce
    REDUCED = "reduced"  # from the submission of the reduction until the end of the micro-step


WEIGHTS_CHANGE: Mapping[WeightState, frozenset[WeightState]] = {
    WeightState.SHARDED: frozenset({WeightState.PREFETCHED, WeightState.IN_USE, WeightState.KEPT_UNSHARDED}),
    WeightState.PREFETCHED: frozenset({WeightState.IN_USE, WeightState.SHARDED}),
    WeightState.IN_USE: frozenset({WeightState.EVICTABLE, WeightState.SHARDED}),
    WeightState.EVICTABLE: frozenset(
        {WeightState.IN_USE, WeightState.SHARDED, WeightState.PREFETCHED, WeightState.KEPT_UNSHARDED}
    ),
    WeightState.KEPT_UNSHARDED: frozenset({WeightState.SHARDED}),
}
GRADIENTS_CHANGE: Mapping[GradientState, frozenset[GradientState]] = {
    GradientState.NONE: frozenset({GradientState.COLLECTING}),
    GradientState.COLLECTING: frozenset({GradientState.COMPLETE, GradientState.REDUCED, GradientState.NONE}),
    GradientState.COMPLETE: frozenset({GradientState.REDUCED, GradientState.NONE}),
    GradientState.REDUCED: frozenset({GradientState.NONE}),
}


class ForwardPass:
    """One forward pass of a unit for which a backward pass may follow. It lives as long as its autograd graph.

    The step machine uses the first fields. The hooks of the backward pass use the others.

    Attributes:
        unit: The index of the unit.
        version: The version of the weights that it used.
        walk: The number of the model's backward pass that its own backward belongs to.
        running: True while its backward runs.
        done: True once its backward no longer needs the weights.
        entered: The ids of the inputs, while the forward runs.
        inputs: How many inputs need a gradient.
        inputs_awaited: How many of them get one in the running backward pass.
        inputs_done: How many of them have got one in it.
    """

    def __init__(self, unit: int, version: int, walk: int = 0) -> None:
        self.unit, self.version, self.walk = unit, version, walk
        self.running = self.done = False
        self.entered: list[int] = []
        self.inputs = self.inputs_awaited = self.inputs_done = 0


@dataclass(slots=True)
class UnitState:
    """The state of one unit in the step machine. The methods of `Gathers`, `Reductions` and `StepMachine` change it."""

    index: int
    plan: UnitPlan
    writes: ParamVersion  # counts the writes to its parameters
    modules: int = 1  # how many modules have their forwards in this unit
    weights: WeightState = WeightState.SHARDED
    gradients: GradientState = GradientState.NONE
    slot: Slot | None = None  # for its unsharded weights; None if they are never gathered
    collects_in: Slot | None = None  # for its gradients, from the first one until the reduction
    holds: int = -1  # the version of the weights that its slot holds, or is about to receive; -1 if none
    copied: int = -1  # the version of the weights in the backward copy; -1 if there is none
    synced_version: int = 0  # the version of the weights that every rank's shard holds
    agreed: int = -1  # the version that is encoded, in messages of sizes that all ranks know
    invalid: bool = False  # autograd refuses to read the unsharded weights
    finished: bool = False  # no more gradients will come in this backward pass
    inside: int = 0  # calls into it that have not returned
    forwards: Counter[int] = field(default_factory=Counter[int])  # forward passes through it, counted by their `walk`
    backwards: Counter[int] = field(default_factory=Counter[int])  # finished backward passes, counted by their `walk`
    running_passes: int = 0  # backward passes through it that run now, and may read the weights
    shown: bool = False  # the modules' parameters are the unsharded weights
    home: Slot | None = None  # the slot to return to after `allow_reshard`
    ready: Task | None = None  # the task that brings its weights: the last gather or parameter sync
    param_sync_task: Task | None = None  # the last parameter sync
    passes: weakref.WeakSet[ForwardPass] = field(default_factory=weakref.WeakSet)  # those whose graphs are alive

    def __str__(self) -> str:
        return f"unit {self.plan.spec.name or 'root'!r}"

    def needs_weights(self, passed: ForwardPass) -> bool:
        """Return whether the backward of a pass reads the weights. A leaf needs them for gradients of inputs only."""
        return not self.plan.spec.leaf or passed.inputs > 0

    def weights_become(self, now: WeightState) -> None:
        """Change the state of the weights. An impossible change is an AssertionError."""
        if now is not self.weights and now not in WEIGHTS_CHANGE[self.weights]:
            raise AssertionError(f"{self}: its weights were {self.weights.value}, and cannot be {now.value} next.")
        self.weights = now

    def gradients_become(self, now: GradientState) -> None:
        """Change the state of the gradients. An impossible change is an AssertionError."""
        was = self.gradients
        if now is not was and now not in GRADIENTS_CHANGE[was]:
            raise AssertionError(f"{self}: its gradients were {was.value}, and cannot be {now.value} next.")
        self.gradients = now

    @property
    def version(self) -> int:
        return self.writes.count

    @property
    def running(self) -> bool:
        """True while a backward pass through the unit runs that may read its weights."""
        return self.running_passes > 0

    @property
    def idle(self) -> bool:
        """True if the weights are unsharded, and nothing computes with them now."""
        return self.weights in (WeightState.PREFETCHED, WeightState.EVICTABLE)

    @property
    def kept_unsharded(self) -> bool:
        return self.weights is WeightState.KEPT_UNSHARDED


class Slots:
    """The slots for weights, or for gradients. Each group of units takes turns in its own slots.

    `groups` has the units of each group in forward order, and the number of their slots.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[int], int]]) -> None:
        self._turns: dict[int, list[Slot]] = {}  # by unit, the slots of its group
        self._position: dict[int, int] = {}  # by unit, its position in its group
        self._groups: list[list[Slot]] = []
        for units, count in groups:
            slots = [Slot(tuple(units)) for _ in range(count)]
            self._groups.append(slots)
            self._turns |= dict.fromkeys(units, slots)
            self._position |= {unit: position for position, unit in enumerate(units)}

    @property
    def all(self) -> list[Slot]:
        return [slot for slots in self._groups for slot in slots]

    def add(self, unit: int, *, alone: bool) -> Slot:
        """Add a slot for one unit, or for all units of its group, and return it."""
        slots = self._turns[unit]
        slots.append(Slot((unit,) if alone else slots[0].fits))
        return slots[-1]

    def shared(self, unit: int) -> Slot:
        """Return the slot of a unit's weights. Neighbors in forward order get different slots if there are several."""
        slots = self._turns[unit]
        return slots[self._position[unit] % len(slots)]

    def next_free(self, unit: int) -> Slot:
        """Return a slot without a user: one without a task, else the one used longest ago, else a new one."""
        slots = self._turns[unit]
        free = [slot for slot in slots if slot.user is None]
        slot = next((s for s in free if s.task is None), free[0] if free else self.add(unit, alone=False))
        slots.remove(slot)
        slots.append(slot)
        return slot


# How many units besides the root and the leaves are unsharded at once: the one that computes, and the next one.
UNITS_IN_FLIGHT = 2


def slot_groups(
    units: Sequence[UnitPlan], uses: Callable[[UnitPlan], bool] = lambda unit: True
) -> list[tuple[list[int], int]]:
    """Return the groups of units that take turns in slots, each with the number of its slots."""
    # A leaf runs at the beginning or the end of a pass, and would make the slots of the blocks larger. So leaves take
    # turns in one slot of their own. Units that do not need slots are left out (`uses`).
    root = [i for i, unit in enumerate(units) if unit.spec.root]
    leaves = [i for i, unit in enumerate(units) if unit.spec.leaf]
    others = [i for i, unit in enumerate(units) if not unit.spec.root and not unit.spec.leaf]
    groups = [(others, min(UNITS_IN_FLIGHT, len(others))), (leaves, 1), (root, 1)]
    found = [([i for i in group if uses(units[i])], count) for group, count in groups]
    return [(group, count) for group, count in found if group]


class Successors:
    """The order in which units ran the last time, in the forward and in the backward pass. It says what to prefetch."""

    def __init__(self) -> None:
        self._next: dict[TransferKind, dict[int, int]] = {TransferKind.GATHER: {}, TransferKind.BACKWARD_GATHER: {}}
        self._previous: int | None = None  # the unit that ran last in this pass

    def pass_begins(self, first: int | None = None) -> None:
        """Begin a pass of the model. If `first` is given, that unit counts as the first to run."""
        self._previous = first

    def runs(self, kind: TransferKind, unit: int) -> int | None:
        """Record that `unit` runs next in a pass that gathers by `kind`. Return what followed it the last time."""
        if self._previous is not None and self._previous != unit:
            self._next[kind][self._previous] = unit
        self._previous = unit
        return self.of(kind, unit)

    def of(self, kind: TransferKind, unit: int) -> int | None:
        """Return the unit that followed `unit` the last time, or None if none did."""
        return self._next[kind].get(unit)
