"""What `shard(model, "auto", workload=…)` has to know of a training loop, which it cannot see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from towpath.core.formats import Codec
from towpath.errors import ConfigError
from towpath.planner.request import Optimizer, OptimizerName


@dataclass(frozen=True, slots=True)
class Workload:
    """One optimizer step of one rank.

    `tokens`: that a forward pass computes. `micro_steps`: forward passes of a step. `optimizer`: adamw, adam, adagrad,
    rmsprop, sgd-momentum or sgd. `memory`: bytes that a rank may hold; none: nine tenths of what its device has.
    `allow`: codecs that may be used between nodes, such as ("int8", "int4"); none: lossless.
    `inputs`: what the model is called with (their values do not matter). With them the passes of its units are measured
    and its activations counted; without, a token is taken to cost two FLOPs for each parameter, and activations are
    left out: pass the `memory` that remains beside them.
    `profile`: a file that `towpath probe` wrote; none: the cluster is measured once, for a few seconds, and the profile
    kept in the user's cache.
    """

    tokens: int
    micro_steps: int = 1
    optimizer: OptimizerName = "adamw"
    memory: int | None = None
    allow: tuple[str, ...] = ()
    inputs: Sequence[Any] = field(default=(), repr=False)
    profile: str | Path = ""

    def __post_init__(self) -> None:
        for name in ("tokens", "micro_steps", "memory"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (name == "memory" and value is None):
                raise ConfigError(f"Workload({name}={value!r}): expected a whole number of at least 1.")
        Optimizer.named(self.optimizer)
        for name in self.allow:
            Codec.parse(name)
