"""The clock of a simulation: activities that run at the same time share links and processors.

Nothing queues for a resource. Each activity that needs it gets an even share. What one cannot use, the others get.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from towpath.core.strategy import TransferKind
from towpath.observe.trace import BETWEEN, COMPUTE, INSIDE, WAITING, Interval

_TINY = 1e-12  # of a demand: the rounding error that may be left when it is over
_ROUNDS = 4  # fifty rounds change no rate by a thousandth (tests/unit/test_sim.py)


@dataclass(slots=True, eq=False)
class Demand:
    """An activity, such as a computation or a phase of a transfer, and what it needs.

    It takes at least `seconds`. `left` and `rate` are shares of the activity.
    """

    seconds: float
    needs: Mapping[str, float]
    left: float = 1.0
    rate: float = 0.0


class BandwidthModel:
    """Shares resources among demands and moves the time forward. `capacities` are amounts per second."""

    def __init__(self, capacities: Mapping[str, float]) -> None:
        self._capacities = dict(capacities)
        self.demands: list[Demand] = []
        self.now = 0.0
        self._rates: dict[tuple[object, ...], list[float]] = {}  # of demands that ran together before

    def alone(self, needs: Mapping[str, float]) -> float:
        """Return the seconds that these needs take if nothing else runs."""
        return max((amount / self._capacities[name] for name, amount in needs.items() if amount), default=0.0)

    def start(self, demand: Demand) -> None:
        """Add a demand."""
        self.demands.append(demand)

    def advance(self) -> list[Demand]:
        """Move the time to the next end of a demand, and return the demands that end then."""
        self.set_rates()
        seconds = min(d.left / d.rate for d in self.demands)
        self.now += seconds
        for demand in self.demands:
            demand.left -= seconds * demand.rate
        ended = [demand for demand in self.demands if demand.left <= _TINY]
        self.demands = [demand for demand in self.demands if demand.left > _TINY]
        return ended

    def set_rates(self) -> None:
        """Give every demand its rate."""
        together = tuple((demand.seconds, *demand.needs.items()) for demand in self.demands)
        if together not in self._rates:
            self._rates[together] = self._computed_rates()
        for demand, rate in zip(self.demands, self._rates[together], strict=True):
            demand.rate = rate

    def _computed_rates(self) -> list[float]:
        # What a demand wants of one resource depends on how fast the other resources let it run. The loop visits all
        # resources several times until the rates no longer change.
        limits = {demand: {"": 1 / demand.seconds} for demand in self.demands}
        users = {name: [d for d in self.demands if d.needs.get(name)] for name in self._capacities}
        shared = {name: found for name, found in users.items() if found}
        for number in range(_ROUNDS):
            for name, found in shared.items():
                wants = {demand: demand.needs[name] * _limit(limits[demand], but=name) for demand in found}
                for demand, share in _shares(self._capacities[name], wants).items():
                    # Before the last round, a demand may still come to want more than it does now.
                    given = share if number < _ROUNDS - 1 else min(share, wants[demand])
                    limits[demand][name] = given / demand.needs[name]
        return [_limit(limits[demand]) for demand in self.demands]


def _limit(limits: Mapping[str, float], but: str | None = None) -> float:
    return min(limit for name, limit in limits.items() if name != but)


def _shares(capacity: float, wants: Mapping[Demand, float]) -> dict[Demand, float]:
    """Return the most that each demand may have: an even share, and an even share of what others leave of theirs."""
    shares: dict[Demand, float] = {}
    left, count = capacity, len(wants)
    for demand, want in sorted(wants.items(), key=lambda item: item[1]):
        shares[demand] = left / count
        left, count = left - min(want, shares[demand]), count - 1
    return shares


class Awaited(Protocol):
    """Something that a simulated thread can wait for."""

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        ...


# A simulated thread yields what it computes and what it waits for.
Thread = Iterator[Demand | Awaited]


class Carrier(Protocol):
    """Runs the transfers that threads have submitted, as demands."""

    def start_ready(self) -> None:
        """Start every transfer that is ready."""
        ...

    def on_end(self, demand: Demand) -> bool:
        """Handle the end of a demand, and return whether it belonged to this carrier."""
        ...


def run_threads(model: BandwidthModel, threads: Sequence[Thread], carriers: Sequence[Carrier]) -> None:
    """Run all threads to their end. Transfers that are not over by then are dropped."""
    current = [_next(model, thread) for thread in threads]
    while any(what is not None for what in current):
        for carrier in carriers:
            carrier.start_ready()
        continued = False
        for number, what in enumerate(current):
            if what is not None and not isinstance(what, Demand) and what.ended:
                current[number], continued = _next(model, threads[number]), True
        if continued:
            continue
        assert model.demands, f"the replay stands still: threads wait for {[w for w in current if w is not None]}"
        for ended in model.advance():
            if not any(carrier.on_end(ended) for carrier in carriers):
                number = current.index(ended)
                current[number] = _next(model, threads[number])


def _next(model: BandwidthModel, thread: Thread) -> Demand | Awaited | None:
    """Return the thread's next computation, or the next thing that has not ended. None means the thread is over."""
    for what in thread:
        if isinstance(what, Demand):
            model.start(what)
            return what
        if not what.ended:
            return what
    return None


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


_TRACKS = {"compute": COMPUTE, "waiting": WAITING}
_SECONDS = ("seconds", "computed", "launching", "unlaunched")
_BYTES = ("inter_bytes", "intra_bytes", "saved_inter_bytes", "saved_intra_bytes", "host_copy_bytes")


@dataclass(slots=True)
class Timeline:
    """A simulated step."""

    seconds: float = 0.0  # duration of the step
    computed: float = 0.0  # seconds of computation
    inter_bytes: int = 0  # bytes that all ranks together send between nodes
    intra_bytes: int = 0  # bytes that all ranks together send inside nodes
    events: list[Event] = field(default_factory=list[Event])  # all intervals, for a trace
    # Seconds that the computation waited for each kind of transfer.
    exposed: dict[TransferKind, float] = field(default_factory=dict[TransferKind, float])
    # Seconds for which transfers of each kind ran.
    in_flight: dict[TransferKind, float] = field(default_factory=dict[TransferKind, float])
    launching: float = 0.0  # seconds for which the thread that trains launches, where a device computes
    unlaunched: float = 0.0  # seconds for which the device waits because nothing has been launched yet
    saved_inter_bytes: int = 0  # how many of the bytes between nodes are expected not to be sent
    saved_intra_bytes: int = 0  # the same inside nodes
    host_copy_bytes: int = 0  # bytes copied between the device and the host, both directions together

    @property
    def intervals(self) -> list[Interval]:
        """The events as the intervals of a traced step."""
        return [
            Interval(
                track=_TRACKS.get(event.track, BETWEEN if event.crosses else INSIDE),
                name=event.name,
                start_seconds=event.start,
                seconds=event.end - event.start,
                args={"queue": event.track, "micro-step": event.micro_step},
            )
            for event in self.events
        ]

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

        found: dict[str, Any] = {}
        for name in (*_SECONDS, *_BYTES):
            found[name] = more(getattr(self, name), getattr(shorter, name))
        for name in _BYTES:
            found[name] = round(found[name])
        for name in ("exposed", "in_flight"):
            mine, theirs = getattr(self, name), getattr(shorter, name)
            found[name] = {kind: more(seconds, theirs.get(kind, 0.0)) for kind, seconds in mine.items()}
        return replace(self, **found | {"unlaunched": max(0.0, found["unlaunched"])})

    def figures(self) -> dict[str, Any]:
        """Return all fields without the events, for a prediction."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"events": []}
