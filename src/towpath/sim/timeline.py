"""What a simulated rank did in a step, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

from towpath.core.strategy import TransferKind
from towpath.sim.lateness import Moment


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took place. `track`: 'compute', 'waiting', or a queue's name."""

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
    """A step that is over. `exposed`: by kind, what the computation waited for. Bytes: sent by all ranks together.

    `moments`: what the thread that trains did, in its order, for those who ask what uneven ranks cost.
    """

    seconds: float = 0.0
    computed: float = 0.0
    inter_bytes: int = 0
    intra_bytes: int = 0
    events: list[Event] = field(default_factory=list[Event])
    exposed: dict[TransferKind, float] = field(default_factory=dict[TransferKind, float])
    in_flight: dict[TransferKind, float] = field(default_factory=dict[TransferKind, float])
    moments: list[Moment] = field(default_factory=list[Moment])

    def waited(self, kind: TransferKind, name: str, began: float, ended: float) -> None:
        self.events.append(Event("waiting", name, began, ended, kind))
        self.exposed[kind] = self.exposed.get(kind, 0.0) + ended - began

    def sent(self, event: Event) -> None:
        assert event.kind is not None
        self.events.append(event)
        self.in_flight[event.kind] = self.in_flight.get(event.kind, 0.0) + event.end - event.start

    def with_more(self, times: float, shorter: Timeline) -> Timeline:
        """Of a step with so many more of what this one has more than `shorter`."""

        def more(mine: float, theirs: float) -> float:
            return mine + times * (mine - theirs)

        return Timeline(
            more(self.seconds, shorter.seconds),
            more(self.computed, shorter.computed),
            round(self.inter_bytes + times * (self.inter_bytes - shorter.inter_bytes)),
            round(self.intra_bytes + times * (self.intra_bytes - shorter.intra_bytes)),
            self.events,
            {kind: more(found, shorter.exposed.get(kind, 0.0)) for kind, found in self.exposed.items()},
            {kind: more(found, shorter.in_flight.get(kind, 0.0)) for kind, found in self.in_flight.items()},
        )
