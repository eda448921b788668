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

COMPUTES = Workload(dtype="bfloat16", micro_steps=2).quick()
WAITS = replace(COMPUTES, wait_seconds=0.0)


def recording_of(workload: Workload) -> Recording:
    return replace(Recording.of(workload, workload.model().blocks), steps=2, ranks=2)


def gradients(model: Any, workload: Workload) -> list[torch.Tensor]:
    """Return the gradients of a pass of each block, as they are recorded."""
    (model(*next(workload.data(0))) / workload.micro_steps).backward()
    found = [torch.cat([p.grad.flatten() for p in recording.parameters_of(block)]) for block in model.blocks]
    model.zero_grad()
    return found


def test_what_is_recorded_is_the_gradient_of_training(tmp_path: Path) -> None:
    kept, file = recording_of(COMPUTES), tmp_path / "gradients"
    recording.record(kept, file)
    values = kept.mapped(file)
    once = replace(COMPUTES, micro_steps=1)
    assert torch.equal(values[0, 0], torch.stack(gradients(once.model().bfloat16(), once)))
    assert not torch.equal(values[0, 0], values[0, 1])  # another rank
    assert not torch.equal(values[0, 0], values[1, 0])  # another step


def test_each_pass_replays_another_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = recording_of(WAITS)
    values = torch.randn(kept.steps, kept.ranks, kept.blocks, kept.elements)
    before = values.clone()
    monkeypatch.setattr(Recording, "of", lambda *_: kept)
    monkeypatch.setattr(recording, "gradients_of", lambda _: values)
    model = WAITS.model()
    for step, rank, sign in ((0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1), (0, 0, -1)):
        for number, found in enumerate(gradients(model, WAITS)):
            torch.testing.assert_close(found, sign * values[step, rank, number] / 2)
    assert torch.equal(values, before)  # autograd got copies


def test_workloads_that_wait_differently_share_a_recording() -> None:
    files = {recording_of(replace(WAITS, wait_seconds=each, micro_steps=1)).file for each in (0.0, 0.1)}
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
