"""`towpath train --ranks 2` as a command: what it prints, its exit codes, and the ranks that it starts itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks.server import start_command
from towpath.cli import main
from towpath.train import launch

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.toml"
TINY = [
    *("model.width=16", "model.depth=2", "model.heads=2"),
    *("train.batch=4", "train.micro_batch=1", "train.length=16", "train.evaluate_batches=1", "train.threads=1"),
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a line of text\n" * 400)
    return path


def _command(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`towpath train examples/gpt.toml` in another folder; its output goes where nobody looks at a terminal."""
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-m", "towpath", "train", str(EXAMPLE), *TINY, *arguments],
        cwd=folder,
        env={**outside, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "100", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parity
def test_it_trains_in_any_folder_on_ranks_of_its_own(text: Path) -> None:
    done = _command(text.parent, "--ranks", "2", "data.text=text.txt", "train.steps=3")
    out, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    assert out.startswith("Where the time went (3 steps")
    told = err.splitlines()
    assert told[0].startswith("text.txt: ") and "zero3 on 1 × 2 cpu ranks" in told[1]
    assert told[-2].startswith("step 3: held-out loss")
    assert told[-1] == "checkpoint: towpath-run/checkpoints/step-000003"
    assert max(map(len, [*told, *out.splitlines()])) <= 100
    rows = [json.loads(line) for line in (text.parent / "towpath-run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["start", "train", "train", "train", "validation"]


@pytest.mark.parity
def test_what_cannot_begin_is_one_line_of_each_rank_and_exit_code_2(tmp_path: Path) -> None:
    done = _command(tmp_path, "--ranks", "2", "data.text=nowhere.txt")
    out, err = done.communicate(timeout=300)
    assert done.returncode == 2, err
    assert not out
    told = err.splitlines()
    assert len(told) == 2
    assert all(line.startswith("towpath: nowhere.txt is not there") for line in told)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc that tells a process's children")
def test_a_killed_rank_ends_the_others_and_is_named(text: Path) -> None:
    errors, arguments = text.parent / "errors", ("--ranks", "2", "data.text=text.txt", "train.steps=1000000")
    os.mkfifo(errors)
    environment = {"XDG_CACHE_HOME": str(text.parent / "cache"), "COLUMNS": "100"}
    done = start_command(_forked, environment, Path(os.devnull), errors, text.parent, arguments)
    try:
        with errors.open() as lines:
            while "1/1000000" not in (line := lines.readline()):
                assert line, "it ended"
            first, second = Path(f"/proc/{done.pid}/task/{done.pid}/children").read_text().split()
            os.kill(int(second), signal.SIGKILL)
            err = lines.read()
        done.join(60)
    finally:
        done.kill()
        done.join()
    told = [line for line in err.splitlines() if line.startswith("towpath")]
    assert done.exitcode == 1
    assert "towpath: rank 1 was ended by SIGKILL (was memory short?); the other ranks are ended too." in told
    assert len(told) <= 2 and all("rank 1" in line for line in told)
    assert "was not saved; there is no checkpoint of this run" in err and "Traceback" not in err
    assert not Path("/proc", first).exists()


def _forked(folder: Path, arguments: tuple[str, ...]) -> None:
    """The command, whose ranks are forks of this process: none of them has to load torch."""
    os.chdir(folder)
    launch.subprocess = SimpleNamespace(Popen=_Fork, DEVNULL=subprocess.DEVNULL)  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv[1:] = ["train", str(EXAMPLE), *TINY, *arguments]
    main.main()


class _Fork:
    """What `towpath.train.launch` uses of subprocess.Popen."""

    def __init__(self, command: list[str], env: dict[str, str], **_: Any) -> None:
        assert command[:3] == [sys.executable, "-m", "towpath"]
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code: Any = 1
        try:
            os.setpgid(0, 0)
            os.environ.clear()
            os.environ.update(env)
            sys.argv[1:] = command[3:]
            main.main()
        except SystemExit as ended:
            code = ended.code
        finally:
            sys.stderr.flush()
            os._exit(code or 0)

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if self.returncode is None:
            os.waitpid(self.pid, 0)


@pytest.mark.parity
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_ranks_of_a_killed_command_stop_and_save(text: Path) -> None:
    with _command(text.parent, "--ranks", "2", "data.text=text.txt", "train.steps=1000000") as done:
        assert done.stderr is not None
        while "1/1000000" not in (line := done.stderr.readline()):
            assert line, "it ended"
        done.kill()
        _, err = done.communicate(timeout=300)  # it waits for the ranks, which have the same standard error
    assert "stopped after step" in err
    assert any((text.parent / "towpath-run" / "checkpoints").glob("step-*/manifest.json"))
