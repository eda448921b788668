"""The errors that Towpath raises on purpose, in one tree.

    TowpathError
    ├── TopologyError        an impossible cluster: uneven nodes, or a world size that does not fit
    ├── PlacementError       extents that break a rule (P ≤ G ≤ OS, dividing, nodes only when filled)
    ├── StrategyError        an unknown or contradictory strategy, transport, option or precision
    ├── ShardError           a model that cannot be sharded in its present state
    │   ├── MismatchError    different models or arguments on different ranks
    │   └── NoMethodError    a method of FSDP2's modules that a sharded model does not have
    ├── ShardTensorError     an operation on a slice that needs the full tensor
    ├── StepError            a training step in an order that would give wrong results
    ├── ConfigError          a configuration, model or data that `towpath train` cannot use
    ├── TrainError           a training run that cannot continue
    ├── CheckpointError      a checkpoint that cannot be written, read, or used for this model
    └── PlanError            no strategy that fits

Each message says what Towpath got, what it expected, and what to do. Failed `assert`s are bugs in Towpath.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "MismatchError",
    "NoMethodError",
    "PlacementError",
    "PlanError",
    "ShardError",
    "ShardTensorError",
    "StepError",
    "StrategyError",
    "TopologyError",
    "TowpathError",
    "TrainError",
]


def __dir__() -> list[str]:
    return __all__


class TowpathError(Exception):
    """The base class of all errors that Towpath raises on purpose."""


class TopologyError(TowpathError):
    """An impossible cluster: uneven nodes, or a world size that does not fit the topology."""


class PlacementError(TowpathError):
    """Extents that break a rule; the message names the rule and the nearest legal placement."""


class StrategyError(TowpathError):
    """An unknown or contradictory strategy, transport, option or precision."""


class ShardError(TowpathError):
    """A model that cannot be sharded in its present state, or a model that is not sharded where one is needed."""


class MismatchError(ShardError):
    """Different models, strategies, topologies or arguments on different ranks. Every rank raises it."""


class NoMethodError(ShardError, AttributeError):
    """A method of FSDP2's modules that a sharded model does not have. The message names the replacement.

    It is an AttributeError too, so that `hasattr` returns False and libraries do not take the model for an FSDPModule.
    """


class ShardTensorError(TowpathError):
    """An operation that needs the full tensor, on a `ShardTensor`, which holds only a slice of it."""


class StepError(TowpathError):
    """A training step in an order that would give wrong results, or in which a collective failed."""


class ConfigError(TowpathError):
    """A configuration that cannot be used, or whose model or data cannot. The user can correct it."""


class TrainError(TowpathError):
    """A training run that cannot continue, because a loss is not finite or a rank failed."""


class CheckpointError(TowpathError):
    """A checkpoint that cannot be written, is damaged, or belongs to another model."""


class PlanError(TowpathError):
    """A plan that is not possible, mostly because no strategy fits in memory. The message says what would fit."""
