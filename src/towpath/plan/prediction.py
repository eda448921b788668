"""Results of the planner: timelines of simulated steps, predicted steps of strategies, and their ranking."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from towpath.core.strategy import Strategy, TransferKind
from towpath.observe.trace import BETWEEN, COMPUTE, INSIDE, WAITING, Interval


@dataclass(frozen=True, slots=True)
class Batching:
    """How a rank computes its share of a step.

    Args:
        micro_batch: Sequences of one forward pass.
        micro_steps: Forward passes per optimizer step.
        checkpointing: Whether blocks are recomputed in the backward pass.
    """

    micro_batch: int
    micro_steps: int
    checkpointing: bool = False


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

        def more_of(name: str) -> dict[TransferKind, float]:
            mine, theirs = getattr(self, name), getattr(shorter, name)
            return {kind: more(found, theirs.get(kind, 0.0)) for kind, found in mine.items()}

        seconds = {name: more(getattr(self, name), getattr(shorter, name)) for name in _SECONDS}
        counts = {name: round(more(getattr(self, name), getattr(shorter, name))) for name in _BYTES}
        seconds["unlaunched"] = max(0.0, seconds["unlaunched"])
        return replace(self, **seconds, **counts, exposed=more_of("exposed"), in_flight=more_of("in_flight"))

    def figures(self) -> dict[str, Any]:
        """Return all fields without the events, for a prediction."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"events": []}


@dataclass(kw_only=True)
class Prediction(Timeline):
    """The predicted optimizer step of a strategy, without its events.

    Args:
        seconds: Duration of the step.
        computed: Seconds of computation.
        inter_bytes: Bytes that all ranks together send between nodes. An upper bound, if messages may be shorter.
        intra_bytes: Bytes that all ranks together send inside nodes, in the same way.
        events: Empty.
        exposed: Seconds that the computation waits for each kind of transfer.
        in_flight: Seconds for which transfers of each kind run.
        launching: Seconds for which the thread that trains launches, where a device computes.
        unlaunched: Seconds for which the device waits because nothing has been launched yet.
        saved_inter_bytes: How many of the bytes between nodes are expected not to be sent.
        saved_intra_bytes: The same inside nodes.
        host_copy_bytes: Bytes copied between the device and the host, both directions together.
        strategy: The strategy.
        batching: How each rank computes its share.
        computing: Seconds of the passes' computation, if nothing else ran.
        memory: Bytes that a rank holds, by part.
        host_memory: Bytes in the host's memory for each rank, by part.
    """

    strategy: Strategy
    batching: Batching
    computing: float
    memory: dict[str, int]
    host_memory: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def order(self) -> tuple[bool, float, int]:
        """The key by which predictions are ranked: those that launch longer than they compute come last."""
        return self.launches_too_long, self.seconds, self.peak_bytes

    @property
    def launches_too_long(self) -> bool:
        """Whether the thread that trains launches for longer than the device computes."""
        return self.launching > self.computing

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a rank holds."""
        return sum(self.memory.values())

    @property
    def expected_inter_bytes(self) -> int:
        """The bytes that all ranks together are expected to send between nodes."""
        return self.inter_bytes - self.saved_inter_bytes

    @property
    def expected_intra_bytes(self) -> int:
        """The bytes that all ranks together are expected to send inside nodes."""
        return self.intra_bytes - self.saved_intra_bytes

    def sequences(self, world: int) -> int:
        """Return the sequences of a step on `world` ranks."""
        return self.batching.micro_batch * self.batching.micro_steps * world


@dataclass(frozen=True)
class Infeasible:
    """The result if nothing fits into memory.

    Args:
        nearest: The prediction for the candidate that needs least.
        missing_bytes: How much more it needs than there is.
    """

    nearest: Prediction
    missing_bytes: int


@dataclass(frozen=True)
class Ranking:
    """The result of a search.

    Args:
        ranked: The best predictions, the fastest first.
        considered: Number of candidates.
        fitting: Number of candidates that may fit into memory.
        replayed: Number of candidates that were simulated.
        open_bound: A lower bound on the step time of those that were not simulated and may be among the best, or None
            if there are none.
    """

    ranked: tuple[Prediction, ...]
    considered: int
    fitting: int
    replayed: int
    open_bound: float | None

    @property
    def proven(self) -> bool:
        """Whether no other candidate can be among the best."""
        return self.open_bound is None
