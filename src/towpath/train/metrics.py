"""The reports of a run: a row of metrics after each step, the progress line, traces, and a summary at its end.

A value that is not known, or not finite, is left out of a row.
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
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from towpath.core.formats import METRICS
from towpath.core.strategy import BETWEEN_HOSTS, TransferKind
from towpath.engine.executor import engine_of
from towpath.errors import ConfigError
from towpath.observe.stats import Stats, stats, time_transfers, totals, trace, traced
from towpath.observe.totals import Totals
from towpath.observe.trace import write_intervals
from towpath.progress import format_bytes
from towpath.train.config import DTYPES, Config

if TYPE_CHECKING:
    from towpath.train.trainer import StepResult, TrainingRun

# Dense FLOP/s in half precision, as the data sheets state them. The first name that is a word of the device's counts.
_GPUS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
}
_SECONDS_BETWEEN_LINES = 2.0


# Where rows are written -----------------------------------------------------------------------------------------------


class JsonLines:
    """A file with one JSON object a row. Earlier contents of the file stay."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)  # a row is in the file as soon as it is written
            if self._file.tell():
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":  # a run that was killed has left half a row
                    self._file.write(b"\n")
        except OSError as error:
            raise ConfigError(f"log: cannot write {path}: {error.strerror}.") from None
        self.close = self._file.close

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one row."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}).encode() + b"\n")


class TensorBoard:
    """Event files in `folder`, which `tensorboard --logdir folder` shows."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

        self._writer = SummaryWriter(str(folder))
        self.close = self._writer.close

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one row."""
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)


class WeightsAndBiases:
    """A run of a project, named as its folder. Without WANDB_MODE=online it is a folder, for `wandb sync`."""

    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        # wandb would send its error reports in offline mode too, from a thread that does not end.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        mode = os.environ.setdefault("WANDB_MODE", "offline")
        self._wandb: Any = import_module("wandb")
        if mode == "online" and not self._wandb.api.api_key:  # wandb would prompt for it while the other ranks wait
            raise ConfigError("log.wandb: nobody is logged in. Run `wandb login`, or leave out WANDB_MODE=online.")
        settings, name = self._wandb.Settings(console="off", silent=True), folder.resolve().name
        self._run = self._wandb.init(project=project, name=name, dir=folder, config=config, settings=settings)
        # Both kinds of rows use the step that they name as their x axis, not the number of wandb's calls.
        for kind in ("train", "validation"):
            self._run.define_metric(f"{kind}/*", step_metric="step")

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one row."""
        self._run.log({"step": step} | {f"{kind}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        """End the run and wandb's service process."""
        self._run.finish()
        self._wandb.teardown()


Writer = JsonLines | TensorBoard | WeightsAndBiases


def open_writers(config: Config, topology: Any, first_step: int) -> list[Writer]:
    """Return the writers of a run that begins after `first_step`, and write config.toml."""
    log, folder, about = config.log, Path(config.log.folder), asdict(config)
    lines = JsonLines(folder / "metrics.jsonl")
    writers: list[Writer] = [lines]
    try:
        cluster = {name: value for name, value in asdict(topology).items() if value is not None}
        lines.write("start", first_step, {"time": time.time(), **cluster, "config": about})
        (folder / "config.toml").write_text(str(config), encoding="utf-8")
        if log.tensorboard:
            writers.append(TensorBoard(folder / "tensorboard"))
        if log.wandb:
            writers.append(WeightsAndBiases(log.wandb, folder, about))
    except (OSError, ImportError) as error:
        lines.close()
        remedy = "Name another log.folder" if isinstance(error, OSError) else "Run pip install 'towpath[log]'"
        raise ConfigError(f"log: cannot write to {folder}: {error}. {remedy}.") from None
    return writers


# What a run reports ---------------------------------------------------------------------------------------------------


class MetricsLogger:
    """Reports the steps of a run. Use it as a context around the steps. Rank 0 writes, and every rank must call it."""

    def __init__(self, trainer: TrainingRun) -> None:
        config, job, parallel = trainer.config, trainer.job, trainer.config.parallel
        self._config, self._job, self._model, self._timers = config, job, trainer.model, trainer.timers
        self._settle = trainer.settle
        self._first_step = self._step = trainer.state.step
        # The engine counts one of the groups of ranks that share layers. A pipeline counts all of them.
        self._groups = 1 if parallel.pipeline > 1 else parallel.tensor
        # A stage's strategy describes only the copies of the stage. Otherwise the strategy describes the whole job.
        self._topology = config.strategy.topology(job.topology) if parallel.ranks == 1 else job.topology
        self._tokens = config.train.batch * config.train.length
        flops = peak_flops(job.device, getattr(torch, DTYPES[config.train.precision]))
        step_flops = trainer.bundle.flops_per_token(config.train.length) * self._tokens
        self._mfu_at_one_second = None if flops is None else step_flops / (flops * job.world)
        with job.together():
            self._writers = open_writers(config, self._topology, self._first_step) if job.rank == 0 else []
        # Steps whose progress is printed. On a GPU, transfers are timed in these steps only.
        self._shown: set[int] = set()
        self._shown_last = -math.inf  # when the last of them began
        self._totals = self._totals_now()
        self._exposed = 0.0  # the exposed seconds of steps that are written
        time_transfers(self._model, False)
        self._sent: deque[tuple[StepResult, Totals]] = deque()  # what was sent in steps that are not written yet
        self._began, self._seconds = time.perf_counter(), 0.0  # of the whole context

    def _totals_now(self) -> Totals:
        return totals(self._model).of_groups(self._groups)

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._seconds = time.perf_counter() - self._began
        time_transfers(self._model, None)
        if error is None:
            self._settle()
        self._write_settled()
        self._on_each_writer(lambda writer: writer.close())

    def log_step(self, result: StepResult) -> None:
        """Report a step, once it is settled. Call it after each step."""
        before, self._totals = self._totals, self._totals_now()
        self._sent.append((result, self._totals.since(before)))
        self._write_settled()

    def _write_settled(self) -> None:
        while self._sent and self._sent[0][0].settled:
            self._write_step(*self._sent.popleft())

    def _write_step(self, result: StepResult, sent: Totals) -> None:
        self._step, is_shown, exposed = result.step, result.step in self._shown, sent.seconds_exposed
        if self._job.device.type == "cuda":
            # The device has passed the events of this step now, and had not when its work was enqueued.
            before, self._exposed = self._exposed, self._totals.seconds_exposed
            exposed = self._exposed - before if is_shown else None
        row = {
            "loss": result.loss,
            "gradient_norm": result.gradient_norm,
            "learning_rate": result.learning_rate,
            "seconds": result.seconds,
            "loss_of_islands": result.loss_of_islands,
            **self._of_islands(),
            "tokens": self._tokens,
            "tokens_per_second": self._tokens / result.seconds,
            "inter_bytes": sent.inter_bytes,  # sent between nodes, by all ranks
            "intra_bytes": sent.intra_bytes,  # sent inside nodes, by all ranks
            "exposed_seconds": exposed,  # the time in which the rank only waited for transfers
            "memory_bytes": peak_memory(self._job.device),
            "mfu": None if self._mfu_at_one_second is None else self._mfu_at_one_second / result.seconds,
            **{name: sent.encoded_shares[key] for name, key in METRICS.items() if key in sent.encoded_shares},
        }
        self._write("train", row)
        steps, now = self._config.train.steps, time.perf_counter()
        if is_shown:
            left = (steps - result.step) * (now - self._began) / (result.step - self._first_step)
            self._job.print_once(progress_line(result.step, steps, row, left))

    def _of_islands(self) -> dict[str, int]:
        """Return how many islands there are, if they come and go, and how many exchanges were dropped so far."""
        outer = None if self._config.parallel.pipeline > 1 else engine_of(self._model).outer
        if outer is None or not outer.plan.settings.meet:
            return {}
        return {"islands": outer.present, "exchanges_dropped": outer.dropped}

    def log_evaluation(self, loss: float | None, seconds: float) -> None:
        """Report an evaluation after the last step. Without held-out data the loss is None."""
        self._write_settled()
        self._totals = self._totals_now()  # what it sent is no part of the next step
        if loss is not None:
            self._write("validation", {"loss": loss, "seconds": seconds})
            self._job.print_once(f"step {self._step}: held-out loss {loss:.4f}")

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        self._on_each_writer(lambda writer: writer.write(kind, self._step, known))

    def _on_each_writer(self, call: Callable[[Writer], None]) -> None:
        for writer in list(self._writers):
            try:
                call(writer)
            except Exception as error:  # a full disk, or an error of a library, is no reason to end the training
                self._writers.remove(writer)
                name = type(writer).__name__
                self._job.print_once(f"step {self._step}: {name} cannot write: {error}. Rows are lost.")

    @contextmanager
    def traced(self, step: int) -> Generator[None]:
        """Time or trace a step, if it is printed or one of `log.trace`. Use it as a context around the step."""
        now = time.perf_counter()
        if now - self._shown_last >= _SECONDS_BETWEEN_LINES or step == self._config.train.steps:
            self._shown_last = now
            self._shown.add(step)
            time_transfers(self._model, True)
        try:
            with self._traced(step):
                yield
        finally:
            time_transfers(self._model, False)

    @contextmanager
    def _traced(self, step: int) -> Generator[None]:
        if step not in self._config.log.trace:
            yield
            return
        # Without stages, all ranks of the job begin together, and not only those that share a copy of the model.
        pipelined = self._config.parallel.pipeline > 1
        with trace(self._model) if pipelined else traced([engine_of(self._model).comm], [self._job.groups]) as recorded:
            yield
        found = dict(enumerate(self._job.groups.collect_objects(recorded.intervals)))
        if self._job.rank:
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
        steps, done = self._step - self._first_step, stats(self._model).of_groups(self._groups)
        if self._job.rank == 0 and steps:
            if self._job.device.type == "cuda":
                print(
                    "Times are those of the thread that launches the GPU's work. log.trace shows the GPU's. Transfers "
                    f"were timed in {len(self._shown)} of {steps} steps."
                )
            # The seconds of transfers on a GPU are not this thread's.
            on_host = BETWEEN_HOSTS if self._job.device.type == "cuda" else TransferKind
            waits = {kind: seconds for kind, seconds in done.exposed_by_kind.items() if kind in on_host}
            seconds = seconds_by_activity(waits, done.seconds_host, self._timers, self._seconds)
            print(summary(done, seconds, steps), flush=True)


def progress_line(step: int, steps: int, row: Mapping[str, Any], seconds_left: float) -> str:
    """Return the line of a step, of at most a hundred columns up to a hundred thousand steps."""
    minutes, seconds = divmod(round(seconds_left), 60)
    parts = [
        f"{step:>{len(str(steps))}}/{steps}",
        f"loss {row['loss']:#.5g}",
        f"{row['tokens_per_second']:,.0f} tok/s",
        "" if row["mfu"] is None else f"MFU {row['mfu']:.0%}",
        f"inter {format_bytes(row['inter_bytes'])}",
        "" if row["exposed_seconds"] is None else f"exposed {row['exposed_seconds'] / row['seconds']:.0%}",
        f"mem {format_bytes(row['memory_bytes'])}",
        f"ETA {minutes // 60}h{minutes % 60:02}" if minutes >= 60 else f"ETA {minutes}:{seconds:02}",
    ]
    return "  ".join(part for part in parts if part)


def peak_memory(device: torch.device) -> int:
    """Return the most that this rank has used: on a GPU what PyTorch had allocated, on a CPU the resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of a GPU, or of the one with this name, as its data sheet states it, or None if not known."""
    if isinstance(device, torch.device):
        device = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    half = next((flops for name, flops in _GPUS.items() if re.search(rf"\b{name}\b", device)), None)
    if half is None or dtype in (torch.bfloat16, torch.float16):
        return half
    return half / 2 if dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32 else None


# The summary ----------------------------------------------------------------------------------------------------------


def seconds_by_activity(
    waits: Mapping[TransferKind, float], engine_seconds: float, timers: Mapping[str, float], total_seconds: float
) -> dict[str, float]:
    """Return the seconds of the training thread by what they were spent on. Their sum is `total_seconds`.

    On a GPU, the thread launches work and waits only where it reads a value. So these are not the GPU's seconds.
    """
    found = {
        "compute": max(0.0, timers.get("passes", 0.0) - sum(waits.values()) - engine_seconds),
        **{f"waiting for {kind.value}": seconds for kind, seconds in waits.items()},
        "the engine's own work": engine_seconds,
        "the optimizer": timers.get("optimizer", 0.0),
        "agreeing on the loss": timers.get("agreement", 0.0),
        "the data": timers.get("data", 0.0),
    }
    found["the rest"] = max(0.0, total_seconds - sum(found.values()))
    return found


def summary(done: Stats, seconds: Mapping[str, float], steps: int) -> str:
    """Return where the time of rank 0 went, and what all ranks sent, as text of 100 columns.

    The sums of tensor-parallel layers, which DTensor sends, are not part of `done`.
    """
    total = sum(seconds.values())
    lines = [f"Where the time went ({steps} steps, {total:.1f} s)"]
    for name, spent in seconds.items():
        if spent >= total / 1000:
            lines.append(f"  {name:<34}{spent:>10.2f} s{spent / steps * 1e3:>12.1f} ms a step{spent / total:>8.1%}")
    return "\n".join([*lines, "", "What was sent, by all ranks together", str(done)])
