"""Every error Towpath raises on purpose, one tree.

    TowpathError
    ├── TopologyError        a cluster that cannot be: uneven nodes, a world that does not fit
    ├── PlacementError       extents that break a rule (P ≤ G ≤ OS, dividing, nodes only when filled)
    ├── StrategyError        an unknown or contradictory strategy, wire, option or precision
    ├── ShardError           a model that cannot be sharded as it stands
    │   ├── MismatchError    the ranks were given different things
    │   └── NoMethodError    a method of FSDP2's modules that a sharded model does not have
    ├── ShardTensorError     an operation that needs the whole tensor met a slice of it
    ├── StepError            a training step in an order that would give wrong numbers
    ├── ConfigError          a configuration, model or data that `towpath train` cannot use
    ├── TrainError           a training run that cannot go on
    ├── CheckpointError      a checkpoint that cannot be written, read, or used for this model
    ├── PlanError            no strategy fits
    └── LabError             the laboratory could not be raised, or lost a node

Each message says what was got, what was expected and what to do. An `assert` is for our own bugs only.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType


class TowpathError(Exception):
    """The root of every error Towpath raises on purpose."""


class TopologyError(TowpathError):
    """A cluster that cannot be: uneven nodes, or a world that does not fit it."""


class PlacementError(TowpathError):
    """Extents that break a rule; the message names the rule and the nearest legal placement."""


class StrategyError(TowpathError):
    """An unknown or contradictory strategy, wire, option or precision."""


class ShardError(TowpathError):
    """A model that cannot be sharded as it stands."""


class MismatchError(ShardError):
    """The ranks were given different models, strategies or topologies; every rank raises it."""


class NoMethodError(ShardError, AttributeError):
    """A method of FSDP2's modules that a sharded model does not have; the message names what to use instead.

    It is an AttributeError, so that `hasattr` tells that the model is no FSDPModule.
    """


class ShardTensorError(TowpathError):
    """An operation that needs the whole tensor met a `ShardTensor`, which holds a slice of it."""


class StepError(TowpathError):
    """A training step in an order that would give wrong numbers."""


class ConfigError(TowpathError):
    """A configuration, or a model or data it names, that cannot be used: the user's to mend."""


class TrainError(TowpathError):
    """A training run that cannot go on: a loss that is not finite, a rank that failed."""


class CheckpointError(TowpathError):
    """A checkpoint that cannot be written, is not what was written, or is of another model."""


class PlanError(TowpathError):
    """No strategy fits; the message says by how much, and what would."""


class LabError(TowpathError):
    """The laboratory could not be raised, or lost one of its nodes."""


# Where the lab has set it, a rank that ends with one of these errors says so in one line: it is one of many.
ERRORS = "TOWPATH_ERRORS"


def _in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, TowpathError):
        sys.__excepthook__(kind, error, trace)
        return
    ours = str(Path(__file__).parent)
    theirs = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith((ours, "<"))]
    where = f"{Path(theirs[-1].filename).name}, line {theirs[-1].lineno}: " if theirs else ""
    sys.stderr.write(f"towpath: rank {os.environ.get('RANK', '?')}: {where}{' '.join(str(error).split())}\n")
    # Where its peers are gone, gloo's threads would abort the process while it ends, and say so over several lines.
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if ERRORS in os.environ:
    sys.excepthook = _in_one_line
