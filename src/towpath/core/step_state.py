"""What the step machine knows: of a unit by its strategy, and of its weights and gradients at a moment."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from towpath.core.strategy import Kind
from towpath.core.transfer import Transfer

# --- actions ----------------------------------------------------------------------------------------------------------
#
# What the step machine answers: transfers to submit, and what to do around them, in the order given.


@dataclass(slots=True, eq=False, weakref_slot=True)
class Slot:
    """Memory for the whole weights, or the whole gradients, of one unit at a time. `fits`: which units."""

    fits: tuple[int, ...]
    user: int | None = None
    task: Task | None = None  # the last that fills or reads it


@dataclass(slots=True, eq=False)
class Task:
    """A transfer of one unit. `after`: the tasks it waits for, besides what was computed before it was submitted, and
    the tasks before it in its queue's way.

    `transfers`: of an optimizer's step, which are no unit's; `unit` is the number of its round then. `handle` is the
    executor's own.
    """

    kind: Kind
    unit: int
    slot: Slot | None = None
    after: tuple[Task, ...] = ()
    keep_copy: bool = False  # of a gather: what it brings, cut for the backward pass, is kept
    transfers: tuple[Transfer, ...] = ()
    handle: object = None

    def __str__(self) -> str:
        if self.transfers:
            return f"{self.kind.value} of {self.transfers[0].payload}"
        return f"{self.kind.value} of unit {self.unit}"


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue the transfer."""

    task: Task


@dataclass(frozen=True, slots=True)
class Wait:
    """Before anything that follows is computed, the task's results must be there.

    `on_host`: before the host itself goes on, too. It reads, or writes to, memory that the task copies.
    """

    task: Task
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class SwapParameters:
    """Let the modules' parameters be the whole weights, or the shards again."""

    unit: int
    whole: bool


@dataclass(frozen=True, slots=True)
class InvalidateViews:
    """Let autograd refuse to read the whole weights (their memory may hold another unit's), or allow it again."""

    unit: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class AssignSlot:
    """From now on the unit's whole weights live in that slot."""

    unit: int
    slot: Slot


@dataclass(frozen=True, slots=True)
class SaveBackwardCopy:
    """Of the unit's whole weights, which are there, keep the copy that the backward pass gathers from."""

    unit: int


@dataclass(frozen=True, slots=True)
class OpenGradients:
    """The unit's gradients of this pass arrive in that slot; without one, in the gradient shard itself."""

    unit: int
    slot: Slot | None


@dataclass(frozen=True, slots=True)
class CheckRanks:
    """Tell all ranks which parameters got a gradient here, and hear whether all ran the same units."""


@dataclass(frozen=True, slots=True)
class SetGrads:
    """The mean gradients are there: to every `.grad`."""


Action = (
    Submit
    | Wait
    | SwapParameters
    | InvalidateViews
    | AssignSlot
    | SaveBackwardCopy
    | OpenGradients
    | CheckRanks
    | SetGrads
)


Unit = TypeVar("Unit")


def in_backward_order(units: Sequence[Unit]) -> Sequence[Unit]:
    """What is of each unit, the root's first, in the order in which a backward pass comes to the units; the root is
    through with the last of them."""
    return (*reversed(units[1:]), units[0])


class ParamVersion:
    """Counts the writes to the parameters of one bucket, or of all of a unit or a model, whose mark `of` is."""

    __slots__ = ("of", "version")

    def __init__(self, of: ParamVersion | None = None) -> None:
        self.version = 0
        self.of = of

    def written(self) -> None:
        self.version += 1
        if self.of is not None:
            self.of.written()


class Weights(Enum):
    """Where a unit's weights stand. What may follow on what: `WEIGHTS_CHANGE`.

    SHARDED ──prefetch──▶ PREFETCHED ──a pass begins──▶ IN_USE ──it ends──▶ EVICTABLE ──a pass begins──▶ IN_USE
       │                                                   ▲
       └───────────────────── a pass begins ───────────────┘
    From PREFETCHED, IN_USE and EVICTABLE back to SHARDED: another unit wants the slot, or the model's pass is over.
    pin: from SHARDED, or where nothing has to be gathered, to PINNED; unpin: back to SHARDED.
    """

    SHARDED = "sharded"
    PREFETCHED = "prefetched"
    IN_USE = "in use"
    EVICTABLE = "evictable"
    PINNED = "pinned"


class Gradients(Enum):
    """Where a unit's gradients of one backward pass stand. What may follow on what: `GRADIENTS_CHANGE`.

    NONE ──the first arrives──▶ COLLECTING ──all have arrived──▶ COMPLETE ──reduced──▶ REDUCED ──the pass ends──▶ NONE
                                    └──────────── those that do not come count as zero ─────▲

    A pass that fails: from each to NONE.
    """

    NONE = "none"
    COLLECTING = "collecting"
    COMPLETE = "complete"
    REDUCED = "reduced"


WEIGHTS_CHANGE: Mapping[Weights, frozenset[Weights]] = {
    Weights.SHARDED: frozenset({Weights.PREFETCHED, Weights.IN_USE, Weights.PINNED}),
    Weights.PREFETCHED: frozenset({Weights.IN_USE, Weights.SHARDED}),
    Weights.IN_USE: frozenset({Weights.EVICTABLE, Weights.SHARDED}),
    Weights.EVICTABLE: frozenset({Weights.IN_USE, Weights.SHARDED, Weights.PINNED}),
    Weights.PINNED: frozenset({Weights.SHARDED}),
}
GRADIENTS_CHANGE: Mapping[Gradients, frozenset[Gradients]] = {
    Gradients.NONE: frozenset({Gradients.COLLECTING}),
    Gradients.COLLECTING: frozenset({Gradients.COMPLETE, Gradients.REDUCED, Gradients.NONE}),
    Gradients.COMPLETE: frozenset({Gradients.REDUCED, Gradients.NONE}),
    Gradients.REDUCED: frozenset({Gradients.NONE}),
}


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """What the machine has to know of a unit, by its strategy."""

    name: str
    root: bool = False
    gathers: bool = True  # whole while it computes only; else always
    copies: bool = False  # the forward pass keeps a copy that the backward pass gathers from
    trains: bool = True
    reduces: bool = True  # gradients travel in every backward pass; else they are summed where they lie
    publishes: bool = True  # what was written has to travel, or to be cast
    steps_on_host: bool = False  # mean gradients are copied to the host's memory, and what was written from there
    modules: int = 1  # whose forwards are this unit's

    def __str__(self) -> str:
        return f"unit {self.name or 'root'!r}"


class ForwardPass:
    """One forward pass of a unit whose graph may be walked backward. Lives as long as that graph.

    `walk`: the backward passes of the model are numbered, and this one's comes in that one.
    """

    __slots__ = ("__weakref__", "done", "running", "unit", "version", "walk")

    def __init__(self, unit: int, version: int, walk: int = 0) -> None:
        self.unit, self.version, self.walk = unit, version, walk
        self.running = self.done = False


@dataclass(slots=True)
class UnitState:
    """What the machine knows of a unit at a moment."""

    index: int
    facts: UnitFacts
    mark: ParamVersion
    weights: Weights = Weights.SHARDED
    gradients: Gradients = Gradients.NONE
    slot: Slot | None = None
    collects_in: Slot | None = None
    holds: int = -1  # the version of the weights that are whole in its slot, or on their way there; -1: none are
    copied: int = -1  # that of the backward copy
    published: int = 0  # the version that every rank's shard has
    sealed: bool = False
    finished: bool = False  # no more gradients will come in this backward pass
    inside: int = 0  # calls into it that have not returned
    forwards: Counter[int] = field(default_factory=Counter[int])  # passes through it, by the walk that they belong to
    backwards: Counter[int] = field(default_factory=Counter[int])
    running_passes: int = 0  # backward, now
    shown: bool = False  # the modules' parameters are the whole weights
    home: Slot | None = None  # the slot to return to, while it is pinned
    ready: Task | None = None  # what makes its weights ready: the last gather, or publication
    publication: Task | None = None
    passes: weakref.WeakSet[ForwardPass] = field(default_factory=weakref.WeakSet)

    def weights_become(self, now: Weights) -> None:
        if now is not self.weights and now not in WEIGHTS_CHANGE[self.weights]:
            raise AssertionError(
                f"{self.facts}: its weights were {self.weights.value}, and cannot be {now.value} next."
            )
        self.weights = now

    def gradients_become(self, now: Gradients) -> None:
        was = self.gradients
        if now is not was and now not in GRADIENTS_CHANGE[was]:
            raise AssertionError(f"{self.facts}: its gradients were {was.value}, and cannot be {now.value} next.")
        self.gradients = now

    @property
    def version(self) -> int:
        return self.mark.version

    @property
    def running(self) -> bool:
        """Whether a backward pass through it is under way."""
        return self.running_passes > 0

    @property
    def idle(self) -> bool:
        return self.weights in (Weights.PREFETCHED, Weights.EVICTABLE)

    @property
    def pinned(self) -> bool:
        return self.weights is Weights.PINNED


class Slots:
    """Slots that units take in turns, and those reserved for one unit."""

    def __init__(self, units: Sequence[int], count: int) -> None:
        self._units = tuple(units)
        self._turns = [Slot(self._units) for _ in range(count)]
        self._reserved: dict[int, Slot] = {}

    @property
    def all(self) -> list[Slot]:
        return [*self._turns, *self._reserved.values()]

    def add(self, unit: int | None = None) -> Slot:
        """Another one, which fits that unit, or all."""
        self._turns.append(Slot(self._units if unit is None else (unit,)))
        return self._turns[-1]

    def reserve(self, unit: int) -> Slot:
        """For one unit alone, which would hold one of the others for too long."""
        self._reserved[unit] = slot = Slot((unit,))
        return slot

    def neighbour(self, number: int) -> Slot:
        return self._turns[number % len(self._turns)]

    def next_free(self, unit: int) -> Slot:
        """One that nobody uses: an idle one, else that whose last task is the oldest, else a new one."""
        if unit in self._reserved:
            return self._reserved[unit]
        free = [slot for slot in self._turns if slot.user is None]
        slot = next((s for s in free if s.task is None), free[0] if free else self.add())
        self._turns.remove(slot)
        self._turns.append(slot)
        return slot


class Successors:
    """Which unit came after which, the last time, in the forward and in the backward pass: what to prefetch."""

    def __init__(self) -> None:
        self._next: dict[Kind, dict[int, int]] = {Kind.GATHER: {}, Kind.BACKWARD_GATHER: {}}
        self._previous: int | None = None  # in this pass

    def pass_begins(self, first: int | None = None) -> None:
        """`first`: the unit that runs before all others."""
        self._previous = first

    def runs(self, kind: Kind, unit: int) -> int | None:
        """`unit` is next in a pass whose weights come by `kind`. What came after it the last time, if anything."""
        if self._previous is not None and self._previous != unit:
            self._next[kind][self._previous] = unit
        self._previous = unit
        return self.of(kind, unit)

    def of(self, kind: Kind, unit: int) -> int | None:
        return self._next[kind].get(unit)
