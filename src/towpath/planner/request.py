"""What is asked of one optimizer step: how much data, in which precision, with which optimizer, in how much memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isqrt
from typing import Literal

from towpath.core.formats import Codec, Precision, item_bytes
from towpath.core.strategy import Offload
from towpath.errors import ConfigError

BF16 = Precision("bfloat16", "bfloat16")

OptimizerName = Literal["adamw", "adam", "adagrad", "rmsprop", "sgd-momentum", "sgd"]
# Elements of state that each keeps for every parameter, in the parameter's own dtype.
OPTIMIZERS: dict[OptimizerName, int] = {"adamw": 2, "adam": 2, "adagrad": 1, "rmsprop": 1, "sgd-momentum": 1, "sgd": 0}


@dataclass(frozen=True, slots=True)
class Optimizer:
    """`states`: elements that it keeps for each parameter."""

    name: str
    states: int

    @staticmethod
    def named(name: str) -> Optimizer:
        if name not in OPTIMIZERS:
            raise ConfigError(f"optimizer {name!r}: expected one of {', '.join(OPTIMIZERS)}.")
        return Optimizer(name, OPTIMIZERS[name])

    def moved_bytes(self, own: str) -> int:
        """Of one parameter in a step: all but the gradient are written as well as read."""
        return item_bytes(own) * (2 * (self.states + 1) + 1)


ADAMW = Optimizer.named("adamw")


@dataclass(frozen=True, slots=True)
class Request:
    """One optimizer step of the whole job: `batch` sequences. `memory`: bytes that a rank may hold.

    `weights`, `gradients`: codecs that may be used for what crosses nodes; lossless without them. `micro_batches`: how
    many sequences a rank may compute at once; none: every divisor of its share. `checkpointing`: None leaves it open.
    `offload`: what lies in the host's memory, "optimizer" or nothing.
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

    def shares(self, world: int) -> list[tuple[int, int]]:
        """(micro-batch, micro-steps) of a rank, all that may be."""
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
        return [(size, mine // size) for size in wanted]


def codecs_for_both(names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those that weights may travel in, and gradients: what errs in a weight errs in every step, so of the `names` only
    those that lose little and nothing at random are for weights."""
    codecs = [Codec.parse(name) for name in names]
    return tuple(str(c) for c in codecs if c.name != "int4" and not c.stochastic), tuple(map(str, codecs))
