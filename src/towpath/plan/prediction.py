"""Results of the planner: the predicted step of a strategy, and the ranking of many."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from towpath.core.strategy import Strategy, TransferKind
from towpath.plan.timeline import Timeline


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


@dataclass(frozen=True)
class Prediction:
    """The predicted optimizer step of a strategy.

    Args:
        strategy: The strategy.
        batching: How each rank computes its share.
        seconds: Duration of the step.
        computing: Seconds of computation, without the optimizer.
        exposed: Seconds that the computation waits for each kind of transfer.
        in_flight: Seconds for which transfers of each kind run.
        memory: Bytes that a rank holds, by part.
        inter_bytes: Bytes that all ranks together send between nodes. An upper bound, if messages may be shorter.
        intra_bytes: Bytes that all ranks together send inside nodes, in the same way.
        host_memory: Bytes in the host's memory for each rank, by part.
        host_copy_bytes: Bytes copied between the device and the host, both directions together.
        launching: Seconds for which the thread that trains launches, where a device computes.
        unlaunched: Seconds for which the device waits because nothing has been launched yet.
        saved_inter_bytes: How many of the bytes between nodes are expected not to be sent.
        saved_intra_bytes: The same inside nodes.
    """

    strategy: Strategy
    batching: Batching
    seconds: float
    computing: float
    exposed: dict[TransferKind, float]
    in_flight: dict[TransferKind, float]
    memory: dict[str, int]
    inter_bytes: int
    intra_bytes: int
    host_memory: dict[str, int] = field(default_factory=dict[str, int], kw_only=True)
    host_copy_bytes: int = field(default=0, kw_only=True)
    launching: float = field(default=0.0, kw_only=True)
    unlaunched: float = field(default=0.0, kw_only=True)
    saved_inter_bytes: int = field(default=0, kw_only=True)
    saved_intra_bytes: int = field(default=0, kw_only=True)

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


def figures_of(timeline: Timeline) -> dict[str, Any]:
    """Return the fields of a prediction that are those of its simulated step."""
    names = ("seconds", "exposed", "in_flight", "inter_bytes", "intra_bytes", "saved_inter_bytes", "saved_intra_bytes")
    return {name: getattr(timeline, name) for name in (*names, "launching", "unlaunched")}


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
