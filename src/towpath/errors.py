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

import atexit
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

__all__ = [
    "CheckpointError",
    "ConfigError",
    "MismatchError",
    "PlanError",
    "ShardError",
    "StepError",
    "TowpathError",
]


def __dir__() -> list[str]:
    return __all__


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


class LabError(TowpathError):
    """A lab that could not start, or that lost one of its nodes."""


# The lab sets this environment variable for its ranks. A rank that ends with a TowpathError then prints one line
# instead of a traceback, because many ranks print at the same time.
ERRORS = "TOWPATH_ERRORS"


def _in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, TowpathError):
        sys.__excepthook__(kind, error, trace)
        return
    ours = str(Path(__file__).parent)
    theirs = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith((ours, "<"))]
    where = f"{Path(theirs[-1].filename).name}, line {theirs[-1].lineno}: " if theirs else ""
    sys.stderr.write(f"towpath: rank {os.environ.get('RANK', '?')}: {where}{' '.join(str(error).split())}\n")
    # If other ranks have ended already, gloo's threads would abort this process during a normal exit, with several
    # lines of output.
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if ERRORS in os.environ:
    sys.excepthook = _in_one_line
