"""A folder of checkpoints belongs to one job at a time: who gets it, who is refused, and who has lost it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from towpath import checkpoint
from towpath.checkpoint import State, folders, storage
from towpath.checkpoint.folders import Lock, RefusedError
from towpath.errors import CheckpointError


@pytest.fixture
def process() -> Generator[subprocess.Popen[bytes]]:
    """Of another job on this machine."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as running:
        yield running
        running.kill()


def _put(root: Path, process: subprocess.Popen[bytes], **changed: Any) -> Path:
    """Write the lock of a job whose rank 0 is `process`."""
    holder = Lock(root)._me | {"pid": process.pid, "started": folders._started(process.pid), "job": "theirs"}
    path = root / "lock.json"
    path.write_text(json.dumps(holder | changed))
    return path


def test_a_second_job_is_refused_by_name_and_changes_nothing(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    before = _put(tmp_path, process, since="1999-12-31").read_text()
    (tmp_path / "step-000001.partial-1234").mkdir()
    with pytest.raises(CheckpointError) as refused:
        checkpoint.Saver(tmp_path, State(nn.Linear(2, 2)))
    said = f"process {process.pid} on host {os.uname().nodename} (job theirs, since 1999-12-31)"
    for words in (f"{tmp_path} is in use by {said}", f"If it cannot be alive, remove {tmp_path}/lock.json."):
        assert words in str(refused.value)
    with pytest.raises(CheckpointError, match="is in use"):
        checkpoint.save(tmp_path, 1, State(nn.Linear(2, 2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock.json", "step-000001.partial-1234"]
    assert (tmp_path / "lock.json").read_text() == before


@pytest.mark.parametrize("end", ["waited for", "not waited for", "its number is another's now"])
def test_the_lock_of_a_dead_job_is_taken_over_at_once(
    tmp_path: Path, process: subprocess.Popen[bytes], end: str
) -> None:
    path = _put(tmp_path, process)
    if end == "its number is another's now":
        _put(tmp_path, process, started=1)
    else:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if end == "waited for":
            process.wait()
    mine = Lock(tmp_path)
    mine.hold()
    mine.hold()
    assert json.loads(path.read_text())["pid"] == os.getpid() and list(tmp_path.iterdir()) == [path]
    mine.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("holder", ["elsewhere", "", "[]", '{"pid": -1}', "x" * 100])
def test_a_lock_of_another_machine_or_one_that_says_nothing_is_removed_only_by_hand(
    tmp_path: Path, process: subprocess.Popen[bytes], holder: str
) -> None:
    """Another job may be about to write it."""
    path = _put(tmp_path, process, host="node-7", machine="node-7 boot 1", computer="node-7 1", started=1)
    if holder != "elsewhere":
        path.write_text(holder)
    with pytest.raises(RefusedError, match="on host node-7" if holder == "elsewhere" else "If it cannot be alive"):
        Lock(tmp_path).hold()
    path.unlink()
    Lock(tmp_path).hold()


@pytest.mark.parametrize(("here", "theirs"), [("node-7 1", "node-7 1"), ("node-7 1", "node-7 2"), ("", "")])
def test_the_lock_of_a_machine_that_was_switched_off_is_its_own_again(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, here: str, theirs: str
) -> None:
    """The process may have the number of one that runs now. Containers know no machine, so theirs stay."""
    monkeypatch.setattr(folders, "_computer", lambda: here)
    path = _put(tmp_path, process, machine="node-7 boot 1", computer=theirs)
    lock = Lock(tmp_path)
    if here and here == theirs:
        lock.hold()
        assert json.loads(path.read_text())["pid"] == os.getpid()
        return
    with pytest.raises(RefusedError, match="If it cannot be alive"):
        lock.hold()


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_lock_that_is_no_file_is_not_followed_and_named_for_removal(tmp_path: Path, kind: str) -> None:
    (tmp_path / "target").touch()
    lock = tmp_path / "lock.json"
    {"link": lambda: lock.symlink_to("target"), "folder": lock.mkdir, "pipe": lambda: os.mkfifo(lock)}[kind]()
    with pytest.raises(RefusedError, match=rf"is a .*{kind}.* or remove {lock} if no job writes there\."):
        Lock(tmp_path).hold()
    assert (tmp_path / "target").read_text() == ""


def test_a_folder_has_one_saver_until_that_is_closed_or_forgotten(tmp_path: Path) -> None:
    state = State(nn.Linear(2, 2))
    first = checkpoint.Saver(tmp_path, state)
    with pytest.raises(CheckpointError, match="another Saver of this job has it open"):
        checkpoint.Saver(tmp_path / ".." / tmp_path.name, state)
    assert first.save(1).outcome().ok and checkpoint.save(tmp_path, 2, state).ok
    assert (tmp_path / "lock.json").exists()
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


def test_who_only_reads_needs_no_lock_and_who_imports_does(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    root, state = tmp_path / "run", State(nn.Linear(2, 2))
    assert checkpoint.save(root, 1, state).ok
    _put(root, process)
    assert checkpoint.load(root, state) is not None
    assert checkpoint.latest(root) == root / "step-000001" and checkpoint.verify(root / "step-000001") is None
    assert checkpoint.export(root / "step-000001", tmp_path / "exported")
    with pytest.raises(CheckpointError, match="is in use"):
        checkpoint.import_safetensors(tmp_path / "exported", root)
    assert sorted(path.name for path in root.iterdir()) == ["lock.json", "step-000001"]


def test_of_two_imports_into_a_folder_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, hold = tmp_path / "run", Lock.hold
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")

    def published(self: Lock, **options: Any) -> None:
        hold(self, **options)
        (root / "step-000000").mkdir()  # by an import that has ended meanwhile

    with closing(checkpoint.Saver(root, State(nn.Linear(2, 2)))), pytest.raises(CheckpointError, match="is in use"):
        checkpoint.import_safetensors(tmp_path / "w.safetensors", root)
    monkeypatch.setattr(Lock, "hold", published)
    with pytest.raises(CheckpointError, match="is there already"):
        checkpoint.import_safetensors(tmp_path / "w.safetensors", root)
    assert list((root / "step-000000").iterdir()) == []


@pytest.mark.parametrize("when", ["before", "while files are written"])
@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_job_that_lost_its_lock_publishes_nothing_more(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, when: str, how: str
) -> None:
    saver = checkpoint.Saver(tmp_path, State(nn.Linear(2, 2)), background=False)
    assert saver.save(1).outcome().ok
    write = storage.write_manifest

    def lose(*arguments: Any) -> None:
        if arguments:
            write(*arguments)
        _put(tmp_path, process) if how == "replaced" else (tmp_path / "lock.json").unlink(missing_ok=True)

    if when == "before":
        lose()
    else:
        monkeypatch.setattr(storage, "write_manifest", lose)
    for step in (2, 3):
        with pytest.raises(CheckpointError, match=f"(process {process.pid})?.* It saves no more there"):
            saver.save(step)
    saver.close()
    left = {"step-000001", "lock.json"} if how == "replaced" else {"step-000001"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_folder_that_vanished_is_locked_anew(tmp_path: Path) -> None:
    root = tmp_path / "run"
    saver = checkpoint.Saver(root, State(nn.Linear(2, 2)), background=False)
    (root / "lock.json").unlink()
    root.rmdir()
    assert saver.save(1).outcome().ok
    assert sorted(path.name for path in root.iterdir()) == ["lock.json", "step-000001"]
    saver.close()
