"""What ranks that are not alike cost: how late each comes, where one replayed step stands for all of them.

A rank that computes longer comes late to the next transfer, and all members of its group with it; who would have waited
there anyway, or has something else to do meanwhile, loses nothing. To first order: while some come late, links and
processors are shared as in the step where nobody does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from statistics import fmean

from towpath.core.transfer import Transfer
from towpath.errors import ConfigError

_LEAST = 0.1  # of what a pass takes: nothing drawn makes it shorter


@dataclass(frozen=True, slots=True)
class Computed:
    """Something was computed, for so long."""

    seconds: float


@dataclass(slots=True, eq=False)
class TimedTask:
    """A task of the step, and when it was carried out. `after`: what it waited for, the one before it in its queue
    among them."""

    transfers: Sequence[Transfer]
    submitted: float
    began: float = 0.0
    ended: float = 0.0
    after: tuple[TimedTask, ...] = ()


@dataclass(frozen=True, slots=True)
class Submitted:
    task: TimedTask


@dataclass(frozen=True, slots=True)
class Waited:
    """For a task, from `since` on; nothing, if that had ended by then."""

    task: TimedTask
    since: float


Moment = Computed | Submitted | Waited


@dataclass(frozen=True, slots=True)
class Uneven:
    """`jitter`: the standard deviation of what a pass takes, as a share of it, on every rank. `stragglers`: ranks that
    always take so many times as long."""

    jitter: float = 0.0
    stragglers: Mapping[int, float] = field(default_factory=dict[int, float])

    def check(self, world: int) -> None:
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter = {self.jitter}: expected a share of 0 to 1, such as 0.05.")
        for rank, times in self.stragglers.items():
            if not 0 <= rank < world or not 0 < times < inf:
                raise ConfigError(
                    f"straggler {rank}:{times:g}: expected RANK:TIMES, a rank below {world} and how many times as long "
                    "it computes."
                )


@dataclass(frozen=True, slots=True)
class Late:
    """Seconds that a step takes longer, over several draws."""

    mean: float
    most: float


def lateness(
    moments: Sequence[Moment],
    uneven: Uneven,
    world: int,
    draws: int = 20,
    say: Callable[[int, int], None] = lambda done, total: None,
) -> Late:
    """Of a step in which nobody is late. Without jitter all draws are alike, and one is enough. `say` is told how much
    is done, and of how much."""
    uneven.check(world)
    draws = draws if uneven.jitter else 1
    found: list[float] = []
    for seed in range(draws):
        before = seed * len(moments)

        def told(done: int, before: int = before) -> None:
            say(before + done, draws * len(moments))

        found.append(max(_one(moments, uneven, world, Random(seed), told)))
    return Late(fmean(found), max(found))


def _one(
    moments: Sequence[Moment], uneven: Uneven, world: int, draw: Random, say: Callable[[int], None]
) -> list[float]:
    """How late each rank is at the end."""
    late = [0.0] * world
    ends: dict[TimedTask, list[float]] = {}  # how late, for each rank, a task ended
    for number, moment in enumerate(moments):
        say(number)
        match moment:
            case Computed(seconds):
                for rank in range(world):
                    drawn = draw.gauss(1.0, uneven.jitter) if uneven.jitter else 1.0
                    late[rank] += seconds * (max(_LEAST, drawn) * uneven.stragglers.get(rank, 1.0) - 1)
            case Submitted(task):
                ends[task] = _ended(task, late, ends)
            case Waited(task, since):
                exposed, spare = max(0.0, task.ended - since), max(0.0, since - task.ended)
                late = _later(late, exposed, ends[task], spare)
    return late


def _ended(task: TimedTask, submitted: Sequence[float], ends: Mapping[TimedTask, Sequence[float]]) -> list[float]:
    spare = max(0.0, task.began - task.submitted)
    late = [mine - spare for mine in submitted]
    for before in task.after:
        spare = max(0.0, task.began - before.ended)
        late = _later(late, 0.0, ends[before], spare)
    for transfer in task.transfers:
        for group in transfer.move.groups:
            last = max([late[rank] for rank in group.ranks])
            for rank in group.ranks:
                late[rank] = last
    return late


def _later(mine: Sequence[float], less: float, theirs: Sequence[float], spare: float) -> list[float]:
    """By rank the later of both. Written out, since `max` for each rank of each wait takes most of a simulation."""
    pairs = zip(mine, theirs, strict=True)
    return [own if (own := late - less) > (other := end - spare) else other for late, end in pairs]
