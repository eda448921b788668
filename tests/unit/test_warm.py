"""Ranks that fork from a warm process: they are what fresh processes would be, and end with their stubs."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.documented import ROOT
from tests.unit.test_keeper import keepers, wait_for_end
from towpath.protect import warm as module
from towpath.protect.memory import NodeMemory
from towpath.protect.warm import identity

WARM = "import sys; sys.path[0] = '{}'; from towpath.protect import warm; warm.PRELOAD = {}; warm.main()"
# The names of sockets are short.
SCRATCH = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
LAUNCHED = {"RANK": "3", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "a"}


class Node:
    """A folder of memory, and processes that use it from another folder."""

    def __init__(self, folder: Path) -> None:
        self.base, self.folder = folder / f"towpath-{os.getuid()}", folder / "run"
        self.base.mkdir(mode=0o700)
        self.folder.mkdir()
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONUNB"))}
        paths = {"PYTHONPATH": str(ROOT), "TOWPATH_MEMORY": str(folder)}
        self.environment = {**outside, **paths, "OMP_NUM_THREADS": "1", **LAUNCHED}

    @property
    def sockets(self) -> list[Path]:
        return list(self.base.glob("warm-*"))

    def start(self, *command: str, program: Sequence[str] = (sys.executable,), **changed: str) -> subprocess.Popen[str]:
        """Start Python with pipes. `changed`: variables of its environment."""
        return subprocess.Popen(
            [*program, *command],
            cwd=self.folder,
            env={**self.environment, **changed},
            start_new_session=True,  # as torchrun starts ranks
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def train(self, *arguments: str, **changed: str) -> subprocess.Popen[str]:
        return self.start("-m", "towpath", "train", *arguments, **changed)

    def wait_for_socket(self, process: subprocess.Popen[str], before: Sequence[Path] = ()) -> None:
        while not any(path.suffix == ".sock" and path not in before for path in self.sockets):
            with suppress(subprocess.TimeoutExpired):  # it needs the processor more than this loop does
                process.wait(0.02)
                assert process.stderr is not None
                raise AssertionError(process.stderr.read())

    @contextmanager
    def warm(self, preload: tuple[str, ...] = ("tests.unit.warm_rank",)) -> Generator[subprocess.Popen[str]]:
        """A warm process that serves. At the end it ends."""
        with self.start("-c", WARM.format(self.folder, preload)) as process:
            try:
                self.wait_for_socket(process)
                yield process
                assert process.stdin is not None
                process.stdin.close()
                assert process.wait() in (0, -signal.SIGKILL)
            finally:
                process.kill()


@pytest.fixture(scope="module")
def served() -> Generator[Node]:
    """A node with a warm process."""
    with tempfile.TemporaryDirectory(prefix="towpath-warm-", dir=SCRATCH) as folder:
        node = Node(Path(folder))
        with node.warm():
            yield node
        assert node.sockets == []


@pytest.fixture
def node() -> Generator[Node]:
    """A node without one."""
    with tempfile.TemporaryDirectory(prefix="towpath-warm-", dir=SCRATCH) as folder:
        yield Node(Path(folder))


def _waiting(stub: subprocess.Popen[str]) -> int:
    """Return the process of a rank that waits for signals."""
    assert stub.stdout is not None and stub.stderr is not None
    line = stub.stdout.readline()
    assert line.strip().isdigit(), stub.stderr.read()
    assert int(line) != stub.pid
    return int(line)


def _starts_as_usual(process: subprocess.Popen[str]) -> bool:
    """Return whether it is no fork: then `towpath train` looks for a file, and finds none."""
    out, err = process.communicate()
    return process.returncode == 2 and not out and "end" in err


def test_a_rank_is_what_a_fresh_process_would_be(served: Node) -> None:
    # The fresh one acts too, because it imports the acts before the command.
    fresh = "import os, runpy, sys; sys.path[0] = os.getcwd(); import tests.unit.warm_rank; "
    fresh += "import towpath.protect.warm as warm; warm.run_warm = lambda: None; "
    fresh += "runpy.run_module('towpath', run_name='__main__', alter_sys=True)"
    found: list[Any] = []
    for start in (["-m", "towpath"], ["-c", fresh]):
        shell = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable]
        with served.start(*start, "train", "state", program=shell, RANK="5", SLURM_STEP="7") as process:
            out, err = process.communicate("line\n")
        assert process.returncode == 0, err
        found.append(json.loads(out))
    forked, expected = found
    assert forked.pop("orig_argv")[1:] == ["-m", "towpath", "train", "state"] != expected.pop("orig_argv")[1:]
    assert len(set(forked.pop("descriptors")) - set(expected.pop("descriptors"))) == 1  # the pipe to the stub
    assert forked.pop("forks") and not expected.pop("forks")
    for state in (forked, expected):  # each has its own
        del state["random"]
    assert forked == expected
    assert forked["environ"]["RANK"] == "5" and forked["stdin"] == "line\n" and signal.SIGHUP in forked["ignored"]


def test_ranks_draw_different_numbers(served: Node) -> None:
    drawn: list[Any] = []
    for _ in range(2):
        with served.train("state") as process:
            drawn += json.loads(process.communicate()[0])["random"]
    assert len(set(drawn)) == 4


def test_what_python_u_prints_is_seen_at_once(served: Node) -> None:
    with served.start("-u", "-m", "towpath", "train", "state") as process:
        assert json.loads(process.communicate()[0])["by_line"] == [True, True]


@pytest.mark.parametrize("code", [0, 3])
def test_a_stub_ends_with_its_rank_s_exit_code_and_output(served: Node, code: int) -> None:
    with served.train("end", str(code)) as process:
        assert process.communicate() == ("outat exit\n", "err") and process.returncode == code


def test_an_error_is_shown_as_ever(served: Node) -> None:
    with served.train("raise", "too large") as process:
        _, err = process.communicate()
    assert process.returncode == 1 and err.startswith("Traceback") and err.endswith("\nValueError: too large\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGINT])
def test_a_stub_dies_by_the_signal_of_its_rank(served: Node, number: signal.Signals) -> None:
    with served.train("die", str(int(number))) as process:
        process.communicate()
    assert process.returncode == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_stub_is_the_rank_s(served: Node, number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # nohup lets its children ignore SIGHUP
    try:
        process = served.train("wait", "handle")
    finally:
        signal.signal(number, before)
    with process:
        _waiting(process)
        process.send_signal(number)
        assert process.communicate() == (f"{number.name}\n", "") and process.returncode == number


def test_a_signal_that_nobody_handles_ends_both(served: Node) -> None:
    with served.train("wait", "") as process:
        rank = _waiting(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    wait_for_end(rank)


def test_a_stopped_stub_stops_its_rank_and_goes_on_with_it(served: Node) -> None:
    with served.train("wait", "handle") as process:
        rank = _waiting(process)
        process.send_signal(signal.SIGTSTP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        while Path(f"/proc/{rank}/stat").read_text().rpartition(") ")[2][0] != "T":
            pass
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        assert process.communicate()[0] == "SIGTERM\n"


def test_a_killed_stub_takes_its_rank_along(served: Node) -> None:
    with served.train("wait", "handle") as process:
        rank = _waiting(process)
        process.kill()
        wait_for_end(rank)


def test_a_rank_that_nobody_waits_for_any_more_ends_with_an_error(served: Node) -> None:
    with served.train("wait", "handle") as process:
        rank = _waiting(process)
        parent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(") ")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        assert "exit code is unknown" in process.communicate()[1] and process.returncode == 1
        wait_for_end(rank)


@pytest.mark.parametrize("changed", [{"OMP_NUM_THREADS": "7"}, {"PYTORCH_ALLOC_CONF": "x"}, {"PYTHONPATH": "/"}])
def test_a_process_that_differs_starts_as_usual(served: Node, changed: dict[str, str]) -> None:
    if "PYTHONPATH" in changed:
        changed = {"PYTHONPATH": f"{ROOT}{os.pathsep}/"}
    with served.train("end", "0", **changed) as process:
        assert _starts_as_usual(process)


def test_a_process_under_a_debugger_or_with_another_command_starts_as_usual(served: Node) -> None:
    traced = "import sys, runpy; sys.settrace(lambda *_: None); sys.argv[1:] = ['train', 'end', '0']; "
    traced += "sys.path[0] = sys.argv.pop(); runpy.run_module('towpath', run_name='__main__', alter_sys=True)"
    with served.start("-c", traced, str(served.folder)) as process:
        assert _starts_as_usual(process)
    with served.start("-m", "towpath", "--version") as process:
        assert process.communicate()[0].startswith("towpath ")


@pytest.mark.parametrize("kind", ["nobody listens", "closed at once", "no answer", "not ours"])
def test_without_an_answer_a_process_starts_as_usual(node: Node, kind: str) -> None:
    program = "import os, signal, sys; sys.path[0] = os.getcwd(); from towpath.protect import warm; "
    with node.start("-c", program + "print(warm.identity())") as process:
        path = node.base / f"warm-{process.communicate()[0].strip()}.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        if kind != "nobody listens":
            listener.listen(1)
        if kind == "not ours":
            node.base.chmod(0o777)
        program += "warm._ANSWER_SECONDS = 0.05; " if kind == "no answer" else ""
        program += "sys.argv[1:] = ['train']; warm.run_warm(); "
        program += "print(warm.forks, signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
        with node.start("-c", program) as process:
            if kind == "closed at once":
                listener.accept()[0].close()
            assert process.communicate() == ("True set()\n", "")


def test_a_rank_whose_stub_has_given_up_does_nothing(served: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["towpath", "train", "write"])
    monkeypatch.chdir(served.folder)
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(served.sockets[0]))
        rank = module._ask(connection, reader, [])
    assert select.select([rank], [], [], 60)[0], "it is still there"
    for descriptor in (reader, writer, rank):
        os.close(descriptor)
    assert not (served.folder / "written").exists()


def test_it_ends_with_its_keeper_and_its_ranks_go_on(node: Node) -> None:
    with node.warm() as warm:
        process = node.train("wait", "handle")
        _waiting(process)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            warm.send_signal(number)
        with node.train("end", "3") as other:
            assert other.wait() == 3
    assert node.sockets == []
    with process:
        process.send_signal(signal.SIGUSR1)
        assert process.communicate()[0] == "SIGUSR1\n" and process.returncode == signal.SIGUSR1


def test_what_a_killed_one_left_is_removed_by_the_next(node: Node) -> None:
    with node.warm() as killed:
        killed.kill()
    (left,) = node.sockets
    left.rename(node.base / "warm-of-other-sources.7")
    with node.warm():
        assert node.sockets == [left]
        with node.train("end", "3") as process:
            assert process.wait() == 3


def test_of_two_that_are_alike_the_newer_serves_to_its_end(node: Node) -> None:
    with node.warm() as older:
        (path,) = node.sockets
        path.rename(node.base / "hidden")  # so that the newer one's is seen
        with node.warm():
            assert older.stdin is not None
            older.stdin.close()
            older.wait()
            with node.train("end", "3") as process:
                assert process.wait() == 3
    (node.base / "hidden").unlink()


def test_one_that_would_fork_without_its_threads_ends_instead(node: Node) -> None:
    (node.folder / "threads.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    with node.start("-c", WARM.format(node.folder, ("threads",))) as process:
        assert "has started threads" in process.communicate()[1] and process.returncode == 1


def test_changed_sources_are_no_longer_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "protect").mkdir()
    source = tmp_path / "core.py"
    source.touch()
    monkeypatch.setattr(module, "__file__", str(tmp_path / "protect" / "warm.py"))
    found = {identity()}
    compiled = tmp_path / "__pycache__"
    compiled.mkdir()
    (compiled / "core.cpython-311.pyc.140").symlink_to("gone")  # Python writes its bytecode under such a name first
    found.add(identity())
    os.utime(source, (1, 1))
    found.add(identity())
    source.write_text("x")
    os.utime(source, (1, 1))
    found.add(identity())
    before = os.umask(0o017)
    found.add(identity())
    os.umask(before)
    assert len(found) == 4


@pytest.mark.parity
def test_a_training_from_a_warm_process_equals_a_fresh_one(node: Node) -> None:
    from towpath.train.data import prepare

    (node.folder / "text.txt").write_text("a line of text\n" * 400)
    prepare([str(node.folder / "text.txt")], node.folder / "tokens")
    for name in LAUNCHED:
        del node.environment[name]
    options = ["data.tokens=tokens", "train.steps=3", "train.batch=4", "train.micro_batch=1", "train.length=16"]
    options += ["model.width=16", "model.depth=2", "model.heads=2"]

    def train(folder: str) -> tuple[list[Any], bool]:
        """Return losses and norms, and whether the process that was started has loaded torch."""
        with node.train(str(ROOT / "examples" / "gpt.toml"), *options, f"log.folder={folder}") as process:
            assert process.stderr is not None
            first = process.stderr.readline()
            loaded = "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
            err = process.communicate()[1]
        assert process.returncode == 0, first + err
        rows = map(json.loads, (node.folder / folder / "metrics.jsonl").read_text().splitlines())
        return [(row.get("loss"), row.get("gradient_norm")) for row in rows], loaded

    # PyTorch sets such variables in a rank before that starts the keeper.
    start = f"import os, sys; os.environ['TORCHINDUCTOR_CACHE_DIR'] = '/'; sys.path[0] = '{node.folder}'; "
    start += "from towpath.protect.memory import memory_of; "
    start += "memory = memory_of('x'); memory.hold(); from towpath.protect.keeper import start_keeper; "
    start += "start_keeper(memory, warm=True); print(memory.path, flush=True); input(); memory.close()"
    with node.start("-c", start, **LAUNCHED) as rank:
        assert rank.stdin is not None and rank.stdout is not None
        memory = NodeMemory(Path(rank.stdout.readline().strip()))
        found = [keeper] = keepers(memory)
        found += [int(pid) for pid in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()]
        node.wait_for_socket(rank)
        forked, loaded = train("forked")
        assert not loaded
        rank.communicate("\n")
    for pid in found:
        wait_for_end(pid)
    assert list(node.base.iterdir()) == []
    assert (forked, True) == train("fresh") and len(forked) == 5
