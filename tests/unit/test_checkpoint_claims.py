"""A folder of checkpoints belongs to one job at a time: who gets it, who is refused, and who has lost it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Generator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from towpath import checkpoint
from towpath.checkpoint import State, folders
from towpath.checkpoint.folders import Claim, FolderInUseError, Holder
from towpath.errors import CheckpointError


@pytest.fixture
def process() -> Generator[subprocess.Popen[bytes]]:
    """Of another job on this machine."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as running:
        yield running
        running.kill()


def _of(process: subprocess.Popen[bytes]) -> Holder:
    return replace(
        Holder.here(), pid=process.pid, started=folders._started(process.pid), since="1999-12-31 23:59:59 UTC"
    )


def _elsewhere(**values: Any) -> Holder:
    """A job on another machine, whose process number says nothing here."""
    return replace(Holder.here(), host="node-7", machine="node-7 boot 1", job="theirs", **values)


def _put(root: Path, holder: Holder, number: int = 1, beat: int = 0) -> Path:
    path = root / f"claim-{number:06d}.json"
    path.write_text(json.dumps({"beat": f"{beat:010d}", **asdict(holder)}))
    return path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """`clock[0]` is the time."""
    now = [0.0]
    monkeypatch.setattr(folders.time, "monotonic", lambda: now[0])
    return now


# On this machine ------------------------------------------------------------------------------------------------------


def test_a_second_job_is_refused_by_name_and_changes_nothing(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    before = _put(tmp_path, _of(process)).read_text()
    (tmp_path / "step-000001.partial-1234").mkdir()
    with pytest.raises(CheckpointError) as refused:
        checkpoint.Saver(tmp_path, State(nn.Linear(2, 2)))
    for word in (str(tmp_path), f"process {process.pid}", f"host {Holder.here().host}", "1999-12-31 23:59:59 UTC"):
        assert word in str(refused.value)
    with pytest.raises(CheckpointError, match="is in use"):
        checkpoint.save(tmp_path, 1, State(nn.Linear(2, 2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["claim-000001.json", "step-000001.partial-1234"]
    assert (tmp_path / "claim-000001.json").read_text() == before


@pytest.mark.parametrize("end", ["waited for", "not waited for", "its number is another's now"])
def test_the_claim_of_a_dead_job_is_taken_over_at_once(
    tmp_path: Path, process: subprocess.Popen[bytes], end: str
) -> None:
    holder = _of(process)
    if end == "its number is another's now":
        holder = replace(holder, started=holder.started + 1)
    else:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if end == "waited for":
            process.wait()
    _put(tmp_path, holder)
    mine = Claim(tmp_path)
    assert mine.take() and mine.take()
    assert [path.name for path in tmp_path.iterdir()] == ["claim-000002.json"]
    mine.give_back()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_has_one_saver_until_that_is_closed_or_forgotten(tmp_path: Path) -> None:
    state = State(nn.Linear(2, 2))
    first = checkpoint.Saver(tmp_path, state)
    with pytest.raises(CheckpointError, match="another Saver of this job has it open"):
        checkpoint.Saver(tmp_path / ".." / tmp_path.name, state)
    assert first.save(1).outcome().ok and checkpoint.save(tmp_path, 2, state).ok
    assert (tmp_path / "claim-000001.json").exists()
    first.close()
    second = checkpoint.Saver(tmp_path, state)
    with pytest.raises(CheckpointError, match="another Saver of this job has it open"):
        first.save(3)  # it would open the folder again
    del second
    assert first.save(3).outcome().ok
    first.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002", "step-000003"]


def test_a_saver_that_the_optimizer_knows_is_forgotten_all_the_same(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    saver = checkpoint.Saver(tmp_path, State(model, optimizer))
    assert saver.save(1).outcome().ok
    del saver
    optimizer.step()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_who_only_reads_needs_no_claim_and_who_imports_does(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    root, state = tmp_path / "run", State(nn.Linear(2, 2))
    assert checkpoint.save(root, 1, state).ok
    _put(root, _of(process))
    assert checkpoint.load(root, state) is not None
    assert checkpoint.latest(root) == root / "step-000001" and checkpoint.verify(root / "step-000001").ok
    exported = checkpoint.export(root / "step-000001", tmp_path / "exported")
    assert exported
    with pytest.raises(CheckpointError, match="is in use"):
        checkpoint.import_safetensors(tmp_path / "exported", root)
    assert sorted(path.name for path in root.iterdir()) == ["claim-000001.json", "step-000001"]


# On another machine ---------------------------------------------------------------------------------------------------


def test_a_job_of_another_machine_is_dead_when_its_counter_stands_still(tmp_path: Path, clock: list[float]) -> None:
    _put(tmp_path, _elsewhere())
    mine = Claim(tmp_path)
    assert not mine.take()
    clock[0] = folders.DEAD_SECONDS - 1
    assert not mine.take()
    clock[0] = folders.DEAD_SECONDS
    assert mine.take()
    assert [path.name for path in tmp_path.iterdir()] == ["claim-000002.json"]


def test_a_job_of_another_machine_whose_counter_moves_is_alive(tmp_path: Path, clock: list[float]) -> None:
    _put(tmp_path, _elsewhere())
    mine = Claim(tmp_path)
    assert not mine.take()
    clock[0] = 1000.0
    _put(tmp_path, _elsewhere(), beat=1)
    with pytest.raises(FolderInUseError, match="on host node-7"):
        mine.take()


def test_what_a_job_writes_as_it_beats_is_seen_by_others(tmp_path: Path) -> None:
    mine = Claim(tmp_path)
    assert mine.take()
    path = tmp_path / "claim-000001.json"
    before = folders._content(path)
    mine.beat()
    after: Any = folders._content(path)
    assert after != before and folders._holder(after) == folders._holder(before)


def test_a_job_that_a_launcher_has_started_again_takes_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """Rank 0 may be on another machine then. torchrun's own name for a run without one says nothing."""
    for name, at_once in (("run-17", True), ("none", False)):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        (tmp_path / name).mkdir()
        _put(tmp_path / name, _elsewhere(launcher=Holder.here().launcher))
        assert Claim(tmp_path / name).take() is at_once


@pytest.mark.parametrize("content", ["", '{"beat": "0', "[]", '{"pid": -1}', '{"pid": "1"}'])
def test_a_claim_that_cannot_be_understood_counts_until_it_has_stood_still(
    tmp_path: Path, clock: list[float], content: str
) -> None:
    """Another job may be about to write it."""
    (tmp_path / "claim-000001.json").write_text(content)
    mine = Claim(tmp_path)
    assert not mine.take()
    clock[0] = folders.DEAD_SECONDS
    assert mine.take()


def test_a_claim_that_may_not_be_read_is_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _put(tmp_path, _elsewhere())

    def refused(*_: Any) -> None:
        try:
            raise PermissionError
        except PermissionError as error:
            raise folders.DamagedError("claim-000001.json cannot be read.") from error

    monkeypatch.setattr(folders, "read_json", refused)
    with pytest.raises(FolderInUseError, match="may be in use by another user's job"):
        Claim(tmp_path).take()


def test_a_saver_waits_until_it_knows(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(folders, "_keep_beating", lambda: None)
    _put(tmp_path, _elsewhere())
    checkpoint.Saver(tmp_path, State(nn.Linear(2, 2))).close()
    assert sum(waited) == folders.DEAD_SECONDS


# Several at once ------------------------------------------------------------------------------------------------------


def test_of_two_that_create_the_same_claim_one_is_told_to_look_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    create = os.open

    def slower(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_EXCL:
            _put(tmp_path, _of(process))
        return create(path, flags, *more)

    monkeypatch.setattr(os, "open", slower)
    mine = Claim(tmp_path)
    assert not mine.take()
    with pytest.raises(FolderInUseError, match=f"process {process.pid}"):
        mine.take()


def test_who_took_over_a_dead_claim_while_another_did_withdraws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    """It judged claim 1, and creates claim 2, when that has come and gone: somebody else holds claim 3."""
    _put(tmp_path, replace(_of(process), started=1))  # dead
    create = os.open

    def slower(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_EXCL:
            (tmp_path / "claim-000001.json").unlink()
            _put(tmp_path, _of(process), 3)
        return create(path, flags, *more)

    monkeypatch.setattr(os, "open", slower)
    mine = Claim(tmp_path)
    assert not mine.take()
    assert [path.name for path in tmp_path.iterdir()] == ["claim-000003.json"]


# Lost -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["taken over", "taken over and ended"])
def test_a_job_that_lost_its_claim_saves_no_more_and_says_so(
    tmp_path: Path, process: subprocess.Popen[bytes], how: str
) -> None:
    saver = checkpoint.Saver(tmp_path, State(nn.Linear(2, 2)), background=False)
    assert saver.save(1).outcome().ok
    (tmp_path / "claim-000001.json").unlink()
    if how == "taken over":
        _put(tmp_path, _of(process), 2)
    failure = saver.save(2).outcome().failure
    assert failure is not None and "was taken over by" in failure
    assert (f"process {process.pid}" in failure) == (how == "taken over")
    with pytest.raises(CheckpointError, match="It saves no more there"):
        saver.save(3)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("step")] == ["step-000001"]
    saver.close()
    assert (tmp_path / "claim-000002.json").exists() == (how == "taken over")


def test_a_claim_that_was_lost_while_files_were_written_publishes_nothing(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from towpath.checkpoint import dcp

    saver = checkpoint.Saver(tmp_path, State(nn.Linear(2, 2)), background=False)
    write = dcp.write_manifest

    def slowly(folder: Path, manifest: Any) -> None:
        write(folder, manifest)
        _put(tmp_path, _of(process), 2)

    monkeypatch.setattr(dcp, "write_manifest", slowly)
    failure = saver.save(1).outcome().failure
    assert failure is not None and f"process {process.pid}" in failure
    assert not (tmp_path / "step-000001").exists()


def test_a_folder_that_vanished_is_claimed_anew(tmp_path: Path) -> None:
    root = tmp_path / "run"
    saver = checkpoint.Saver(root, State(nn.Linear(2, 2)), background=False)
    (root / "claim-000001.json").unlink()
    root.rmdir()
    assert saver.save(1).outcome().ok
    assert sorted(path.name for path in root.iterdir()) == ["claim-000001.json", "step-000001"]
    saver.close()
