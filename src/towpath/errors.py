"""The errors that Towpath raises on purpose, in one tree.

    TowpathError
    ├── ConfigError          a topology, placement, strategy, option or file that cannot be used
    ├── PlanError            no strategy that fits
    ├── ShardError           a model that cannot be sharded, or an operation that a sharded one does not allow
    │   └── MismatchError    different models or arguments on different ranks
    ├── StepError            a step that would give wrong results, or a run that cannot continue
    └── CheckpointError      a checkpoint that cannot be written, read, or used for this model

Each message says what Towpath got, what it expected, and what to do. Failed `assert`s are bugs in Towpath.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "MismatchError",
    "PlanError",
    "ShardError",
    "StepError",
    "TowpathError",
]


class TowpathError(Exception):
    """The base class of all errors that Towpath raises on purpose."""


class ConfigError(TowpathError):
    """A topology, placement, strategy, option, configuration or file of data that cannot be used as it is."""


class PlanError(TowpathError):
    """A plan that is not possible, mostly because no strategy fits in memory. The message says what would fit."""


class ShardError(TowpathError):
    """A model that cannot be sharded in its present state, or an operation that a sharded model does not allow."""


class MismatchError(ShardError):
    """Different models, strategies, topologies or arguments on different ranks. Every rank raises it."""


class StepError(TowpathError):
    """A training step in an order that would give wrong results, a collective that failed, or a run that must stop."""


class CheckpointError(TowpathError):
    """A checkpoint that cannot be written, is damaged, or belongs to another model."""
