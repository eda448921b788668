"""Requests to the planner: the data, precision, optimizer and memory of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isqrt
from pathlib import Path
from typing import Any, Literal

from towpath.core.formats import Codec, Precision, item_bytes
from towpath.core.strategy import Offload, Strategy
from towpath.errors import ConfigError
from towpath.plan.bandwidth import Timeline

BF16 = Precision("bfloat16", "bfloat16")

OptimizerName = Literal["adamw", "adam", "adagrad", "rmsprop", "sgd-momentum", "sgd"]
# The number of state elements that each optimizer keeps for a parameter, in the parameter's own dtype.
OPTIMIZERS: dict[OptimizerName, int] = {"adamw": 2, "adam": 2, "adagrad": 1, "rmsprop": 1, "sgd-momentum": 1, "sgd": 0}


# Among the codecs that a user allows: islands of nodes may synchronize only now and then.
OUTER = "outer"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer, as far as its memory and its speed matter."""

    name: str  # its name
    states: int  # number of state elements that it keeps for each parameter

    @staticmethod
    def named(name: str) -> Optimizer:
        """Return the optimizer with this name, or raise ConfigError."""
        if name not in OPTIMIZERS:
            raise ConfigError(f"optimizer {name!r}: expected one of {', '.join(OPTIMIZERS)}.")
        return Optimizer(name, OPTIMIZERS[name])

    def moved_bytes(self, own: str) -> int:
        """Return the bytes that a step moves for one parameter of dtype `own`. It only reads the gradient."""
        return item_bytes(own) * (2 * (self.states + 1) + 1)


ADAMW = Optimizer.named("adamw")


@dataclass(frozen=True, slots=True)
class Request:
    """One optimizer step of a job, and its limits.

    Args:
        batch: Number of sequences of a step, over all ranks.
        memory: Bytes that a rank may hold.
        precision: The dtypes of computation and communication. Default: bfloat16.
        own: The dtype of the parameters that the optimizer updates.
        optimizer: The optimizer. Default: AdamW.
        weights: Codecs that may be used for weights between nodes. Default: lossless.
        gradients: Codecs that may be used for gradients between nodes. Default: lossless.
        micro_batches: Numbers of sequences that a rank may compute at once. Default: every divisor of its share.
        checkpointing: Whether blocks are recomputed in the backward pass. Default: the planner tries both.
        offload: "optimizer" to keep the optimizer's states in the host's memory, "params" to keep the P shards
            there, or "optimizer+params".
        interleaved: Optimizer steps of the run, if codecs of gradients are used only in the first half of it. The
            predicted step is then the mean over the run. Default: 0, for codecs that are used in every step.
        exact: Whether gradients and parameter syncs are sent exactly, which is lossless. Default: where the planner
            expects a faster step. True: wherever they can be.
        outer: Whether "auto" may choose outer steps, which change the algorithm. `OuterPlanner` plans them.
    """

    batch: int
    memory: int
    precision: Precision = BF16
    own: str = "float32"
    optimizer: Optimizer = ADAMW
    weights: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = ()
    checkpointing: bool | None = None
    offload: Offload | None = None
    interleaved: int = 0
    exact: bool | None = None
    outer: bool = False

    @property
    def compute_dtype(self) -> str:
        """The dtype in which the passes compute."""
        return self.precision.compute_dtype(self.own)

    def batchings(self, world: int) -> list[Batching]:
        """Return all ways in which one of `world` ranks can compute its share of the batch."""
        mine, left = divmod(self.batch, world)
        if left or not mine:
            raise ConfigError(
                f"batch = {self.batch} sequences cannot be shared out evenly to {world} ranks. Expected a multiple of "
                f"{world}."
            )
        small = [size for size in range(1, isqrt(mine) + 1) if mine % size == 0]
        sizes = sorted({*small, *(mine // size for size in small)})
        wanted = [size for size in sizes if not self.micro_batches or size in self.micro_batches]
        if not wanted:
            raise ConfigError(
                f"micro-batch {', '.join(map(str, self.micro_batches))}: expected divisors of the {mine} "
                f"sequences that each of {world} ranks computes in a step."
            )
        checkpointing = (False, True) if self.checkpointing is None else (self.checkpointing,)
        return [Batching(size, mine // size, again) for size in wanted for again in checkpointing]


def codecs_for_both(names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Divide allowed codecs into those for weights and those for gradients, as `Request` takes them.

    An error in a weight has an effect in every step. Weights only get codecs with small, deterministic errors.
    """
    codecs = [Codec.parse(name) for name in names if name != OUTER]
    return tuple(str(c) for c in codecs if c.name != "int4" and not c.stochastic), tuple(map(str, codecs))


@dataclass(frozen=True, slots=True)
class Workload:
    """One optimizer step of one rank, as `shard(model, "auto", workload=…)` needs to know it.

    Args:
        tokens: Tokens of one forward pass.
        micro_steps: Forward passes per optimizer step.
        optimizer: "adamw", "adam", "adagrad", "rmsprop", "sgd-momentum" or "sgd".
        memory: Bytes that a rank may hold. Default: 90 % of the memory of its device.
        allow: Codecs that may be used between nodes, such as `("int8", "int4")`. With "outer" among them, islands of
            nodes may also synchronize only now and then, which changes the algorithm. Default: lossless.
        inputs: Inputs of the model. Only their shapes matter. With them, `shard` measures the passes of the model's
            units and counts its activations. Without them, it assumes two FLOPs per parameter and token, and no
            activations. Then pass as `memory` what the activations leave.
        profile: A file that `towpath probe` wrote. Default: measure the cluster once, for a few seconds, and keep the
            profile in the user's cache.
        interleaved: Optimizer steps of the run, to use codecs of gradients only in the first half of it. Default: 0,
            which uses them in every step.
        offload: What is in host memory, as for `towpath.strategy`. Default: nothing.
        exact: Whether transports are exact. Default: where the predicted step is faster.
    """

    tokens: int
    micro_steps: int = 1
    optimizer: OptimizerName = "adamw"
    memory: int | None = None
    allow: tuple[str, ...] = ()
    inputs: Sequence[Any] = field(default=(), repr=False)
    profile: str | Path = ""
    interleaved: int = 0
    offload: Offload | None = None
    exact: bool | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "micro_steps", "memory"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (name == "memory" and value is None):
                raise ConfigError(f"Workload({name}={value!r}): expected a whole number of at least 1.")
        Optimizer.named(self.optimizer)
        for name in self.allow:
            if name != OUTER:
                Codec.parse(name)


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
        buddy: If the strategy has `protect`, the seconds for which a node sends to its buddy, and those of them that do
            not fit into idle time of the link.
    """

    strategy: Strategy
    batching: Batching
    computing: float
    memory: dict[str, int]
    host_memory: dict[str, int] = field(default_factory=dict[str, int])
    buddy: tuple[float, float] = (0.0, 0.0)

    @property
    def waiting(self) -> float:
        """Seconds in which nothing is computed because of transfers."""
        return sum(self.exposed.values()) + self.buddy[1]

    @property
    def order(self) -> tuple[bool, float, int]:
        """The key by which predictions are ranked: those that launch longer than they compute come last.

        Of steps that take as long in three digits, the one with less memory comes first.
        """
        return self.is_launch_bound, float(f"{self.seconds:.3g}"), self.peak_bytes

    @property
    def is_launch_bound(self) -> bool:
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
