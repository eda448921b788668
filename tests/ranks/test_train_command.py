"""`torchrun -m towpath train` as a command: what it prints, and how a signal ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from towpath import checkpoint
from towpath.train.data import prepare

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.toml"
TINY = [
    *("model.width=16", "model.depth=2", "model.heads=2", "data.tokens=tokens"),
    *("train.batch=4", "train.micro_batch=1", "train.length=16", "train.threads=1"),
]


def _command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The example, on two ranks, in another folder; its output goes where nobody looks at a terminal."""
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (folder / "text.txt").write_text("a line of text\n" * 400)
    prepare([str(folder / "text.txt")], folder / "tokens")
    return subprocess.Popen(
        [*torchrun, "-m", "towpath", "train", str(EXAMPLE), *TINY, *arguments],
        cwd=folder,
        env={**outside, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parity
def test_it_trains_in_any_folder(tmp_path: Path) -> None:
    done = _command(tmp_path, "train.steps=3")
    out, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    assert out.startswith("Where the time went (3 steps")
    assert "tokens: " in err and "zero3 on 1 × 2 cpu ranks" in err and "step 3: held-out loss" in err
    assert "checkpoint: towpath-run/checkpoints/step-000003" in err and "one rank" not in err
    rows = [json.loads(line) for line in (tmp_path / "towpath-run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["start", "train", "train", "train", "validation"]


@pytest.mark.parity
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_torchrun_told_to_stop_has_its_ranks_save(tmp_path: Path, number: signal.Signals) -> None:
    with _command(tmp_path, "train.steps=1000000") as done:
        assert done.stderr is not None
        assert any("1/1000000" in line for line in done.stderr), "it ended"
        done.send_signal(number)
        _, err = done.communicate(timeout=300)
    assert "stopped after step" in err, err
    assert checkpoint.latest(tmp_path / "towpath-run" / "checkpoints") is not None
