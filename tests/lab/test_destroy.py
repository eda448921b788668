"""A node is destroyed with everything that is on it, and rebuilt empty, while the others go on."""

from __future__ import annotations

import os
import re
import signal
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lab import Lab
from lab.errors import LabError
from tests.lab.test_leftovers import LINGER, networks_alive, networks_of, processes_with
from tests.ranks.strategies import seldom
from towpath.topology.cluster import Topology

HANGS_SECONDS = 120
# Writes to the memory and the disk of its node, tells what else is there, and stays.
KEEPS = (
    "import os, signal, sys\n"
    "from pathlib import Path\n"
    "places = [Path('/dev/shm'), Path(sys.argv[1])]\n"
    "found = [path.name for place in places for path in sorted(place.iterdir())]\n"
    "for place in places: (place / os.uname().nodename).write_bytes(bytes(1000))\n"
    "os.write(1, f'{os.uname().nodename} found {found}\\n'.encode())\n"
)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(Topology(2, 1), head=True) as made:
        yield made


def found_by_node(lab: Lab) -> list[str]:
    output = lab.run(["-c", KEEPS, str(lab.disk)], launcher="direct", capture=True, timeout_seconds=60).output
    return sorted((output or "").splitlines())


def test_each_node_has_memory_and_a_disk_of_its_own_until_it_is_destroyed(lab: Lab) -> None:
    empty = ["node0 found []", "node1 found []"]
    assert found_by_node(lab) == empty
    assert found_by_node(lab) == ["node0 found ['node0', 'node0']", "node1 found ['node1', 'node1']"]
    assert not list(lab.disk.iterdir())  # on the host
    lab.destroy(1)
    lab.rebuild(1)
    assert found_by_node(lab) == ["node0 found ['node0', 'node0']", "node1 found []"]


def mounted_anywhere(devices: set[int], token: str) -> set[int]:
    """Return which of the devices a process sees, with a file of this name. The kernel gives their numbers again."""
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for line in (folder / "mountinfo").read_text().splitlines():
                _, _, number, _, target, *_ = line.split(" ")
                device = os.makedev(*map(int, number.split(":")))
                if device in devices and (folder / "root" / target.lstrip("/") / token).exists():
                    found.add(device)
    return found


def test_memory_and_disk_of_a_destroyed_node_are_mounted_nowhere(lab: Lab) -> None:
    token = uuid.uuid4().hex
    script = (
        "import os\n"
        "for place in ('/dev/shm', os.environ['DISK']):\n"
        f"    open(os.path.join(place, '{token}'), 'x').close()\n"
        "    os.write(1, f'{os.stat(place).st_dev}\\n'.encode())\n"
    )
    output = lab.run(["-c", script], env={"DISK": str(lab.disk)}, launcher="direct", capture=True).output or ""
    before = {int(device) for device in output.split()}
    assert len(before) == 4
    with lab.start(["-c", "import signal; signal.pause()"], launcher="direct"):  # every node is in use
        while mounted_anywhere(before, token) != before:
            pass
        lab.destroy(1)
        lab.rebuild(1)
        assert len(mounted_anywhere(before, token)) == 2
    lab.close()
    assert not mounted_anywhere(before, token)


@pytest.mark.parametrize("silent", [False, seldom(True)], ids=["told", "silent"])
def test_a_destroyed_node_takes_its_daemons_along_and_no_other(lab: Lab, tmp_path: Path, silent: bool) -> None:
    token = f"token-{tmp_path}"
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    reader = os.open(ready, os.O_RDWR)
    # Each node has a process and a daemon, in a session of its own, and both ignore signals.
    pipe = f"import os; os.dup2(os.open({str(ready)!r}, os.O_WRONLY), 1)"
    program = f"{pipe}; __file__ = {LINGER!r}; exec(open(__file__).read())"
    with lab.start(["-c", program, token], launcher="direct") as run:
        lines = b""
        while lines.count(b"ready") < 2:
            lines += os.read(reader, 100)
        before = {pid: networks_of([pid]) for pid in processes_with(token)}
        assert len(before) == 4
        lab.destroy(1, silent=silent)
        after = processes_with(token)
        assert len(after) == 2
        assert not {network for pid in before.keys() - after for network in before[pid]} & networks_alive()
        with pytest.raises(LabError, match="node 1 is destroyed"):
            lab.cut(1)
        assert run.wait(HANGS_SECONDS).returncode == -signal.SIGKILL
    os.close(reader)
    assert not processes_with(token)
    with pytest.raises(LabError, match=r"nodes \[1\] are destroyed"):
        lab.run(["-c", "pass"], launcher="direct")


@pytest.mark.parity
def test_jobs_apart_fail_and_restart_each_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "print('a world of', os.environ['WORLD_SIZE'], flush=True)\n"
        "failed = pathlib.Path(sys.argv[1])\n"
        "if os.uname().nodename == 'node0' and not failed.exists():\n"
        "    failed.touch()\n"
        "    raise SystemExit('once')\n"
    )
    with Lab(Topology(2, 1)) as made:
        command = [str(script), str(tmp_path / "failed")]
        with made.elastic(command, tmp_path / "output", restarts=1, apart=True) as job:
            for node in range(2):
                job.start(node)
            assert job.ended(HANGS_SECONDS) == {0: 0, 1: 0}, job.output(0) + job.output(1)
            assert [job.output(node).count("a world of 1") for node in range(2)] == [2, 1]


@pytest.mark.parity
def test_an_elastic_job_goes_on_with_a_rebuilt_node(lab: Lab, tmp_path: Path) -> None:
    # No rank imports torch. Those of the first start wait for the end of their node, or of a peer's.
    script = tmp_path / "script.py"
    script.write_text(
        "import os, socket, sys\n"
        "rank = int(os.environ['RANK'])\n"
        "os.write(1, b'started\\n')\n"
        "with socket.create_server(('', 7000)) as server:\n"
        "    while True:\n"
        "        try: peer = socket.create_connection((f'node{1 - rank}', 7000)); break\n"
        "        except OSError: pass\n"
        "    other, _ = server.accept()\n"
        "    os.write(1, b'met\\n')\n"
        "    if not os.path.exists(sys.argv[1]): raise SystemExit(f'the peer said {peer.recv(1)}')\n"
        "    os.write(1, b'done\\n')\n"
    )
    again = tmp_path / "again"
    with lab.elastic([str(script), str(again)], tmp_path / "output") as job:
        for node in range(2):
            job.start(node)
        while not all("met" in job.output(node) for node in range(2)):
            assert not job.ended(0.05), job.output(0) + job.output(1)
        again.touch()
        lab.destroy(0)
        lab.rebuild(0)
        job.start(0)
        assert job.ended(HANGS_SECONDS) == {0: 0, 1: 0}, job.output(0) + job.output(1)
        assert len(re.findall("^started", job.output(1), re.MULTILINE)) == 2
