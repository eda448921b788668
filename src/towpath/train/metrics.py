"""Rows of metrics of a training run, and where they are written: JSON lines, TensorBoard, Weights & Biases.

JSON has no numbers that are not finite. In JSON lines such a number is the text "NaN", "Infinity" or "-Infinity", which
`float()` reads. A value that is not known is left out.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO, final

from towpath.core.exact import METRICS
from towpath.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """The metrics of one optimizer step. Tokens and bytes are those of all ranks, seconds and memory those of one."""

    step: int  # counted from 1
    loss: float
    learning_rate: float
    gradient_norm: float  # the global norm before clipping
    tokens: int
    seconds: float
    inter_bytes: int  # sent between nodes
    intra_bytes: int  # sent inside nodes
    exposed_seconds: float  # the time in which the rank only waited for transfers
    memory_bytes: int
    skipped: bool = False  # whether the gradient was not finite, so that the weights did not change
    loss_of_islands: float | None = None  # with outer steps: of all islands, in the step before. `loss` is of island 0
    mfu: float | None = None  # model-FLOPs utilization: the share of what all ranks could compute
    # The bytes of exact messages as a share of their values, by exact codec and dtype.
    exact_shares: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all ranks in a second."""
        return self.tokens / self.seconds if self.seconds > 0 else math.nan

    @property
    def exposed_share(self) -> float:
        """The share of the step in which the rank only waited for transfers."""
        return self.exposed_seconds / self.seconds if self.seconds > 0 else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """The loss on the held-out part after a number of steps."""

    step: int
    loss: float
    seconds: float


Row = StepRow | EvaluationRow


def _kind_of(row: Row) -> str:
    return "train" if isinstance(row, StepRow) else "validation"


def _values_of(row: Row) -> dict[str, float]:
    found = {f.name: getattr(row, f.name) for f in fields(row) if f.name not in ("step", "exact_shares")}
    if isinstance(row, StepRow):
        found["tokens_per_second"] = row.tokens_per_second
        found |= {name: row.exact_shares[key] for name, key in METRICS.items() if key in row.exact_shares}
    return {n: int(v) if isinstance(v, bool) else v for n, v in found.items() if v is not None}


@final
class JsonLines:
    """A file with one JSON object a row. Each row is flushed at once, and earlier contents of the file stay."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A run that was killed may have left half a line. The next row must not be appended to it.
            if path.exists() and path.stat().st_size:
                with path.open("r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
            self._file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"log: cannot write {path}: {error.strerror}.") from None

    def start(self, step: int, cluster: dict[str, int], config: dict[str, Any]) -> None:
        """Write a row that separates the runs of a file: the rows that follow are of a run that begins after `step`."""
        try:
            self._put({"kind": "start", "step": step, "time": time.time(), **cluster, "config": _as_json(config)})
        except OSError as error:
            with suppress(OSError):  # the row that could not be written is written again
                self._file.close()
            raise ConfigError(f"log: cannot write {self._file.name}: {error.strerror}.") from None

    def write(self, row: Row) -> None:
        """Write one row."""
        self._put({"kind": _kind_of(row), "step": row.step, **_as_json(_values_of(row))})

    def _put(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        found: dict[str, Any] = value
        return {name: _as_json(each) for name, each in found.items()}
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


@final
class TensorBoard:
    """Event files in `folder`, which `tensorboard --logdir folder` shows."""

    def __init__(self, folder: Path) -> None:
        _import("tensorboard", "log.tensorboard")
        # Imported only if it is used, because it takes seconds.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def write(self, row: Row) -> None:
        """Write one row."""
        for name, value in _values_of(row).items():
            self._writer.add_scalar(f"{_kind_of(row)}/{name}", value, row.step)

    def close(self) -> None:
        """Write everything, and end the writer's thread."""
        self._writer.close()


@final
class WeightsAndBiases:
    """A run of a project, named as its folder. Offline, the run is a folder below that, for `wandb sync`."""

    def __init__(self, project: str, folder: Path, config: dict[str, Any], offline: bool) -> None:
        # wandb would send its error reports in offline mode too, from a thread that does not end.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb = _import("wandb", "log.wandb")
        if not offline and not self._wandb.api.api_key:  # wandb would prompt for it while the other ranks wait
            raise ConfigError("log.wandb: nobody is logged in. Run `wandb login`, or set log.wandb_offline = true.")
        folder.mkdir(parents=True, exist_ok=True)
        # Its capture of the terminal would conflict with the live line.
        settings = self._wandb.Settings(console="off", silent=True, disable_git=True)
        self._run = self._wandb.init(
            project=project,
            name=folder.resolve().name,
            dir=str(folder),
            config=config,
            mode="offline" if offline else "online",
            settings=settings,
        )
        # Both kinds of rows use the step that they name as their x axis, not the number of wandb's calls.
        for kind in ("train", "validation"):
            self._run.define_metric(f"{kind}/*", step_metric="step")

    def write(self, row: Row) -> None:
        """Write one row."""
        self._run.log({"step": row.step} | {f"{_kind_of(row)}/{name}": v for name, v in _values_of(row).items()})

    def close(self) -> None:
        """End the run and wandb's service process."""
        self._run.finish()
        self._wandb.teardown()


Writer = JsonLines | TensorBoard | WeightsAndBiases


def _import(package: str, key: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise ConfigError(f"{key}: the package {package} is not installed: pip install 'towpath[log]'.") from None
