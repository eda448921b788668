"""The timeline of a simulated step, and the cost of uneven ranks.

The simulator replays one rank that represents all. A rank that computes longer reaches the next transfer late, and all
members of its group wait for it. A rank that would have waited anyway, or has other work meanwhile, loses nothing.
The estimate is a first-order one: it assumes the same link and processor sharing as in an undisturbed step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from statistics import fmean

from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.errors import ConfigError

_LEAST = 0.1  # the shortest drawn pass, as a share of its usual time


@dataclass(frozen=True, slots=True)
class Event:
    """An interval of a simulated step. `track` is "compute", "waiting", or the name of a queue."""

    track: str
    name: str
    start: float
    end: float
    kind: TransferKind | None = None
    unit: str = ""
    micro_step: int = 0
    crosses: bool = False


@dataclass(slots=True, eq=False)
class TimedTask:
    """A task of the step and its times. `after` holds the tasks it waited for, with the one before it in its queue."""

    transfers: Sequence[Transfer]
    submitted: float
    began: float = 0.0
    ended: float = 0.0
    after: tuple[TimedTask, ...] = ()


@dataclass(frozen=True, slots=True)
class Computed:
    """The thread computed for so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Submitted:
    """The thread submitted a task."""

    task: TimedTask


@dataclass(frozen=True, slots=True)
class Waited:
    """The thread waited for a task, from `since` on. The wait is empty if the task had ended by then."""

    task: TimedTask
    since: float


ThreadEvent = Computed | Submitted | Waited


@dataclass(slots=True)
class Timeline:
    """A simulated step.

    Args:
        seconds: Duration of the step.
        computed: Seconds of computation.
        inter_bytes: Bytes that all ranks together send between nodes.
        intra_bytes: Bytes that all ranks together send inside nodes.
        saved_inter_bytes: How many of the bytes between nodes exact transfers are expected not to send.
        saved_intra_bytes: The same inside nodes.
        events: All intervals, for a trace.
        exposed: Seconds that the computation waited for each kind of transfer.
        in_flight: Seconds for which transfers of each kind ran.
        thread_events: What the training thread did, in order. `expected_delay` reads it.
        launching: Seconds for which the thread that trains launches, where a device computes.
        unlaunched: Seconds for which the device waits because nothing has been launched yet.
        host_bytes: Bytes copied between the device and the host, both directions together.
    """

    seconds: float = 0.0
    computed: float = 0.0
    inter_bytes: int = 0
    intra_bytes: int = 0
    events: list[Event] = field(default_factory=list[Event])
    exposed: dict[TransferKind, float] = field(default_factory=dict[TransferKind, float])
    in_flight: dict[TransferKind, float] = field(default_factory=dict[TransferKind, float])
    thread_events: list[ThreadEvent] = field(default_factory=list[ThreadEvent])
    launching: float = 0.0
    unlaunched: float = 0.0
    saved_inter_bytes: int = 0
    saved_intra_bytes: int = 0
    host_bytes: int = 0

    def waited(self, kind: TransferKind, name: str, began: float, ended: float) -> None:
        """Record that the computation waited for a transfer."""
        self.events.append(Event("waiting", name, began, ended, kind))
        self.exposed[kind] = self.exposed.get(kind, 0.0) + ended - began

    def sent(self, event: Event) -> None:
        """Record a transfer."""
        assert event.kind is not None
        self.events.append(event)
        self.in_flight[event.kind] = self.in_flight.get(event.kind, 0.0) + event.end - event.start

    def with_more(self, times: float, shorter: Timeline) -> Timeline:
        """Extrapolate: add the difference between this timeline and a `shorter` one, `times` times."""

        def more(mine: float, theirs: float) -> float:
            return mine + times * (mine - theirs)

        def more_bytes(mine: int, theirs: int) -> int:
            return round(mine + times * (mine - theirs))

        return Timeline(
            more(self.seconds, shorter.seconds),
            more(self.computed, shorter.computed),
            more_bytes(self.inter_bytes, shorter.inter_bytes),
            more_bytes(self.intra_bytes, shorter.intra_bytes),
            self.events,
            {kind: more(found, shorter.exposed.get(kind, 0.0)) for kind, found in self.exposed.items()},
            {kind: more(found, shorter.in_flight.get(kind, 0.0)) for kind, found in self.in_flight.items()},
            launching=more(self.launching, shorter.launching),
            unlaunched=max(0.0, more(self.unlaunched, shorter.unlaunched)),
            saved_inter_bytes=more_bytes(self.saved_inter_bytes, shorter.saved_inter_bytes),
            saved_intra_bytes=more_bytes(self.saved_intra_bytes, shorter.saved_intra_bytes),
            host_bytes=more_bytes(self.host_bytes, shorter.host_bytes),
        )


# Uneven ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankVariation:
    """How the computing speed of ranks varies.

    Args:
        jitter: Standard deviation of each pass's time on every rank, as a share of that time.
        stragglers: For each slow rank, how many times as long it always computes.
    """

    jitter: float = 0.0
    stragglers: Mapping[int, float] = field(default_factory=dict[int, float])

    def check(self, world: int) -> None:
        """Raise ConfigError unless the values fit a job of `world` ranks."""
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter = {self.jitter}: expected a share of 0 to 1, such as 0.05.")
        for rank, times in self.stragglers.items():
            if not 0 <= rank < world or not 0 < times < inf:
                raise ConfigError(
                    f"straggler {rank}:{times:g}: expected RANK:TIMES, a rank below {world} and how many times as long "
                    "it computes."
                )


@dataclass(frozen=True, slots=True)
class Delay:
    """Seconds that a step takes longer than without variation.

    Args:
        mean: The mean of several draws.
        most: The longest of several draws.
    """

    mean: float
    most: float


def expected_delay(
    thread_events: Sequence[ThreadEvent],
    variation: RankVariation,
    world: int,
    draws: int = 20,
    say: Callable[[int, int], None] = lambda done, total: None,
) -> Delay:
    """Estimate how much longer a step takes if ranks compute at different speeds.

    Args:
        thread_events: `Timeline.thread_events` of the step without variation.
        variation: How the speed of ranks varies.
        world: Number of ranks.
        draws: Number of random draws. Without jitter one draw is made, because all would be equal.
        say: Called with the amount of finished work and the total amount.

    Returns:
        The mean and the longest delay.

    Raises:
        ConfigError: If `variation` does not fit the job.
    """
    variation.check(world)
    draws = draws if variation.jitter else 1
    found: list[float] = []
    for seed in range(draws):
        before = seed * len(thread_events)

        def report(done: int, before: int = before) -> None:
            say(before + done, draws * len(thread_events))

        found.append(max(_delays_by_rank(thread_events, variation, world, Random(seed), report)))
    return Delay(fmean(found), max(found))


def _delays_by_rank(
    thread_events: Sequence[ThreadEvent],
    variation: RankVariation,
    world: int,
    draw: Random,
    say: Callable[[int], None],
) -> list[float]:
    """Return the delay of each rank at the end of the step."""
    late = [0.0] * world
    ends: dict[TimedTask, list[float]] = {}  # the delay of each rank at the end of a task
    for number, event in enumerate(thread_events):
        say(number)
        match event:
            case Computed(seconds):
                for rank in range(world):
                    drawn = draw.gauss(1.0, variation.jitter) if variation.jitter else 1.0
                    late[rank] += seconds * (max(_LEAST, drawn) * variation.stragglers.get(rank, 1.0) - 1)
            case Submitted(task):
                ends[task] = _delays_at_end(task, late, ends)
            case Waited(task, since):
                exposed, spare = max(0.0, task.ended - since), max(0.0, since - task.ended)
                late = _later(late, exposed, ends[task], spare)
    return late


def _delays_at_end(
    task: TimedTask, submitted: Sequence[float], ends: Mapping[TimedTask, Sequence[float]]
) -> list[float]:
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
    """Return the later of both for each rank. A call of `max` here would take most of a simulation."""
    pairs = zip(mine, theirs, strict=True)
    return [own if (own := late - less) > (other := end - spare) else other for late, end in pairs]
