"""Rows of numbers about a training run, and where they are written: a file of JSON lines, TensorBoard, W&B.

In JSON lines a number that is not finite is the string "NaN", "Infinity" or "-Infinity": JSON has no such numbers, and
`float()` reads these. A value that is not known is left out.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO, final

from towpath.errors import ConfigError

Values = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One optimizer step. Tokens and bytes: of all ranks together, in this step; seconds and memory: of one rank."""

    step: int  # counted from 1
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    seconds: float
    inter_bytes: int  # sent between nodes
    intra_bytes: int
    exposed_seconds: float  # in which the rank did nothing but wait for transfers
    memory_bytes: int
    skipped: bool = False  # its gradient was not finite, and the weights stayed
    mfu: float | None = None  # model-FLOPs utilisation: the share of what all ranks could compute

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else math.nan

    @property
    def exposed_share(self) -> float:
        return self.exposed_seconds / self.seconds if self.seconds > 0 else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """The loss on the held-out part, after this many steps."""

    step: int
    loss: float
    seconds: float


Row = StepRow | EvaluationRow


def kind_of(row: Row) -> str:
    return "train" if isinstance(row, StepRow) else "validation"


def values_of(row: Row) -> Values:
    """Its numbers by name, but for the step."""
    found = {f.name: getattr(row, f.name) for f in fields(row) if f.name != "step"}
    if isinstance(row, StepRow):
        found["tokens_per_second"] = row.tokens_per_second
    return {n: int(v) if isinstance(v, bool) else v for n, v in found.items() if v is not None}


class Writer(Protocol):
    def write(self, row: Row) -> None: ...

    def close(self) -> None:
        """All that was written is where it belongs; no thread or process of the writer is left."""


@final
class JsonLines:
    """One object a row, handed to the system at once; what the file held before stays."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _end_broken_line(path)
            self._file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"log: cannot write {path}: {error.strerror}.") from None

    def start(self, step: int, cluster: dict[str, int], config: dict[str, Any]) -> None:
        """A row that tells the runs of a file apart: what follows is of one that begins after `step`."""
        try:
            self._put({"kind": "start", "step": step, "time": time.time(), **cluster, "config": _plain(config)})
        except OSError as error:
            with suppress(OSError):  # what it could not write before
                self._file.close()
            raise ConfigError(f"log: cannot write {self._file.name}: {error.strerror}.") from None

    def write(self, row: Row) -> None:
        found: dict[str, Any] = {"kind": kind_of(row), "step": row.step, **values_of(row)}
        self._put({name: _plain(value) for name, value in found.items()})

    def _put(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _end_broken_line(path: Path) -> None:
    """Of a run that was killed while it wrote: the next row must not be glued to half a one."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        found: dict[str, Any] = value
        return {name: _plain(each) for name, each in found.items()}
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


@final
class TensorBoard:
    """Event files in `folder`: `tensorboard --logdir folder` shows them."""

    def __init__(self, folder: Path) -> None:
        _import("tensorboard", "log.tensorboard")
        # Not before it is asked for: it takes seconds.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def write(self, row: Row) -> None:
        for name, value in values_of(row).items():
            self._writer.add_scalar(f"{kind_of(row)}/{name}", value, row.step)

    def close(self) -> None:
        self._writer.close()


@final
class WeightsAndBiases:
    """A run of `project`, named as its folder. Offline it is a folder below that, for `wandb grad_sync`."""

    def __init__(self, project: str, folder: Path, config: dict[str, Any], offline: bool) -> None:
        # Reports about itself, which it would send offline too, from a thread that stays.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb = _import("wandb", "log.wandb")
        if not offline and not self._wandb.api.api_key:  # it would ask at the terminal, and the other ranks wait
            raise ConfigError("log.wandb: nobody is logged in. Run `wandb login`, or set log.wandb_offline = true.")
        folder.mkdir(parents=True, exist_ok=True)
        # Its own capture of the terminal and the live line would draw over each other.
        settings = self._wandb.Settings(console="off", silent=True, disable_git=True)
        self._run = self._wandb.init(
            project=project,
            name=folder.resolve().name,
            dir=str(folder),
            config=config,
            mode="offline" if offline else "online",
            settings=settings,
        )
        # Rows of both kinds come in their own order: by the step they name, not by wandb's count of calls.
        for kind in ("train", "validation"):
            self._run.define_metric(f"{kind}/*", step_metric="step")

    def write(self, row: Row) -> None:
        found = {f"{kind_of(row)}/{name}": value for name, value in values_of(row).items()}
        self._run.log({"step": row.step, **found})

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # ends its service process


def _import(package: str, asked_by: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise ConfigError(f"{asked_by}: the package {package} is not installed: pip install 'towpath[log]'.") from None
