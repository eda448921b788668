"""`python -m lab run`: what it prints, what it writes, and how it answers a mistake."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab.command import app
from tests.documented import ROOT
from towpath.cli.main import _run

LAB = [sys.executable, "-m", "lab"]
SHAPE = ["run", "--nodes", "2", "--ranks", "1", "--inter", "200mbit"]


def command(*arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        [*before, *LAB, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120
    )


def test_a_failing_script_is_exit_code_1(tmp_path: Path) -> None:
    done = command(*SHAPE, "--direct", "--", "-c", "raise SystemExit(5)")
    assert done.returncode == 1
    assert "exit code 5" in done.stderr
    assert "What each link carried" in done.stdout


def test_a_bash_script_runs_on_each_node(tmp_path: Path) -> None:
    script = tmp_path / "name.sh"
    script.write_text('echo "$(uname -n) got $1"\n')
    done = command(*SHAPE, "--direct", "--", str(script), "this")
    assert done.returncode == 0
    assert "node0 got this" in done.stdout and "node1 got this" in done.stdout


def test_two_flats_are_a_choice_of_inter_and_the_table_is_of_their_rates(tmp_path: Path) -> None:
    links = tmp_path / "links.json"
    shape = ["run", "--nodes", "2", "--ranks", "1", "--inter", "flat", "--up", "50mbit", "--loss", "1%", "--direct"]
    done = command(*shape, "--json", str(links), "--", "-c", "pass")
    assert done.returncode == 0, done.stderr
    assert "(cables 100mbit down, 50mbit up, 20 ms, 1% lost;" in done.stdout
    record = json.loads(links.read_text())
    assert [record[name] for name in ("inter_bits_per_second", "up_bits_per_second")] == [100_000_000, 50_000_000]
    assert (record["latency_seconds"], record["loss"]) == (0.02, 0.01)


@pytest.mark.parity
def test_an_error_of_ours_in_a_script_is_one_line_of_each_rank_and_torchrun_adds_none(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, towpath\n"
        "torch.distributed.init_process_group('gloo')\n"
        "towpath.shard(torch.nn.Linear(2, 2), 'zero33')\n"
    )
    done = command(*SHAPE, "--", str(script))
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("towpath: rank")]
    assert lines and all(re.fullmatch(r"towpath: rank \d: train.py, line 3: .*zero33.*", line) for line in lines)
    assert "Traceback" not in done.stderr and "elastic" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "--nodes", "2", "--ranks", "1", "--inter", "fast", "--", "-c", "pass"], "not a rate: 'fast'"),
        ([*SHAPE, "--intra", "10", "--", "-c", "pass"], "not a rate: '10'"),
        ([*SHAPE, "--latency", "20", "--", "-c", "pass"], "not a time: '20'"),
        ([*SHAPE, "--loss", "0.01", "--", "-c", "pass"], "not a loss: '0.01'"),
        ([*SHAPE, "--", "missing.py"], "no script 'missing.py'"),
        ([*SHAPE, "--json", "missing/links.json", "--", "-c", "pass"], "no folder"),
        ([*SHAPE], "Missing argument"),
        (["run", "--nodes", "0", "--ranks", "1", "--inter", "1gbit", "--", "-c", "pass"], "--nodes"),
        (["raise"], "No such command"),
        ([], "Missing command"),
    ],
    ids=[
        "rate",
        "loopback-rate",
        "latency",
        "loss",
        "script",
        "json",
        "no-script",
        "no-nodes",
        "command",
        "no-command",
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(arguments, app, "python -m lab") == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not printed.out


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare, of util-linux, is missing")
def test_where_namespaces_are_forbidden_the_reason_is_told() -> None:
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; echo 0 > /proc/sys/user/max_net_namespaces; exec "$@"'
    before = ("unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh")
    done = command(*SHAPE, "--", "-c", "pass", before=before)
    assert done.returncode == 2
    assert "the kernel refuses them" in done.stderr
    assert "max_user_namespaces is 0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root, to give it up, and setpriv of util-linux"
)
def test_without_the_right_to_administer_a_user_namespace_serves() -> None:
    done = command(*SHAPE, "--direct", "--", "-c", "pass", before=("setpriv", "--bounding-set=-sys_admin"))
    assert done.returncode == 0, done.stderr


def test_the_command_does_not_load_torch() -> None:
    program = "import sys, lab.command, towpath.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
