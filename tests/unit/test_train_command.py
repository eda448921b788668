"""`towpath train` as a command: what it prints, its exit codes, and the ranks that it starts itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from towpath.cli.main import _run
from towpath.train.config import Config

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
    with _command(text.parent, "--ranks", "2", "data.text=text.txt", "train.steps=1000000") as done:
        assert done.stderr is not None
        while "1/1000000" not in (line := done.stderr.readline()):
            assert line, "it ended"
        first, second = Path(f"/proc/{done.pid}/task/{done.pid}/children").read_text().split()
        os.kill(int(second), signal.SIGKILL)
        _, err = done.communicate(timeout=300)
    told = [line for line in err.splitlines() if line.startswith("towpath")]
    assert done.returncode == 1
    assert "towpath: rank 1 was ended by SIGKILL (was memory short?); the other ranks are ended too." in told
    assert len(told) <= 2 and all("rank 1" in line for line in told)
    assert "was not saved; there is no checkpoint of this run" in err and "Traceback" not in err
    assert not Path("/proc", first).exists()


def test_a_port_in_use_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = _command(tmp_path, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        _, err = done.communicate(timeout=300)
    assert done.returncode == 2
    assert err.startswith(f"towpath: port in use: the ranks are to meet at 127.0.0.1:{port}")
    assert len(err.splitlines()) == 1


def test_print_config_writes_a_file_that_trains_identically(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["train.steps=3", "strategy.name=mics", "strategy.group=[2, 1]", "log.folder=a b"]
    assert _run(["train", str(EXAMPLE), *overrides, "--print-config"]) == 0
    written = tmp_path / "written.toml"
    written.write_text(capsys.readouterr().out)
    assert max(map(len, written.read_text().splitlines())) <= 100
    config = Config.load(written)
    assert config == Config.load(EXAMPLE, overrides)
    assert (config.train.steps, config.strategy.group, config.log.folder) == (3, (2, 1), "a b")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere.toml"], "cannot read the configuration nowhere.toml: No such file or directory."),
        ([str(EXAMPLE), "train.stepz=3"], "did you mean 'steps'?"),
        ([str(EXAMPLE), "--ranks", "3"], "3 ranks × train.micro_batch 4 compute 12 at once"),
        ([str(EXAMPLE), "--ranks", "0"], "--ranks"),
        ([str(EXAMPLE), "steps"], "'steps' is not an override"),
        ([], "Missing argument 'CONFIG.toml'"),
    ],
    ids=["no-file", "key", "batch", "ranks", "override", "no-argument"],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["train", *arguments]) == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert len(printed.err.splitlines()) == 1 and not printed.out


def test_ranks_are_started_by_one_launcher_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert _run(["train", str(EXAMPLE), "--ranks", "2"]) == 2
    assert "a launcher has placed this one already" in capsys.readouterr().err
