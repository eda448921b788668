"""The memory of a node: who holds it, what survives, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from towpath.errors import CheckpointError, ConfigError
from towpath.protect.memory import NodeMemory, memory_of

HOLD = """
import sys
from towpath.protect.memory import memory_of
assert "torch" not in sys.modules
memory_of(sys.argv[1]).hold()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setenv("TOWPATH_MEMORY", str(shared))
    return shared


@pytest.fixture
def memory(shared: Path) -> Generator[NodeMemory]:
    memory = memory_of("/runs/a")
    memory.hold()
    yield memory
    memory.release()


@pytest.fixture
def rank() -> Generator[subprocess.Popen[str]]:
    """Another process that holds the memory of /runs/a."""
    command = [sys.executable, "-c", HOLD, "/runs/a"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stdout.readline() == "held\n"
        yield running
        running.kill()


def _write(memory: NodeMemory, step: int, text: str = "") -> None:
    (memory.new_partial(step) / "file").write_text(text)
    memory.new_partial(step)  # another rank
    memory.publish(step)


def test_the_path_of_the_root_names_the_memory(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = memory_of("/runs/a").path
    monkeypatch.chdir("/")
    assert a == memory_of(Path("runs/../runs/a/")).path != memory_of("/runs/b").path
    assert a.parent == shared / f"towpath-{os.getuid()}" and list(shared.iterdir()) == []


def test_only_this_user_may_enter(memory: NodeMemory) -> None:
    assert memory.path.stat().st_mode & 0o777 == memory.path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["link", "file", "open to others", "another user's"])
def test_a_base_folder_that_others_could_write_to_is_refused(
    shared: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, elsewhere = shared / f"towpath-{os.getuid()}", shared / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    before = NodeMemory(base / "0123")  # by a process that looked when there was none
    {"link": lambda: base.symlink_to(elsewhere), "file": base.touch}.get(kind, lambda: base.mkdir(mode=0o700))()
    if kind == "open to others":
        base.chmod(0o770)
    if kind == "another user's":
        found = base.lstat()
        other = SimpleNamespace(st_mode=found.st_mode, st_uid=os.getuid() + 1)
        monkeypatch.setattr(Path, "lstat", lambda _: other)
    with pytest.raises(ConfigError, match="not safe"):
        memory_of("/runs/a")
    with pytest.raises((ConfigError, CheckpointError)):
        before.hold()
    monkeypatch.undo()
    assert list(elsewhere.iterdir()) == []


def test_without_shared_memory_the_error_names_the_variable(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOWPATH_MEMORY", str(shared / "none"))
    with pytest.raises(ConfigError, match=r"none is no folder.*Set TOWPATH_MEMORY"):
        memory_of("/runs/a")


def test_snapshots_are_listed_newest_first_once_published(memory: NodeMemory) -> None:
    assert NodeMemory(memory.path.with_name("none")).snapshots() == []
    for step in (9, 1_000_000, 120):
        _write(memory, step)
    memory.new_partial(130)
    names = ["step-1000000", "step-000120", "step-000009"]
    assert [path.name for path in memory.snapshots()] == names
    memory.remove(120)
    memory.remove(120)
    assert [path.name for path in memory.snapshots()] == [names[0], names[2]]


def test_a_snapshot_replaces_an_older_one_of_its_step(memory: NodeMemory) -> None:
    _write(memory, 5, "old")
    _write(memory, 5, "new")
    assert (memory.snapshots()[0] / "file").read_text() == "new"
    assert sorted(path.name for path in memory.path.iterdir()) == ["alive", "step-000005"]


def test_a_snapshot_that_was_not_written_is_not_published(memory: NodeMemory) -> None:
    with pytest.raises(FileNotFoundError):
        memory.publish(5)


def test_a_sweep_leaves_what_was_published(memory: NodeMemory) -> None:
    _write(memory, 5)
    (memory.new_partial(6) / "file").touch()
    (memory.path / "step-000005.replaced").mkdir()
    memory.note("noticed", 1.5)
    (memory.path / "noticed.json.77").touch()
    memory.sweep()
    assert sorted(path.name for path in memory.path.iterdir()) == ["alive", "noticed.json", "step-000005"]


def test_a_killed_rank_holds_nothing_and_its_snapshots_stay(rank: subprocess.Popen[str]) -> None:
    memory = memory_of("/runs/a")
    (memory.new_partial(5) / "file").write_text("values")
    memory.publish(5)
    assert memory.is_held() and not memory.remove_if_unheld()
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    assert not memory.is_held()
    memory.hold()
    assert (memory.snapshots()[0] / "file").read_text() == "values"
    memory.release()
    assert memory.remove_if_unheld() and list(memory.path.parent.iterdir()) == []


def test_what_a_killed_process_had_begun_to_remove_is_in_no_later_one_s_way(memory: NodeMemory) -> None:
    for name in ("step-000005.replaced", f"../{memory.path.name}.removed-{os.getpid()}"):
        (memory.path / name / "left").mkdir(parents=True)
    _write(memory, 5)
    memory.remove(5)
    assert memory.snapshots() == []
    memory.close()
    assert list(memory.path.parent.iterdir()) == []


def test_a_job_whose_ranks_are_alive_is_named_to_another_one(
    rank: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_of("/runs/a")
    memory.hold()  # another rank of the same job, or one that a former start has left
    memory.release()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job2")
    monkeypatch.setattr("towpath.protect.memory._HELD_SECONDS", 0.0)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"by job none, whose ranks .* since .* job2\. Set TOWPATH_MEMORY"):
            memory.hold()
    rank.kill()
    rank.wait()
    memory.hold()
    memory.close()


def test_a_keeper_that_looks_is_no_other_job(monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    from towpath.protect import memory as module

    memory, original, looks = memory_of("/runs/a"), module.lock, iter((True,))
    memory.hold()
    memory.release()

    def lock(path: Path, how: int) -> int | None:
        is_held = bool(how & fcntl.LOCK_EX) and next(looks, False)
        return None if is_held else original(path, how)

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job2")
    monkeypatch.setattr(module, "lock", lock)
    memory.hold()
    assert (memory.path / "alive").read_text() == "job2"
    memory.close()


def test_a_normal_end_removes_the_folder_while_other_ranks_hold_it(rank: subprocess.Popen[str]) -> None:
    memory = memory_of("/runs/a")
    memory.hold()
    _write(memory, 5)
    memory.close()
    memory.close()
    assert list(memory.path.parent.iterdir()) == [] and not memory.is_held()


def test_a_rank_whose_folder_is_removed_while_it_waits_makes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    memory, flock, removed = memory_of("/runs/a"), fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_SH and not removed:
            removed.append(memory_of("/runs/a").remove_if_unheld())  # by a keeper, after the rank opened the file
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    memory.hold()
    assert removed == [True] and memory.is_held()
    memory.close()


def test_too_little_room_is_said_with_its_remedy(memory: NodeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.check_room(1)
    found: Any = SimpleNamespace(f_bavail=1000, f_frsize=4096, f_blocks=16384)
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    memory.check_room(4_096_000)
    with pytest.raises(CheckpointError, match=r"4\.1 MB free of 67\.1 MB.* needs 5 MB.*--shm-size.*TOWPATH_MEMORY"):
        memory.check_room(5_000_000)


def test_a_damaged_note_says_what_to_remove(memory: NodeMemory) -> None:
    (memory.path / "node.json").touch()
    with pytest.raises(CheckpointError, match=f"node.json is damaged. On this node, remove {memory.path}"):
        memory.noted("node")


def test_notes_are_whole_and_the_first_stays(memory: NodeMemory) -> None:
    assert memory.noted("noticed") is None
    memory.note("noticed", {"seconds": 1.5})
    memory.note("noticed", {"seconds": 2.5})
    assert memory.noted("noticed") == {"seconds": 1.5}
    memory.forget("noticed")
    memory.forget("noticed")
    assert sorted(path.name for path in memory.path.iterdir()) == ["alive"]
