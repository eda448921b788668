"""Where the host may wait for the device in a step: nowhere but for the sizes of exact messages, and after the step.

The branches that run here run in test_steps.py, too, which notes them. Steps that are traced are several times slower.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import towpath
from tests.fake_cuda.running import check_waits, loss_of, net, sharded
from tests.fake_cuda.world import World, fake_gpus
from tests.ranks.server import on_ranks
from towpath import Outer, Precision
from towpath.engine.compute_clock import WARM_UP, WINDOW
from towpath.observe import record
from towpath.optim import chain
from towpath.topology import groups
from towpath.train import metrics
from towpath.train.config import Config
from towpath.train.data import prepare
from towpath.train.job import Job
from towpath.train.trainer import StepResult, TrainingRun

small = mock.patch("towpath.core.transport.SMALLEST_BYTES", 1)  # exact transports leave out small messages


def passes(gpus: World, model: Any) -> None:
    """Two micro-steps, in which the host must not wait."""
    with gpus.cuda.no_waits("in a pass"):
        with model.no_sync():
            loss_of(model).backward()
        loss_of(model).backward()


@on_ranks(1)
@small
def test_exact_transports_wait_once_in_a_step_and_never_in_a_pass() -> None:
    for name, precision, apart in (
        ("paro-iig", Precision(), False),
        ("paro-iig", Precision(params=torch.bfloat16, reduce=torch.float32), True),
        ("zero1", Precision(), True),
    ):
        with fake_gpus(2, 2) as gpus:
            strategy = towpath.strategy(name, gpus.topology, exact=True)
            model: Any = towpath.shard(net(), strategy, topology=gpus.topology, precision=precision)
            matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
            groups = (matrices, others) if apart else ([*matrices, *others],)
            optimizer = chain(*(torch.optim.AdamW(group, lr=0.01) for group in groups))

            def step(gpus: World = gpus, model: Any = model, optimizer: Any = optimizer) -> None:
                passes(gpus, model)
                optimizer.step()
                optimizer.zero_grad()

            check_waits(gpus.cuda, step, most=1)
            assert "_write_kernel" in gpus.launches


@on_ranks(1)
def test_an_exchange_between_islands_is_applied_without_a_wait() -> None:
    for name, outer in (
        ("zero1", Outer(every=1, nccl=True)),
        ("zero3", Outer(every=2, fragments=2, delay=1, blend=0.5, nccl=True)),
        ("paro-igg", Outer(every=2, delay=1)),
    ):
        with fake_gpus(2, 2) as gpus:
            model = sharded(gpus.topology, name, outer=outer)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

            def step(gpus: World = gpus, model: Any = model, optimizer: Any = optimizer) -> None:
                passes(gpus, model)
                optimizer.step()
                optimizer.zero_grad()

            check_waits(gpus.cuda, step, steps=6)


@on_ranks(1)
def test_ranks_are_measured_without_a_wait() -> None:
    with fake_gpus(2, 2) as gpus:
        model = sharded(gpus.topology, "zero3", shares="auto")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found = model.towpath_engine.shares._clock._found

        def step() -> None:
            with gpus.cuda.no_waits("in a pass"):
                towpath.weigh(model, loss_of(model), 2).backward()
            optimizer.step()
            optimizer.zero_grad()

        check_waits(gpus.cuda, step, steps=WARM_UP + WINDOW)
        torch.cuda.synchronize()
        step()  # reads what the device has passed
        assert len(found) >= WINDOW and all(seconds > 0 for seconds in found)


@on_ranks(1)
def test_towpath_train_reads_the_step_before_and_times_few_steps(tmp_path: Path) -> None:
    """While the device has all of the next step to do. Rows are of their own steps, also the last one."""
    with fake_gpus(1, 2) as gpus:
        training = _run(gpus, tmp_path)
        results: list[StepResult] = []
        timed: list[int] = []
        with mock.patch.object(metrics, "_SECONDS_BETWEEN_LINES", 1e9), metrics.MetricsLogger(training) as logger:
            for step in range(1, STEPS + 1):
                first = gpus.cuda.device.launched
                with gpus.cuda.counted() as waits, _timed_events() as events, logger.traced(step):
                    result = training.train_step()
                launched = gpus.cuda.device.launched - first
                timed.append(len(events))
                assert len(waits) == (step > 1) and all(wait.left > 0.9 * launched for wait in waits), waits
                logger.log_step(result)
                results.append(result)
        rows = map(json.loads, Path(training.config.log.folder, "metrics.jsonl").read_text().splitlines())
        losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
        assert losses == {result.step: result.loss for result in results} and len(losses) == STEPS
    assert [bool(count) for count in timed] == [True, False, False, True], timed


STEPS = 4


def _run(gpus: World, folder: Path) -> TrainingRun:
    (folder / "text.txt").write_text("".join(f"the {i}th line says {i * i % 97}\n" for i in range(200)))
    prepare([str(folder / "text.txt")], folder / "tokens")
    config = Config.from_dict(
        {
            "data": {"tokens": str(folder / "tokens")},
            "model": {"width": 16, "depth": 2, "heads": 2},
            "train": {"steps": STEPS, "batch": 4, "micro_batch": 1, "length": 16},
            "strategy": {"name": "zero3", "nodes": "1x2"},
            "log": {"folder": str(folder / "run")},
        }
    )
    ranks = groups.Groups()
    return TrainingRun(config, Job(ranks, gpus.topology, torch.device("cuda", 0), 0, ranks.world))


@contextmanager
def _timed_events() -> Generator[list[None]]:
    made: list[None] = []
    mark = record.DeviceTimer.mark

    def noting(self: record.DeviceTimer) -> record.Mark:
        made.append(None)
        return mark(self)

    with mock.patch.object(record.DeviceTimer, "mark", noting):
        yield made
