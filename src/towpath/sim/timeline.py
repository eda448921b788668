"""The timeline of a simulated step."""

from __future__ import annotations

from dataclasses import dataclass, field

from towpath.core.strategy import TransferKind


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
