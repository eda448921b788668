"""What a run reports: rows, read back as their readers do, the progress line, and the summary."""

from __future__ import annotations

import json
import mmap
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import towpath
from towpath.core.strategy import TransferKind
from towpath.errors import ConfigError
from towpath.observe.stats import Stats
from towpath.observe.totals import TransferStats
from towpath.train.config import Config
from towpath.train.metrics import (
    JsonLines,
    TensorBoard,
    WeightsAndBiases,
    open_writers,
    peak_flops,
    peak_memory,
    seconds_by_activity,
)

ROW: dict[str, Any] = {
    "loss": 2.5,
    "learning_rate": 3e-4,
    "gradient_norm": 1.25,
    "tokens": 4096,
    "tokens_per_second": 8192.0,
    "seconds": 0.5,
    "inter_bytes": 48_200_000,
    "intra_bytes": 100_000_000,
    "exposed_seconds": 0.06,
    "memory_bytes": 1_520_000_000,
    "mfu": None,
}


# --- rows ------------------------------------------------------------------------------------------------------------


def test_every_row_is_a_line_of_json_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonLines(path)
    writer.write("train", 1, ROW)
    first = json.loads(path.read_text())  # before close()
    writer.write("validation", 1, {"loss": 2.0})
    writer.close()
    assert first == {"kind": "train", "step": 1} | ROW
    assert json.loads(path.read_text().splitlines()[1]) == {"kind": "validation", "step": 1, "loss": 2.0}


def test_a_resumed_run_appends_also_after_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    for step in (2, 3):
        writer = JsonLines(path)
        writer.write("train", step, ROW)
        writer.close()
    lines = path.read_text().splitlines()
    assert lines[1] == '{"kind": "tra' and [json.loads(line)["step"] for line in lines[2:]] == [2, 3]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*metrics\.jsonl"):
        JsonLines(tmp_path / "taken" / "metrics.jsonl")


def test_a_run_does_not_begin_where_its_first_row_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    config = Config.from_dict({"log": {"folder": str(tmp_path)}})
    with pytest.raises(ConfigError, match=rf"cannot write to {tmp_path}: .*No space left on device"):
        open_writers(config, towpath.Topology(1, 1), 0)


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    before = threading.enumerate()
    writer = TensorBoard(tmp_path)
    for step in (1, 2):
        writer.write("train", step, ROW | {"loss": 3.0 - step, "mfu": 0.5})
    writer.write("validation", 2, {"loss": 0.5})
    writer.close()
    assert threading.enumerate() == before
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert [(e.step, e.value) for e in events.Scalars("validation/loss")] == [(2, 0.5)]


def test_weights_and_biases_needs_no_network_and_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _nowhere(tmp_path, monkeypatch)
    (run := tmp_path / "run").mkdir()
    before, children = threading.enumerate(), _children()
    writer = WeightsAndBiases("towpath-tests", run, {"train": {"steps": 2}})
    writer.write("train", 1, ROW)
    assert writer._run.name == "run"
    writer.close()
    assert set(threading.enumerate()) <= set(before) and _children() == children
    (recorded,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert recorded.stat().st_size > 0
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


def test_weights_and_biases_online_never_asks_for_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _nowhere(tmp_path, monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match=r"nobody is logged in.*wandb login"):
        WeightsAndBiases("towpath-tests", tmp_path / "run", {})


def _children() -> set[str]:
    """The processes that this one has started, as far as the machine tells."""
    return {pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}


def _nowhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a key, and no way out."""
    monkeypatch.setenv("WANDB_MODE", "")  # so that what the run sets is taken back
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_ERROR_REPORTING"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")


@pytest.mark.parametrize(("package", "key"), [("tensorboard", True), ("wandb", "project")])
def test_a_missing_package_is_one_line_with_the_remedy(
    package: str, key: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    config = Config.from_dict({"log": {"folder": str(tmp_path), package: key}})
    with pytest.raises(ConfigError, match=rf"log: .*{package}.*pip install 'towpath\[log\]'"):
        open_writers(config, towpath.Topology(1, 1), 0)


# --- the device ------------------------------------------------------------------------------------------------------


def test_the_peak_is_the_data_sheets_where_the_gpu_is_known() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989e12
    assert peak_flops("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert peak_flops("NVIDIA H200", torch.float16) == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.bfloat16) == 312e12
    assert peak_flops("NVIDIA RTX A4000", torch.bfloat16) is None
    assert peak_flops("NVIDIA H200", torch.float32) is None  # unless TF32 is allowed
    assert peak_flops(torch.device("cpu"), torch.float32) is None


def test_the_peak_of_memory_does_not_fall() -> None:
    size = 100_000_000
    # Fresh from the system: a tensor's may be what the process had let go of, and was resident all along.
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as kept:
        kept[::4096] = b"x" * len(range(0, size, 4096))
        peak = peak_memory(torch.device("cpu"))
    assert peak_memory(torch.device("cpu")) >= peak > size


# --- what a person sees ----------------------------------------------------------------------------------------------


def _stats(calls: int = 10) -> Stats:
    """Of `calls` steps under zero++."""
    topology = towpath.Topology(2, 2)
    made = towpath.schedule(towpath.strategy("zero++", topology), {"block": 4096, "other": 4096})
    transfers = tuple(
        replace(TransferStats.of(t, calls=calls), seconds_in_flight=0.2 * calls, seconds_exposed=0.1 * calls)
        for t in made.transfers
    )
    return Stats(
        transfers=transfers,
        seconds_host=0.05 * calls,
        last_step=made.transfers,
        memory_bytes={},
        host_memory_bytes={},
        buffers_made=3,
    )


def test_stats_can_be_taken_of_a_part_of_a_run() -> None:
    part = _stats(10).since(_stats(4))
    assert part.inter_bytes == 6 * _stats(1).inter_bytes
    assert {t.calls for t in part.transfers} == {6}
    assert part.seconds_host == pytest.approx(0.3) and part.buffers_made == 0
    assert _stats(4).since(_stats(4)).transfers == ()


def test_the_times_add_up_to_the_run() -> None:
    done = _stats(10)
    found = seconds_by_activity(done.exposed_by_kind, done.seconds_host, {"passes": 15.0, "optimizer": 1.0}, 20.0)
    assert sum(found.values()) == pytest.approx(20.0)
    gathers = sum(t.seconds_exposed for t in done.transfers if t.transfer.kind is TransferKind.GATHER)
    assert found["waiting for gather"] == pytest.approx(gathers)
    assert found["the engine's own work"] == pytest.approx(0.5)
    assert found["the rest"] == pytest.approx(4.0)
    assert found["compute"] == pytest.approx(15.0 - done.seconds_exposed - 0.5)
