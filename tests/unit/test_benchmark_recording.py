"""Blocks that wait replay the gradients of real training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import recording
from benchmarks.recording import Recording
from benchmarks.suites import exact, exact_bytes
from benchmarks.workload import Workload

# Wide enough that matrices of blocks are recorded as factors.
COMPUTES = Workload(micro_steps=2, width=96, depth=2, batch=1, length=4)
WAITS = replace(COMPUTES, wait_seconds=0.0)


def recording_of(workload: Workload) -> Recording:
    return replace(Recording.of(workload, workload.model()), steps=2, ranks=2)


def gradients(model: Any, batch: Any) -> list[torch.Tensor]:
    """Return the gradients of a pass."""
    (model(*batch) / COMPUTES.micro_steps).backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def test_blocks_that_wait_have_the_gradients_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, file = recording_of(WAITS), tmp_path / "gradients"
    assert any(part.tokens for part in kept.parts[1]) and not all(part.tokens for part in kept.parts[1])
    recording.record(kept, file)
    monkeypatch.setattr(recording, "gradients_of", lambda _: kept.mapped(file))
    batches = COMPUTES.data(0)
    computing, waiting = COMPUTES.model(), WAITS.model()
    for micro_step in range(4):
        batch = next(batches)
        real, replayed = gradients(computing, batch), gradients(waiting, batch)
        # In the second step, recorded weights have changed, and those of the models here have not.
        assert micro_step > 1 or all(map(torch.equal, real, replayed))
        assert micro_step < 2 or not any(map(torch.equal, real, replayed))
    rows = kept.mapped(file)
    assert not torch.equal(rows[0, 0, 0], rows[0, 0, 1])  # another rank


def test_steps_after_the_recording_are_its_second_half() -> None:
    assert [recording.repeated(step, 4) for step in range(10)] == [
        *((step, 1) for step in range(4)),
        *[(2, -1), (3, -1), (2, 1), (3, 1), (2, -1), (3, -1)],
    ]


def test_workloads_that_wait_differently_share_a_recording() -> None:
    files = {recording_of(replace(WAITS, wait_seconds=each)).file for each in (0.0, 0.1)}
    assert len(files) == 1 and recording_of(replace(WAITS, learning_rate=1e-5)).file not in files


def test_bits_of_waiting_blocks_are_compared_with_real_ones() -> None:
    steps = [{"grad_sync": 11.0}] * 2
    bits = {
        "compute": [*steps, {"grad_sync": 11.0, "param_sync": 5.0}],
        "wait": [*steps, {"grad_sync": 11.0, "param_sync": 4.8}],
    }
    found = {check.what: check for check in exact_bytes.replay_checks(bits)}
    assert found["grad_sync: |waiting / computing − 1|"].met
    assert not found["param_sync: |waiting / computing − 1|"].met


def test_bits_by_class_are_those_of_all_ranks() -> None:
    ranks = [
        [{"weights": dict.fromkeys(exact_bytes.CLASSES, (100, 100))}],
        [{"weights": dict.fromkeys(exact_bytes.CLASSES, (300, 60))}],
    ]
    assert exact_bytes.bits_by_class(ranks) == [{"weights": dict.fromkeys(exact_bytes.CLASSES, 3.2)}]
    assert exact_bytes.class_of("blocks.0.qkv.weight", 2) == "matrices"
    assert exact_bytes.class_of("blocks.0.qkv.bias", 1) == "norms and biases"
    assert exact_bytes.class_of("positions", 2) == "embeddings"


def test_means_of_exact_steps_need_every_ratio() -> None:
    lines = [
        {
            "case": {"link": {"comm_ratio": ratio}, "workload": {"wait_seconds": None, "micro_steps": 1}},
            "checks": [{"what": f"paro-igg{exact.EXACT} against hsdp, times as fast", "found": ratio}],
        }
        for ratio in exact.RATIOS
    ]
    [mean] = exact.means(lines)
    assert mean.found == 3.75 and mean.at_least == 1.5
    assert not exact.means(lines[1:])
