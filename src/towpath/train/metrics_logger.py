"""Reports of a run: a row of metrics after each step, the live line, traces, and a summary at its end."""

from __future__ import annotations

import io
import os
import re
import resource
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from towpath.engine.executor import engine_of
from towpath.errors import ConfigError
from towpath.observing import Stats, Sums, Trace, TransferStats, stats, sums, traced
from towpath.topology.cluster import Topology
from towpath.tracing import trace, write_intervals
from towpath.train.config import DTYPES, Config, LogConfig, ParallelConfig
from towpath.train.job import Job
from towpath.train.metrics import EvaluationRow, JsonLines, Row, StepRow, TensorBoard, WeightsAndBiases, Writer
from towpath.train.progress import StepProgress, size

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
_MEASURED_SIDE = {"cpu": 768, "cuda": 8192}
_MEASURED_SECONDS = 0.3

# The least share of all seconds that has a row in the summary, and the summary's width.
_WORTH_A_ROW, _COLUMNS = 0.0005, 100


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

    @property
    def besides_passes(self) -> float:
        """The seconds of steps in addition to their passes."""
        return self.data + self.optimizer + self.agreement


class MetricsLogger:
    """Reports the steps of a run. Use it as a context around the steps. Rank 0 writes, and every rank must call it."""

    def __init__(
        self,
        config: Config,
        parallel: ParallelConfig,  # which the planner may have chosen
        job: Job,
        model: Any,
        timers: StepTimers,
        step_flops: float,  # over all ranks
        first_step: int,  # steps that are done before
    ) -> None:
        self._log, self._job, self._model, self._parallel = config.log, job, model, parallel
        self._timers, self._step_flops, self._first_step, self._step = timers, step_flops, first_step, first_step
        # The engine counts one of the groups of ranks that share layers. A pipeline counts all of them.
        self._groups = 1 if parallel.pipeline > 1 else parallel.tensor
        # A stage's strategy describes only the copies of the stage. Otherwise the strategy describes the whole job.
        alone = parallel.pipeline * parallel.tensor == 1
        self._topology = config.strategy.topology(job.topology) if alone else job.topology
        self._tokens = config.train.batch * config.train.length
        self._leads = job.rank == 0
        dtype: torch.dtype = getattr(torch, DTYPES[config.train.precision])
        self._peak_flops = peak_flops(job.device, dtype) * job.world
        self._progress = StepProgress(config.train.steps, quiet=not self._leads)
        with job.fail_together():
            self._writers = _open_writers(config, self._topology, first_step) if self._leads else []
        self._exit = ExitStack()
        self._stats_before, self._sums = self._stats(), self._current_sums()
        self._outside_steps = Sums()  # the transfers of evaluations
        self._began = time.perf_counter()
        self._seconds = 0.0  # of the whole context

    def _stats(self) -> Stats:
        return stats(self._model).of_groups(self._groups)

    def _current_sums(self) -> Sums:
        return sums(self._model).of_groups(self._groups)

    def __enter__(self) -> MetricsLogger:
        for writer in self._writers:
            self._exit.callback(self._close, writer)
        self._exit.enter_context(self._progress)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._seconds = time.perf_counter() - self._began
        self._exit.close()

    def log_step(
        self,
        step: int,
        *,
        loss: float,
        gradient_norm: float,
        learning_rate: float,
        seconds: float,
        skipped: bool,
        loss_of_islands: float | None = None,
    ) -> None:
        """Report a step that has ended. The arguments are the fields of `StepRow`."""
        self._step = step
        before, self._sums = self._sums, self._current_sums()
        sent = self._sums.since(before)
        row = StepRow(
            step=step,
            loss=loss,
            learning_rate=learning_rate,
            gradient_norm=gradient_norm,
            tokens=self._tokens,
            seconds=seconds,
            inter_bytes=sent.inter_bytes,
            intra_bytes=sent.intra_bytes,
            exposed_seconds=sent.seconds_exposed,
            memory_bytes=memory_bytes(self._job.device),
            skipped=skipped,
            loss_of_islands=loss_of_islands,
            mfu=self._step_flops / seconds / self._peak_flops,
            exact_shares=sent.exact_shares,
        )
        self._progress.show(row)
        if step % self._log.every == 0:
            self._write(row)
        if skipped:
            self._progress.note(f"step {step} was skipped: loss {loss:g}, gradient {gradient_norm:g}")

    def log_evaluation(self, loss: float | None, seconds: float) -> None:
        """Report an evaluation after the last step. Without held-out data the loss is None."""
        before, self._sums = self._sums, self._current_sums()
        self._outside_steps = self._outside_steps.plus(self._sums.since(before))
        if loss is not None:
            self._write(EvaluationRow(step=self._step, loss=loss, seconds=seconds))
            self._progress.note(f"step {self._step}: held-out loss {loss:.4f}")

    def _write(self, row: Row) -> None:
        for writer in list(self._writers):
            try:
                writer.write(row)
            except Exception as error:  # a full disk, or an error of a library, is no reason to end the training
                self._writers.remove(writer)
                name = type(writer).__name__
                self._progress.note(f"step {row.step}: {name} cannot write: {error}. From here on its rows are lost.")

    def _close(self, writer: Writer) -> None:
        try:
            writer.close()
        except Exception as error:  # as in _write: the last state must still be saved
            self._progress.note(f"{type(writer).__name__} could not write its last rows: {error}")

    @contextmanager
    def traced(self, step: int) -> Generator[None]:
        """Trace a step, if it is one of those that `log.trace` names. Use it as a context around the step."""
        if step not in self._log.trace:
            yield
            return
        recording: AbstractContextManager[Trace]
        if self._parallel.pipeline > 1:
            recording = trace(self._model)
        else:  # all ranks of the job begin together, and not only those that share a copy of the model
            recording = traced([engine_of(self._model)], [self._job.groups])
        with recording as recorded:
            yield
        found = dict(enumerate(self._job.groups.collect_objects(recorded.intervals)))
        if not found:
            return
        path = Path(self._log.folder, f"trace-step-{step:06}.json")
        text = f"step {step}: trace in {path}; open it at https://ui.perfetto.dev"
        try:
            write_intervals(path, found, {rank: f"rank {rank} (node {self._topology.node_of(rank)})" for rank in found})
        except OSError as error:  # no reason to end the training, in which other ranks would wait
            text = f"step {step}: the trace cannot be written: {error}"
        self._progress.note(text)

    def print_summary(self) -> None:
        """Print the summary of the run on stdout. Call it after the last state is saved: nothing may read stdout."""
        steps = self._step - self._first_step
        done = self._stats().since(self._stats_before)
        if not (self._leads and steps):
            return
        seconds = times(done, self._timers, self._seconds, self._outside_steps)
        on_gpu, tensor = self._job.device.type == "cuda", self._parallel.tensor > 1
        print(summary(done, seconds, self._seconds, steps, tensor=tensor, on_gpu=on_gpu), flush=True)


def check_log(log: LogConfig) -> None:
    """Refuse a folder that cannot be written to, before data is read and the model is sharded."""
    folder = Path(log.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"log.folder: cannot make {folder}: {error.strerror}.") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"log.folder: {folder} cannot be written to. Choose another.")


def _open_writers(config: Config, topology: Topology, first_step: int) -> list[Writer]:
    log, folder = config.log, Path(config.log.folder)
    lines = JsonLines(folder / "metrics.jsonl")
    cluster = {name: value for name, value in asdict(topology).items() if value is not None}
    lines.start(first_step, cluster, asdict(config))
    writers: list[Writer] = [lines]
    try:
        (folder / "config.toml").write_text(str(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"log: cannot write {folder / 'config.toml'}: {error.strerror}.") from None
    if log.tensorboard:
        writers.append(TensorBoard(folder / "tensorboard"))
    if log.wandb:
        writers.append(WeightsAndBiases(log.wandb, folder, asdict(config), log.wandb_offline))
    return writers


# The device -----------------------------------------------------------------------------------------------------------


def memory_bytes(device: torch.device) -> int:
    """Return the memory of this rank: on a GPU the most that PyTorch had allocated, on a CPU the resident memory.

    On Linux the resident memory is without mapped files. Elsewhere it is the peak, with mapped files.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s that one rank can compute: as the data sheet states it, or else of a product of matrices here.

    Ranks that share cores measure at the same time, and so get their share.
    """
    if device.type == "cuda":
        stated = stated_flops(torch.cuda.get_device_name(device), dtype)
        if stated is not None:
            return stated

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    side = _MEASURED_SIDE.get(device.type, 768)
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    best, until = 0.0, time.perf_counter() + _MEASURED_SECONDS
    while best == 0.0 or time.perf_counter() < until:
        synchronize()
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        synchronize()
        best = max(best, 2 * side**3 / (time.perf_counter() - began))
    return best


def stated_flops(gpu: str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of a GPU with this name, or None if they are not known."""
    for name, half, tf32 in _GPUS:
        if re.search(rf"\b{name}\b", gpu):
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


def summary(
    done: Stats,
    seconds: Mapping[str, float],
    total_seconds: float,
    steps: int,
    *,
    tensor: bool = False,
    on_gpu: bool = False,
) -> str:
    """Return the summary of a run as text of 100 columns.

    Args:
        done: The stats of the whole run. Bytes are those of all ranks, and seconds those of one.
        seconds: What `times` returns.
        total_seconds: The duration of the run.
        steps: The steps of the run.
        tensor: Whether ranks share layers. Nothing counts what DTensor sends for that.
        on_gpu: Whether a GPU computes, which `seconds` do not show.
    """
    left_out = "\nwithout the sums of tensor-parallel layers, which are counted nowhere" if tensor else ""
    whose = "\nof the thread that launches the GPU's work; a trace (log.trace) shows the GPU's times" if on_gpu else ""
    text = Group(
        Text(f"Where the time went ({steps} steps, {total_seconds:.1f} s){whose}"),
        _times_table(seconds, total_seconds, steps),
        Text(f"\nWhat was sent, by all ranks together (in flight and exposed: this rank's seconds){left_out}"),
        _transfers_table(done, steps),
    )
    out = io.StringIO()
    Console(file=out, width=_COLUMNS, color_system=None, highlight=False).print(text)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _times_table(by_name: Mapping[str, float], total: float, steps: int) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="")
    table.add_column("")
    for heading in ("seconds", "a step", "share"):
        table.add_column(heading, justify="right", no_wrap=True)

    def per_step(seconds: float) -> str:
        return f"{seconds / steps * 1e3:.1f} ms" if steps else ""

    for name, seconds in by_name.items():
        if seconds >= _WORTH_A_ROW * total:
            table.add_row(name, f"{seconds:.2f}", per_step(seconds), f"{seconds / total:.1%}" if total else "")
    table.add_row("all", f"{total:.2f}", per_step(total), "")
    return table


def _transfers_table(done: Stats, steps: int) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="")
    table.add_column("transfer", no_wrap=True)
    table.add_column("by", overflow="fold")
    for heading in ("calls", "in nodes", "a step", "between", "a step", "in flight", "exposed"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows: dict[tuple[str, str], list[TransferStats]] = {}
    for each in done.transfers:
        encoding = each.transfer.transport.encoding
        codec = ", exact" if each.transfer.exact else "" if encoding is None else f", {encoding}"
        rows.setdefault((each.transfer.kind.value, f"{each.transfer.route}{codec}"), []).append(each)
    for (kind, route), transfers in rows.items():
        table.add_row(kind, route, *_totals(transfers, steps))
    table.add_row("all", "", *_totals(done.transfers, steps))
    return table


def _totals(transfers: Sequence[TransferStats], steps: int) -> list[str]:
    inside, between = sum(t.intra_bytes for t in transfers), sum(t.inter_bytes for t in transfers)
    return [
        str(sum(t.calls for t in transfers)),
        size(inside),
        size(inside / steps) if steps else "",
        size(between),
        size(between / steps) if steps else "",
        f"{sum(t.seconds_in_flight for t in transfers):.2f} s",
        f"{sum(t.seconds_exposed for t in transfers):.2f} s",
    ]
