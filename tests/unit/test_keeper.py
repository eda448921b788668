"""The keeper of a node: it outlives ranks and launchers, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_protect_memory import HOLD
from towpath.errors import CheckpointError
from towpath.protect import keeper
from towpath.protect.keeper import guard, remove_leftovers, start_keeper
from towpath.protect.memory import KEEPER, NodeMemory, lock, memory_of

# A rank as a launcher starts it: in a group of processes that the launcher will kill.
RANK = HOLD.replace(
    'print("held"',
    'from towpath.protect.keeper import start_keeper; start_keeper(memory_of(sys.argv[1]))\nprint("held"',
)


def keepers(memory: NodeMemory) -> list[int]:
    """Return the processes whose command line names the memory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"-c" in words and str(memory.path).encode() in words:
            found.append(int(path.parent.name))
    return found


def wait_for_end(pid: int) -> None:
    """Wait for the end of a process that is no child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([descriptor], [], [], 60)[0], f"process {pid} is still there"
    os.close(descriptor)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[NodeMemory]:
    monkeypatch.setenv("TOWPATH_MEMORY", str(tmp_path))
    memory = memory_of("/runs/a")
    memory.hold()
    yield memory
    memory.close()
    for pid in keepers(memory):
        wait_for_end(pid)
    assert not list(memory.path.parent.glob(f"{memory.path.name}*"))


def _held(memory: NodeMemory) -> int:
    held = lock(memory.path / KEEPER, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert held is not None, "another keeper has it"
    return held


class Clock:
    """Each pause takes a second, and a test acts in some of them."""

    def __init__(self, **acts: Callable[[], Any]) -> None:
        self.seconds, self._acts = 0, {int(name.removeprefix("at_")): act for name, act in acts.items()}

    def now(self) -> float:
        return self.seconds

    def pause(self, seconds: float) -> None:
        assert seconds == 1 and self.seconds < 1000
        self.seconds += 1
        self._acts.pop(self.seconds, lambda: None)()


def test_it_needs_no_torch_and_little_memory(memory: NodeMemory) -> None:
    start_keeper(memory)
    (pid,) = keepers(memory)
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    assert int(status["VmRSS"].split()[0]) < 20_000, "kB"
    assert os.getsid(pid) != os.getsid(0)
    assert {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()} == {
        "/dev/null",
        str(memory.path / "keeper.log"),
        str(memory.path / KEEPER),
    }
    assert (memory.path / "keeper.log").read_text() == ""


def test_a_second_one_ends_at_once(memory: NodeMemory) -> None:
    start_keeper(memory)
    first = keepers(memory)
    start_keeper(memory)
    assert keepers(memory) == first and len(first) == 1


def test_it_survives_signals_and_the_kill_of_its_rank_s_group(memory: NodeMemory) -> None:
    command = [sys.executable, "-c", RANK, "/runs/a"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == "held\n"
        (pid,) = keepers(memory)
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
    assert keepers(memory) == [pid]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_one_removes_nothing_and_another_takes_over(memory: NodeMemory, number: signal.Signals) -> None:
    start_keeper(memory)
    memory.new_partial(5)
    memory.publish(5)
    (pid,) = keepers(memory)
    os.kill(pid, number)
    wait_for_end(pid)
    assert [path.name for path in memory.snapshots()] == ["step-000005"]
    start_keeper(memory)
    (other,) = keepers(memory)
    assert other != pid


def test_it_removes_the_memory_of_ranks_that_never_come_back(memory: NodeMemory) -> None:
    start_keeper(memory, lease_seconds=0)
    (pid,) = keepers(memory)
    memory.release()
    wait_for_end(pid)
    assert not memory.path.exists()


def test_the_lease_begins_when_the_last_rank_ends_and_ends_with_the_next(memory: NodeMemory) -> None:
    clock = Clock(at_5=memory.release, at_14=memory.hold, at_20=memory.release)
    guard(memory, _held(memory), 10, clock.now, clock.pause)
    assert clock.seconds == 29 and not memory.path.exists()


def test_it_ends_with_the_folder_even_if_another_job_made_one_since(memory: NodeMemory) -> None:
    def again() -> None:
        memory.close()
        memory.hold()
        os.close(_held(memory))

    clock = Clock(at_3=again)
    guard(memory, _held(memory), 10, clock.now, clock.pause)
    assert clock.seconds == 3 and memory.is_held()


def test_a_rank_that_comes_back_at_the_last_moment_keeps_its_memory(
    memory: NodeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, removed = NodeMemory.remove_if_unheld, []

    def late(self: NodeMemory) -> bool:
        if not removed:
            memory.hold()
        removed.append(remove(self))
        return removed[-1]

    monkeypatch.setattr(NodeMemory, "remove_if_unheld", late)
    clock = Clock(at_1=memory.release, at_20=memory.release)
    guard(memory, _held(memory), 10, clock.now, clock.pause)
    assert removed == [False, True] and clock.seconds == 29


def test_what_dead_jobs_left_is_removed_after_the_lease_and_nothing_else(memory: NodeMemory) -> None:
    base = memory.path.parent
    old, new, kept = (base / (digit * 16) for digit in "123")
    for path in (old, new, kept, base / f"{'4' * 16}.removed-1", base / "mine"):
        path.mkdir()
        (path / "step-000001").mkdir()
    for path in (old, kept, memory.path, base / "mine"):
        os.utime(path, (0, 0))
    held = _held(NodeMemory(kept))  # its keeper is alive
    os.utime(kept, (0, 0))
    remove_leftovers(base, 1000)
    assert {path.name for path in base.iterdir()} == {memory.path.name, new.name, kept.name, "mine"}
    os.close(held)


def test_one_that_cannot_start_says_why(memory: NodeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit('no memory')"])
    with pytest.raises(CheckpointError, match=r"exit code 1; expected it to start.*no memory"):
        start_keeper(memory)


def test_one_that_hangs_when_it_starts_is_an_error(memory: NodeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(CheckpointError, match=f"did not start within 60 s.*{sys.executable}.*without protect"):
        start_keeper(memory)
