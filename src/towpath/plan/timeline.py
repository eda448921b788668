"""The timeline of a simulated step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from towpath.core.strategy import TransferKind
from towpath.observe.trace import BETWEEN, COMPUTE, INSIDE, WAITING, Interval


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
_BYTES = ("inter_bytes", "intra_bytes", "saved_inter_bytes", "saved_intra_bytes", "host_bytes")


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
    saved_inter_bytes: int = 0  # how many of the bytes between nodes exact transfers are expected not to send
    saved_intra_bytes: int = 0  # the same inside nodes
    host_bytes: int = 0  # bytes copied between the device and the host, both directions together

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

        def more_of(name: str) -> dict[TransferKind, float]:
            mine, theirs = getattr(self, name), getattr(shorter, name)
            return {kind: more(found, theirs.get(kind, 0.0)) for kind, found in mine.items()}

        seconds = {name: more(getattr(self, name), getattr(shorter, name)) for name in _SECONDS}
        counts = {name: round(more(getattr(self, name), getattr(shorter, name))) for name in _BYTES}
        seconds["unlaunched"] = max(0.0, seconds["unlaunched"])
        return replace(self, **seconds, **counts, exposed=more_of("exposed"), in_flight=more_of("in_flight"))
