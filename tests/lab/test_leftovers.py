"""A lab leaves nothing behind: no process, namespace, link, mount or file, however it ends."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lab import Lab
from lab.folders import make_folder, sweep_folders
from tests.ranks.strategies import seldom
from towpath.topology.cluster import Topology

LINGER = str(Path(__file__).parent / "linger.py")
# Loaded machines are slow; nothing waits this long on another.
PATIENCE_SECONDS = 60


def processes_with(token: str) -> list[int]:
    """Processes that have `token` among their arguments, wherever on this machine."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if token.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def networks_of(pids: list[int]) -> set[str]:
    return {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}  # noqa: PTH115 (the link's text)


def networks_alive() -> set[str]:
    """The network namespaces that any process is in."""
    found: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.add(os.readlink(folder / "ns/net"))  # noqa: PTH115
    return found


def folders_of(owner: int) -> list[Path]:
    return [path for path in Path(tempfile.gettempdir()).glob("towpath-lab-*") if path.name.split("-")[3] == str(owner)]


def guards_of(owner: int) -> list[int]:
    """The guards (keeper.py) of an owner's labs."""
    return [int((folder / "guard").read_text().split()[0]) for folder in folders_of(owner)]


@pytest.fixture
def host() -> Iterator[None]:
    """The host's links, and what is mounted in a lab's folder, are the same after the test as before it.

    Other mounts may come and go: this machine has other tests, and other users.
    """

    def look() -> tuple[list[str], list[str]]:
        links = re.findall(r"^ *(\S+):", Path("/proc/self/net/dev").read_text(), re.MULTILINE)
        return links, [line for line in Path("/proc/self/mounts").read_text().splitlines() if "towpath-lab-" in line]

    before = look()
    yield
    assert look() == before


@pytest.fixture
def token(tmp_path: Path) -> str:
    return f"token-{tmp_path}"


@pytest.mark.parametrize("ending", ["success", "failure", "exception"])
def test_nothing_is_left_by_a_lab_of_this_process(host: None, token: str, ending: str) -> None:
    before = folders_of(os.getpid())  # of the labs that other tests share
    with suppress(ZeroDivisionError), Lab(Topology(2, 1), inter="200mbit", intra="1gbit") as lab:
        assert len(folders_of(os.getpid())) == len(before) + 1
        if ending == "success":
            lab.run(["-c", "pass", token], launcher="direct")
        else:
            with lab.start([LINGER, token], launcher="direct"):
                if ending == "exception":
                    raise ZeroDivisionError
        assert not processes_with(token)  # a run ends with its last process, though the lab lives on
    assert not processes_with(token)
    assert folders_of(os.getpid()) == before


class Command:
    """`python -m lab run` on two nodes with a script that will not end, at the moment when every daemon is up."""

    def __init__(self, token: str) -> None:
        self.token = token
        line = [sys.executable, "-m", "lab", "run", "--nodes", "2", "--ranks", "1"]
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # tests started in the background: it would be inherited
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            [*line, "--inter", "flat", "--direct", "--", LINGER, token],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.exits: list[int] = []

    def wait_until_up(self) -> None:
        assert self.process.stdout is not None
        assert [self.process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        mine = processes_with(self.token)
        self.inside = [pid for pid in mine if pid != self.process.pid]
        assert len(self.inside) == 4, "a rank and its daemon on each of two nodes"
        self.networks = networks_of(self.inside)
        assert len(self.networks) == 2
        self.guards = guards_of(self.process.pid)
        own = [pid for folder in folders_of(self.process.pid) for pid in processes_with(folder.name)]
        assert len(own) == 6, "the guard, the keeper, and of each node the first process and the delayed cable"
        self.exits = [os.pidfd_open(pid) for pid in (*self.inside, *own)]

    def wait_until_gone(self) -> None:
        """For deaths that are the kernel's to bring about: nobody waits for these processes but their own parents."""
        for descriptor in self.exits:
            ready, _, _ = select.select([descriptor], [], [], PATIENCE_SECONDS)
            assert ready, "a process of the lab outlives it"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        for descriptor in self.exits:
            os.close(descriptor)


@pytest.fixture
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labs of this test have their folders to themselves. Labs of other tests sweep what dead owners leave."""
    folder = str(tmp_path_factory.mktemp("t"))
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)


@pytest.fixture
def command(token: str, own_folders: None) -> Iterator[Command]:
    running = Command(token)
    try:
        running.wait_until_up()
        yield running
    finally:
        running.close()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), seldom(signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_nothing_is_left_when_the_command_is_interrupted(
    host: None, command: Command, number: signal.Signals, code: int
) -> None:
    command.process.send_signal(number)
    _, errors = command.process.communicate(timeout=PATIENCE_SECONDS)
    assert command.process.returncode == code
    assert "Traceback" not in errors
    # At once, without waiting: the command took everything down before it left.
    assert not processes_with(command.token)
    assert not command.networks & networks_alive()
    assert not folders_of(command.process.pid)


def test_a_killed_owner_takes_its_lab_along(host: None, command: Command) -> None:
    command.process.kill()
    command.wait_until_gone()
    assert not command.networks & networks_alive()
    assert not folders_of(command.process.pid)


def test_a_child_that_the_owner_forked_does_not_keep_the_lab_up(host: None) -> None:
    program = (
        "import os, signal\n"
        "from lab import Lab\n"
        "from towpath.topology.cluster import Topology\n"
        "lab = Lab(Topology(1, 1))\n"
        "child = os.fork()\n"
        "if child == 0: signal.pause()\n"
        "os.write(1, f'{child}\\n'.encode())\n"
        "signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        (guard,) = guards_of(owner.pid)
        gone = os.pidfd_open(guard)
        owner.kill()
        try:
            assert select.select([gone], [], [], PATIENCE_SECONDS)[0], "the lab outlives its owner"
        finally:
            os.kill(child, signal.SIGKILL)  # it holds a copy of the lab's socket, and of the pipe
            os.close(gone)


def test_when_owner_and_guard_are_killed_the_kernel_ends_the_rest_and_the_next_lab_sweeps(
    host: None, command: Command
) -> None:
    for pid in (command.process.pid, *command.guards):
        os.kill(pid, signal.SIGKILL)
    command.process.wait()
    command.wait_until_gone()
    assert not command.networks & networks_alive()
    assert len(folders_of(command.process.pid)) == 1
    Lab(Topology(1, 1)).close()
    assert not folders_of(command.process.pid)


def test_a_stopped_guard_of_a_dead_owner_is_swept(command: Command) -> None:
    (guard,) = command.guards
    os.kill(guard, signal.SIGSTOP)
    command.process.kill()
    command.process.wait()
    sweep_folders()
    command.wait_until_gone()
    assert not folders_of(command.process.pid)


def test_a_sweep_keeps_what_has_an_owner(own_folders: None) -> None:
    mine = make_folder()
    strangers = mine.with_name(mine.name.replace(f"-{os.getpid()}-", "-1-", 1))
    strangers.mkdir()
    sweep_folders()
    assert mine.exists()
    assert not strangers.exists()  # its owner's pid lives, but was started at another time
    shutil.rmtree(mine)
