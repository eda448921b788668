"""What a run reports: a row of metrics after each step, the progress line, traces, and a summary at its end.

JSON has no numbers that are not finite. In JSON lines such a number is the text "NaN", "Infinity" or "-Infinity", which
`float()` reads. A value that is not known is left out.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from towpath.core.exact import METRICS
from towpath.engine.executor import engine_of
from towpath.errors import ConfigError
from towpath.observing import Stats, Sums, Trace, stats, sums, traced
from towpath.progress import size
from towpath.tracing import trace, write_intervals
from towpath.train.config import DTYPES, Config

if TYPE_CHECKING:
    from towpath.train.trainer import StepResult, Trainer

# FLOP/s of dense matrix products as the data sheets state them: in half precision, and in TF32. The first name that is
# a word of the device's name counts.
_GPUS: tuple[tuple[str, float, float], ...] = (
    ("H100 PCIe", 756e12, 378e12),
    ("H100 NVL", 835e12, 417e12),
    ("H100", 989e12, 494e12),
    ("H200", 989e12, 494e12),
    ("GH200", 989e12, 494e12),
    ("B200", 2250e12, 1125e12),
    ("A100", 312e12, 156e12),
    ("A40", 149.7e12, 74.8e12),
    ("A10G", 70e12, 35e12),
    ("A10", 125e12, 62.5e12),
    ("L40S", 362e12, 183e12),
    ("L4", 121e12, 60e12),
)
_SECONDS_BETWEEN_LINES = 2.0
_RECENT = 20  # the steps from which the remaining time is estimated


# Where rows are written -----------------------------------------------------------------------------------------------


class JsonLines:
    """A file with one JSON object a row. Each row is flushed at once, and earlier contents of the file stay."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            # A run that was killed may have left half a line. The next row must not be appended to it.
            if self._file.tell() and not _ends_a_line(path):
                self._file.write("\n")
        except OSError as error:
            raise ConfigError(f"log: cannot write {path}: {error.strerror}.") from None

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one row."""
        self._file.write(json.dumps({"kind": kind, "step": step, **_as_json(values)}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        found: Mapping[str, Any] = value
        return {name: _as_json(each) for name, each in found.items() if each is not None}
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class TensorBoard:
    """Event files in `folder`, which `tensorboard --logdir folder` shows."""

    def __init__(self, folder: Path) -> None:
        _import("tensorboard", "log.tensorboard")
        # Imported only if it is used, because it takes seconds.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one row."""
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Write everything, and end the writer's thread."""
        self._writer.close()


class WeightsAndBiases:
    """A run of a project, named as its folder. Without WANDB_MODE=online it is a folder, for `wandb sync`."""

    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        # wandb would send its error reports in offline mode too, from a thread that does not end.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        mode: Any = os.environ.setdefault("WANDB_MODE", "offline")
        self._wandb = _import("wandb", "log.wandb")
        if mode == "online" and not self._wandb.api.api_key:  # wandb would prompt for it while the other ranks wait
            raise ConfigError("log.wandb: nobody is logged in. Run `wandb login`, or leave out WANDB_MODE=online.")
        folder.mkdir(parents=True, exist_ok=True)
        settings = self._wandb.Settings(console="off", silent=True, disable_git=True)
        name = folder.resolve().name
        self._run = self._wandb.init(
            project=project, name=name, dir=str(folder), config=config, mode=mode, settings=settings
        )
        # Both kinds of rows use the step that they name as their x axis, not the number of wandb's calls.
        for kind in ("train", "validation"):
            self._run.define_metric(f"{kind}/*", step_metric="step")

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one row."""
        self._run.log({"step": step} | {f"{kind}/{name}": v for name, v in values.items() if v is not None})

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


def open_writers(config: Config, topology: Any, first_step: int) -> list[Writer]:
    """Return the writers of a run that begins after `first_step`, and write config.toml.

    Raises:
        ConfigError: A file cannot be written, or a package is missing.
    """
    log, folder, about = config.log, Path(config.log.folder), asdict(config)
    lines = JsonLines(folder / "metrics.jsonl")
    cluster = {name: value for name, value in asdict(topology).items() if value is not None}
    try:
        lines.write("start", first_step, {"time": time.time(), **cluster, "config": about})
        (folder / "config.toml").write_text(str(config), encoding="utf-8")
    except OSError as error:
        with suppress(OSError):  # the row that could not be written is written again
            lines.close()
        raise ConfigError(f"log: cannot write to {folder}: {error.strerror}.") from None
    writers: list[Writer] = [lines]
    if log.tensorboard:
        writers.append(TensorBoard(folder / "tensorboard"))
    if log.wandb:
        writers.append(WeightsAndBiases(log.wandb, folder, about))
    return writers


# What a run reports ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StepTimers:
    """Seconds of the training thread by what it did. What `towpath.stats` counts is part of `passes`.

    On a GPU, the thread launches work and does not wait for it, except where it reads a value. So these are not the
    seconds for which the GPU computed.
    """

    data: float = 0.0  # reading batches
    passes: float = 0.0  # forward and backward, with the transfers that they wait for
    optimizer: float = 0.0  # unscaling, clipping and the optimizer
    agreement: float = 0.0  # the mean of the loss over all ranks
    evaluation: float = 0.0


class MetricsLogger:
    """Reports the steps of a run. Use it as a context around the steps. Rank 0 writes, and every rank must call it."""

    def __init__(self, trainer: Trainer) -> None:
        config, job, parallel = trainer.config, trainer.job, trainer.config.parallel
        self._config, self._job, self._model, self._timers = config, job, trainer.model, trainer.timers
        self._first_step = self._step = trainer.state.step
        # The engine counts one of the groups of ranks that share layers. A pipeline counts all of them.
        self._groups = 1 if parallel.pipeline > 1 else parallel.tensor
        # A stage's strategy describes only the copies of the stage. Otherwise the strategy describes the whole job.
        self._topology = config.strategy.topology(job.topology) if parallel.ranks == 1 else job.topology
        self._tokens = config.train.batch * config.train.length
        flops = stated_flops(job.device, getattr(torch, DTYPES[config.train.precision]))
        step_flops = trainer.bundle.flops_per_token(config.train.length) * self._tokens
        self._mfu_at_one_second = None if flops is None else step_flops / (flops * job.world)
        with job.fail_together():
            self._writers = open_writers(config, self._topology, self._first_step) if job.rank == 0 else []
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._printed = -math.inf  # when the progress was printed last
        self._stats_before, self._sums = self._stats(), self._current_sums()
        self._outside_steps = Sums()  # the transfers of evaluations
        self._began, self._seconds = time.perf_counter(), 0.0  # of the whole context

    def _stats(self) -> Stats:
        return stats(self._model).of_groups(self._groups)

    def _current_sums(self) -> Sums:
        return sums(self._model).of_groups(self._groups)

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._seconds = time.perf_counter() - self._began
        for writer in self._writers:
            try:
                writer.close()
            except Exception as failure:  # as in _write: the last state must still be saved
                self._job.print_once(f"{type(writer).__name__} could not write its last rows: {failure}")

    def log_step(self, result: StepResult) -> None:
        """Report a step that has ended."""
        self._step = result.step
        before, self._sums = self._sums, self._current_sums()
        sent = self._sums.since(before)
        row = asdict(result) | {
            "tokens": self._tokens,
            "tokens_per_second": self._tokens / result.seconds,
            "inter_bytes": sent.inter_bytes,  # sent between nodes, by all ranks
            "intra_bytes": sent.intra_bytes,  # sent inside nodes, by all ranks
            "exposed_seconds": sent.seconds_exposed,  # the time in which the rank only waited for transfers
            "memory_bytes": memory_bytes(self._job.device),
            "mfu": None if self._mfu_at_one_second is None else self._mfu_at_one_second / result.seconds,
            **{name: sent.exact_shares[key] for name, key in METRICS.items() if key in sent.exact_shares},
        }
        del row["step"]
        self._write("train", row)
        self._recent.append(result.seconds)
        steps, now = self._config.train.steps, time.monotonic()
        if now - self._printed >= _SECONDS_BETWEEN_LINES or result.step == steps:
            self._printed = now
            left = (steps - result.step) * sum(self._recent) / len(self._recent)
            self._job.print_once(progress_line(result.step, steps, row, left))

    def log_evaluation(self, loss: float | None, seconds: float) -> None:
        """Report an evaluation after the last step. Without held-out data the loss is None."""
        before, self._sums = self._sums, self._current_sums()
        self._outside_steps = self._outside_steps.plus(self._sums.since(before))
        if loss is not None:
            self._write("validation", {"loss": loss, "seconds": seconds})
            self._job.print_once(f"step {self._step}: held-out loss {loss:.4f}")

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        for writer in list(self._writers):
            try:
                writer.write(kind, self._step, values)
            except Exception as error:  # a full disk, or an error of a library, is no reason to end the training
                self._writers.remove(writer)
                name = type(writer).__name__
                self._job.print_once(f"step {self._step}: {name} cannot write: {error}. Its next rows are lost too.")

    @contextmanager
    def traced(self, step: int) -> Generator[None]:
        """Trace a step, if it is one of those that `log.trace` names. Use it as a context around the step."""
        if step not in self._config.log.trace:
            yield
            return
        recording: AbstractContextManager[Trace]
        if self._config.parallel.pipeline > 1:
            recording = trace(self._model)
        else:  # all ranks of the job begin together, and not only those that share a copy of the model
            recording = traced([engine_of(self._model)], [self._job.groups])
        with recording as recorded:
            yield
        found = dict(enumerate(self._job.groups.collect_objects(recorded.intervals)))
        if not found:
            return
        path = Path(self._config.log.folder, f"trace-step-{step:06}.json")
        text = f"step {step}: trace in {path}; open it at https://ui.perfetto.dev"
        try:
            write_intervals(path, found, {rank: f"rank {rank} (node {self._topology.node_of(rank)})" for rank in found})
        except OSError as error:  # no reason to end the training, in which other ranks would wait
            text = f"step {step}: the trace cannot be written: {error}"
        self._job.print_once(text)

    def print_summary(self) -> None:
        """Print the summary of the run on stdout. Call it after the last state is saved: nothing may read stdout."""
        steps, done = self._step - self._first_step, self._stats().since(self._stats_before)
        if self._job.rank == 0 and steps:
            spent = times(done, self._timers, self._seconds, self._outside_steps)
            if self._job.device.type == "cuda":
                print("Times are those of the thread that launches the GPU's work. log.trace shows the GPU's.")
            print(summary(done, spent, steps), flush=True)


def progress_line(step: int, steps: int, row: Mapping[str, Any], seconds_left: float) -> str:
    """Return the line of a step, of at most a hundred columns up to a hundred thousand steps."""
    minutes, seconds = divmod(round(seconds_left), 60)
    parts = [
        f"{step:>{len(str(steps))}}/{steps}",
        f"loss {row['loss']:#.5g}",
        f"{row['tokens_per_second']:,.0f} tok/s",
        "" if row["mfu"] is None else f"MFU {row['mfu']:.0%}",
        f"inter {size(row['inter_bytes'])}",
        f"exposed {row['exposed_seconds'] / row['seconds']:.0%}",
        f"mem {size(row['memory_bytes'])}",
        f"ETA {minutes // 60}h{minutes % 60:02}" if minutes >= 60 else f"ETA {minutes}:{seconds:02}",
    ]
    return "  ".join(part for part in parts if part)


# The device -----------------------------------------------------------------------------------------------------------


def memory_bytes(device: torch.device) -> int:
    """Return the memory of this rank: on a GPU the most that PyTorch had allocated, on a CPU the resident memory.

    On Linux the resident memory is without mapped files. Elsewhere it is the peak, with mapped files.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    found = re.search(r"^RssAnon:\s+(\d+)", status.read_text(), re.MULTILINE) if status.exists() else None
    if found is not None:
        return int(found[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def stated_flops(device: torch.device | str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of a GPU, or of the one with this name, as its data sheet states it, or None if not known."""
    if isinstance(device, torch.device):
        device = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for name, half, tf32 in _GPUS:
        if re.search(rf"\b{name}\b", device):
            if dtype in (torch.bfloat16, torch.float16):
                return half
            return tf32 if dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32 else None
    return None


# The summary ----------------------------------------------------------------------------------------------------------


def times(done: Stats, timers: StepTimers, total_seconds: float, outside_steps: Sums) -> dict[str, float]:
    """Return the seconds of a run by what they were spent on. Their sum is `total_seconds`.

    Args:
        done: The stats of the whole run.
        timers: The timers of the training thread.
        total_seconds: The duration of the run.
        outside_steps: What the engine counted outside of `timers.passes`, in evaluations.
    """
    exposed: dict[str, float] = {}
    for kind in dict.fromkeys(t.transfer.kind for t in done.transfers):
        seconds = sum(t.seconds_exposed for t in done.transfers if t.transfer.kind is kind)
        exposed[kind.value] = max(0.0, seconds - outside_steps.exposed_seconds.get(kind, 0.0))
    host = max(0.0, done.seconds_host - outside_steps.host_seconds)
    found = {"compute": max(0.0, timers.passes - sum(exposed.values()) - host)}
    found |= {f"waiting for {kind}": seconds for kind, seconds in exposed.items()}
    found |= {"the engine's own work": host, "the optimizer": timers.optimizer}
    found |= {"agreeing on the loss": timers.agreement, "the data": timers.data, "evaluation": timers.evaluation}
    found["the rest"] = max(0.0, total_seconds - sum(found.values()))
    return found


def summary(done: Stats, seconds: Mapping[str, float], steps: int) -> str:
    """Return where the time of rank 0 went, and what all ranks sent, as text of 100 columns.

    Args:
        done: The stats of the whole run. Sums of tensor-parallel layers, which DTensor sends, are not among them.
        seconds: What `times` returns.
        steps: The steps of the run.
    """
    total = sum(seconds.values())
    lines = [f"Where the time went ({steps} steps, {total:.1f} s)"]
    for name, spent in seconds.items():
        if spent >= total / 1000:
            lines.append(f"  {name:<34}{spent:>10.2f} s{spent / steps * 1e3:>12.1f} ms a step{spent / total:>8.1%}")
    return "\n".join([*lines, "", "What was sent, by all ranks together", str(done)])
