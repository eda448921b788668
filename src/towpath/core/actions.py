"""What the step machine answers: transfers to submit, and what to do around them, in the order given."""

from __future__ import annotations

from dataclasses import dataclass

from towpath.core.strategy import Kind
from towpath.core.transfer import Transfer


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
class Show:
    """Let the modules' parameters be the whole weights, or the shards again."""

    unit: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Seal:
    """Let autograd refuse to read the whole weights (their memory may hold another unit's), or allow it again."""

    unit: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class Place:
    """From now on the unit's whole weights live in that slot."""

    unit: int
    slot: Slot


@dataclass(frozen=True, slots=True)
class Keep:
    """Of the unit's whole weights, which are there, keep the copy that the backward pass gathers from."""

    unit: int


@dataclass(frozen=True, slots=True)
class Collect:
    """The unit's gradients of this pass arrive in that slot; without one, in the gradient shard itself."""

    unit: int
    slot: Slot | None


@dataclass(frozen=True, slots=True)
class Compare:
    """Tell all ranks which parameters got a gradient here, and hear whether all ran the same units."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """The mean gradients are there: to every `.grad`."""


Action = Submit | Wait | Show | Seal | Place | Keep | Collect | Compare | Deliver
