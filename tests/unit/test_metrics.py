"""Rows of metrics, and what the writers make of them: read back as their readers do."""

from __future__ import annotations

import json
import math
import mmap
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from towpath.errors import ConfigError
from towpath.train.metrics import EvaluationRow, JsonLines, StepRow, TensorBoard, WeightsAndBiases
from towpath.train.metrics_logger import memory_bytes, peak_flops, stated_flops


def row_of(step: int, loss: float = 2.5, mfu: float | None = None) -> StepRow:
    return StepRow(
        step=step,
        loss=loss,
        learning_rate=3e-4,
        gradient_norm=1.25,
        tokens=4096,
        seconds=0.5,
        inter_bytes=48_200_000,
        intra_bytes=100_000_000,
        exposed_seconds=0.06,
        memory_bytes=1_520_000_000,
        mfu=mfu,
    )


def test_every_row_is_a_line_of_json_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonLines(path)
    writer.write(row_of(1, mfu=0.4))
    first = json.loads(path.read_text())  # before close()
    writer.write(EvaluationRow(step=1, loss=2.0, seconds=0.1))
    writer.close()
    assert first["kind"] == "train" and first["step"] == 1 and first["mfu"] == 0.4
    assert first["tokens_per_second"] == 8192 and first["inter_bytes"] == 48_200_000
    assert json.loads(path.read_text().splitlines()[1]) == {
        "kind": "validation",
        "step": 1,
        "loss": 2.0,
        "seconds": 0.1,
    }


def test_numbers_that_are_not_finite_stay_valid_json_and_can_be_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path)
    for loss in (math.nan, math.inf, -math.inf):
        writer.write(row_of(1, loss))
    writer.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [row["loss"] for row in found] == ["NaN", "Infinity", "-Infinity"]
    assert math.isnan(float(found[0]["loss"])) and float(found[2]["loss"]) == -math.inf
    assert "mfu" not in found[0]


def test_a_resumed_run_appends_also_after_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    writer = JsonLines(path)
    writer.write(row_of(2))
    writer.close()
    lines = path.read_text().splitlines()
    assert lines[1] == '{"kind": "tra' and json.loads(lines[2])["step"] == 2


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*metrics\.jsonl"):
        JsonLines(tmp_path / "taken" / "metrics.jsonl")


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    before = threading.enumerate()
    writer = TensorBoard(tmp_path)
    for step in (1, 2):
        writer.write(row_of(step, loss=3.0 - step))
    writer.write(EvaluationRow(step=2, loss=0.5, seconds=0.1))
    writer.close()
    assert threading.enumerate() == before
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert [e.value for e in events.Scalars("train/inter_bytes")] == [48_200_000.0] * 2
    assert [(e.step, e.value) for e in events.Scalars("validation/loss")] == [(2, 0.5)]
    assert "train/mfu" not in events.Tags()["scalars"]


def test_a_run_does_not_begin_where_its_first_row_cannot_be_written() -> None:
    with pytest.raises(ConfigError, match="cannot write /dev/full: No space left on device"):
        JsonLines(Path("/dev/full")).start(0, {}, {})


def test_weights_and_biases_offline_needs_no_network_and_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _nowhere(tmp_path, monkeypatch)
    before, children = threading.enumerate(), _children()
    writer = WeightsAndBiases("towpath-tests", tmp_path / "run", {"train": {"steps": 2}}, offline=True)
    writer.write(row_of(1))
    writer.write(EvaluationRow(step=1, loss=0.5, seconds=0.1))
    assert writer._run.name == "run"
    writer.close()
    assert set(threading.enumerate()) <= set(before) and _children() == children
    runs = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(runs) == 1
    (recorded,) = runs[0].glob("run-*.wandb")
    assert recorded.stat().st_size > 0
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


def test_weights_and_biases_online_never_asks_for_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _nowhere(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"nobody is logged in.*wandb login"):
        WeightsAndBiases("towpath-tests", tmp_path / "run", {}, offline=False)


def _children() -> set[str]:
    """The processes that this one has started, as far as the machine tells."""
    return {pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}


def _nowhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a key, and no way out."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_ERROR_REPORTING"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("tensorboard", lambda folder: TensorBoard(folder)),
        ("wandb", lambda folder: WeightsAndBiases("p", folder, {}, offline=True)),
    ],
)
def test_a_missing_package_is_one_line_with_the_remedy(
    package: str, make: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"log\.{package}.*pip install 'towpath\[log\]'"):
        make(tmp_path)  # type: ignore[operator]


class Tied(nn.Module):
    """4 tokens of width 8: a lookup of positions, one matrix, and an output layer that is the embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(4, 8), nn.Embedding(100, 8)
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 4, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def test_the_peak_is_the_data_sheets_where_the_gpu_is_known() -> None:
    assert stated_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989e12
    assert stated_flops("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert stated_flops("NVIDIA H200", torch.float16) == 989e12
    assert stated_flops("NVIDIA A100-SXM4-80GB", torch.bfloat16) == 312e12
    assert stated_flops("NVIDIA RTX A4000", torch.bfloat16) is None
    assert stated_flops("NVIDIA H200", torch.float32) is None  # unless TF32 is allowed


def test_elsewhere_the_peak_is_measured_and_memory_is_what_is_resident() -> None:
    found = peak_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < found < 1e14
    before = memory_bytes(torch.device("cpu"))
    size = 100_000_000
    # Fresh from the system: a tensor's may be what the process had let go of, and was resident all along.
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as kept:
        kept[::4096] = b"x" * len(range(0, size, 4096))
        assert memory_bytes(torch.device("cpu")) - before > 0.9 * size
