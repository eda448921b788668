"""What is seen of a training run while it runs, and after: rows of metrics, the live line, traces, the summary."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import torch

from towpath.errors import ConfigError
from towpath.observing import Sums
from towpath.train.config import DTYPES, Config, LogConfig
from towpath.train.loop import Step, Training
from towpath.train.observe import perfetto
from towpath.train.observe.flops import peak
from towpath.train.observe.memory import memory_bytes
from towpath.train.observe.metrics import EvaluationRow, JsonLines, Row, StepRow, TensorBoard, WeightsAndBiases, Writer
from towpath.train.observe.progress import Progress
from towpath.train.observe.summary import Spent, summary


class Watch:
    """`with Watch(…) as watch:` around the steps; rank 0 writes, and all ranks trace."""

    def __init__(self, config: Config, training: Training) -> None:
        self._log, self._training, self._job = config.log, training, training.job
        self._leads = self._job.rank == 0
        self._passes, self._tensor = training.passes, training.parallel.tensor
        self._tokens = config.train.batch * config.train.length
        dtype: torch.dtype = getattr(torch, DTYPES[config.train.precision])
        self._peak = peak(self._job.device, dtype).flops_per_second * self._job.world
        self._progress = Progress(config.train.steps, quiet=not self._leads)
        with self._job.alike():
            self._writers = _writers(config, training) if self._leads else []
        self._open = ExitStack()
        self._steps_before = training.done
        self._stats_before = self._passes.stats()
        self._sums = self._passes.sums()
        self._aside = Sums()  # what evaluations moved
        self._began = time.perf_counter()
        self._seconds = 0.0  # when all steps are done

    def __enter__(self) -> Watch:
        for writer in self._writers:
            self._open.callback(self._close, writer)
        self._open.enter_context(self._progress)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._seconds = time.perf_counter() - self._began
        self._open.close()

    def stepped(self, step: Step) -> None:
        before, self._sums = self._sums, self._passes.sums()
        done = self._sums.since(before)
        row = StepRow(
            step=step.number,
            loss=step.loss,
            learning_rate=step.learning_rate,
            gradient_norm=step.gradient_norm,
            tokens=self._tokens,
            seconds=step.seconds,
            inter_bytes=done.inter_bytes,
            intra_bytes=done.intra_bytes,
            exposed_seconds=done.seconds_exposed,
            memory_bytes=memory_bytes(self._job.device),
            skipped=step.skipped,
            mfu=self._training.flops / step.seconds / self._peak,
        )
        self._progress.show(row)
        if step.number % self._log.every == 0:
            self._write(row)
        if step.skipped:
            self._progress.note(f"step {step.number} was skipped: loss {step.loss:g}, gradient {step.gradient_norm:g}")

    def evaluated(self, loss: float | None, seconds: float) -> None:
        before, self._sums = self._sums, self._passes.sums()
        self._aside = self._aside.plus(self._sums.since(before))
        if loss is not None:
            self._write(EvaluationRow(step=self._training.done, loss=loss, seconds=seconds))
            self._progress.note(f"step {self._training.done}: held-out loss {loss:.4f}")

    def _write(self, row: Row) -> None:
        for writer in list(self._writers):
            try:
                writer.write(row)
            except Exception as error:  # a full disk, or whatever a library raises: no reason to end a training
                self._writers.remove(writer)
                name = type(writer).__name__
                self._progress.note(f"step {row.step}: {name} cannot write: {error}. From here on its rows are lost.")

    def _close(self, writer: Writer) -> None:
        try:
            writer.close()
        except Exception as error:  # as in _write; the last state is still to be saved
            self._progress.note(f"{type(writer).__name__} could not write its last rows: {error}")

    @contextmanager
    def traced(self, step: int) -> Generator[None]:
        """Around a step: traced, if it is one of those that log.trace names."""
        if step not in self._log.trace:
            yield
            return
        with self._passes.traced() as trace:
            yield
        found = self._passes.intervals(trace)
        if found:
            path = Path(self._log.folder, f"trace-step-{step:06}.json")
            topology = self._job.topology
            told = f"step {step}: trace in {path}; open it at https://ui.perfetto.dev"
            try:
                perfetto.write(path, found, {rank: f"rank {rank} (node {topology.node_of(rank)})" for rank in found})
            except OSError as error:  # no reason to end a training, which the other ranks would wait for
                told = f"step {step}: the trace cannot be written: {error}"
            self._progress.note(told)

    def summarise(self) -> None:
        """Printed when the last state is saved: nobody may be there to read it."""
        steps = self._training.done - self._steps_before
        done = self._passes.summed_up(self._passes.stats().since(self._stats_before))
        if not (self._leads and steps):
            return
        clocks = self._training.clocks
        spent = Spent(
            total_seconds=self._seconds,
            passes_seconds=clocks.passes,
            others={
                "the optimizer": clocks.optimizer,
                "agreeing on the loss": clocks.agreement,
                "the data": clocks.data,
                "evaluation": clocks.evaluation,
            },
            aside=self._aside,
        )
        print(summary(done, spent, steps, tensor=self._tensor > 1), flush=True)


def check_log(log: LogConfig) -> None:
    """What would else be found when all has been read and sharded."""
    folder = Path(log.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"log.folder: cannot make {folder}: {error.strerror}.") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"log.folder: {folder} cannot be written to. Choose another.")


def _writers(config: Config, training: Training) -> list[Writer]:
    log = config.log
    folder = Path(log.folder)
    lines = JsonLines(folder / "metrics.jsonl")
    topology = training.job.topology
    lines.start(training.done, {"nodes": topology.nodes, "ranks_per_node": topology.ranks_per_node}, asdict(config))
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
