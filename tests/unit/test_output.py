"""What is printed may be lost when a reader leaves; what is computed is not, nor what is saved."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from towpath import checkpoint
from towpath.cli.terminal import survive_closed_pipes
from towpath.progress import show_progress
from towpath.train.data import prepare

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.toml"
TINY = [
    *("model.width=16", "model.depth=1", "model.heads=2", "train.steps=3", "train.batch=4", "train.micro_batch=1"),
    *("train.length=16", "train.threads=1", "data.tokens=tokens"),
]


# `python -m towpath`, and an exit code of its own if it has loaded what a training without stages does not need.
COMMAND = """
import os, sys
from towpath.cli import main
try:
    main.main()
finally:
    if "torch.distributed.pipelining" in sys.modules:
        os._exit(9)
"""


@contextmanager
def _without_reader() -> Generator[int]:
    """A pipe whose reader has left before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)


@contextmanager
def _output_to(descriptor: int) -> Generator[None]:
    """This process's, as `main` makes it, with stdout and stderr at `descriptor`."""
    kept = os.dup(1), os.dup(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "ascii"))
        patch.setattr(sys, "stderr", io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "ascii", line_buffering=True))
        try:
            for number in (1, 2):
                os.dup2(descriptor, number)
            survive_closed_pipes()
            yield
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            for number, before in zip((1, 2), kept, strict=True):
                os.dup2(before, number)
                os.close(before)


def _run(folder: Path, *arguments: str, **to: int) -> int:
    """`towpath ARGUMENTS` as a process; its exit code."""
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment = {**outside, "FORCE_COLOR": "1"}  # rich then draws its bars wherever stderr goes
    return subprocess.run([sys.executable, "-c", COMMAND, *arguments], cwd=folder, env=environment, **to).returncode  # pyright: ignore


def test_lines_live_lines_and_libraries_are_quiet_when_the_reader_has_left() -> None:
    with _without_reader() as pipe, _output_to(pipe):
        for _ in range(3):
            print("a line", flush=True)
            print("a line", file=sys.stderr)
        with show_progress("a bar") as say:
            for done in range(3):
                say(f"{done} of 3")
        for number in (1, 2):
            os.write(number, b"a library's")
        sys.stdout.flush()


def test_what_the_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out, _output_to(out.fileno()):
        print("2 × 2", flush=True)
    assert (tmp_path / "out").read_text() == "2 \\xd7 2\n"


def test_a_training_that_nobody_reads_trains_and_saves_to_its_end(tmp_path: Path) -> None:
    """Without stages it does not import pipelining."""
    (tmp_path / "text.txt").write_text("a line of text\n" * 400)
    prepare([str(tmp_path / "text.txt")], tmp_path / "tokens")
    with _without_reader() as pipe:
        code = _run(tmp_path, "train", str(EXAMPLE), *TINY, "checkpoint.every=2", stdout=pipe, stderr=pipe)
    assert code == 0
    folder = tmp_path / "towpath-run"
    steps = [checkpoint.verify(folder / "checkpoints" / f"step-{step:06}") for step in (2, 3)]
    assert steps == [None, None]
    rows = [json.loads(line)["kind"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == ["start", "train", "train", "train", "validation"]
