"""Every command of the documentation that one machine can run is run; tests/documented.py tells which are not."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.documented import COMMANDS, ROOT, Fence, all_fences, commands, fences, printed
from tests.ranks.strategies import seldom
from towpath.cli import main

FENCES = [fence for fence in all_fences() if fence.language in COMMANDS]
QUICK = [fence for fence in FENCES if fence.language == "bash" and not fence.said]
CONSOLES = [fence for fence in FENCES if fence.language == "console"]
# Other plans are ready sooner.
_SLOW = re.compile("--allow (int8|optimus-cb --top|.*outer)|--cluster two-desktops")


def _is_slow(fence: Fence) -> bool:
    return fence.page == "docs/guides/choose-a-strategy.md" or any(map(_SLOW.search, commands(fence)))


LONG = [fence for fence in FENCES if fence.said == "long"]
# Files that a page has its reader save: each is the fence of a language that says this.
SAVED = {"docs/guides/clusters/two-flats.md": {"flats.toml": ("toml", "cluster"), "nap.py": ("python", "nap")}}
# Written by a stopwatch.
_TOOK = re.compile(r" [\d.]+ m?s\.$")


def _named(value: object) -> str | None:
    return f"{value.page}-{commands(value)[0][:40]}" if isinstance(value, Fence) else None


# A training of the reader's own, which is over soon.
SMALL = """
[model]
width = 32
depth = 1
heads = 2

[train]
steps = 10
batch = 4
micro_batch = 1
length = 16
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a reader has one: the examples, and what the pages take for granted."""
    for folder in ("examples", "lab"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "gpt.toml").write_text(SMALL)
    (tmp_path / "train.py").write_text("import sys\nprint('trained', *sys.argv[1:])\n")
    for folder, name in (("books", "novel.txt"), ("notes", "today.md")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("Once upon a time there was a cable.\n" * 40)
    for page, files in SAVED.items():
        shown = {(fence.language, fence.said): fence.text for fence in fences(ROOT / page)}
        for name, of in files.items():
            (tmp_path / name).write_text(shown[of])
    _make_tokenizer(tmp_path / "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def _make_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {chr(code): number for number, code in enumerate(range(32, 127))}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, "\n": len(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(path))


def test_every_fence_says_what_is_to_be_done_with_it() -> None:
    known = {("bash", said) for said in ("", "long", "setup", "cluster")} | {("console", "")}
    unknown = [fence for fence in FENCES if (fence.language, fence.said) not in known]
    assert not unknown, unknown


@pytest.mark.parametrize("fence", [seldom(f) if _is_slow(f) else f for f in QUICK], ids=_named)
def test_commands_work(fence: Fence, workplace: Path) -> None:
    for command in commands(fence):
        program, *arguments = shlex.split(command)
        assert program == "towpath", f"{fence.page}: run {command!r} with `make parity`: write ```bash long"
        done = _invoke(arguments)
        assert done.exit_code == 0, f"{fence.page}: {command}: {done.output}"


@pytest.mark.parametrize("fence", [seldom(f) if _is_slow(f) else f for f in CONSOLES], ids=_named)
def test_what_a_command_printed_is_what_it_prints(fence: Fence, workplace: Path) -> None:
    (command,) = commands(fence)
    done = _invoke(shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    lines = [_TOOK.sub("", line).rstrip() for line in done.stdout.splitlines()]
    assert "".join("".join(lines).split()) == "".join("".join(printed(fence)).split()), (
        f"{fence.page} is old: paste what `{command}` prints"
    )


def _invoke(arguments: list[str]) -> Any:
    return CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(main.app, arguments)


# --- by make parity ---------------------------------------------------------------------------------------------------


def _trained(folder: Path) -> None:
    """Checkpoints in runs/a, for the page that looks at them; and weights of a Llama, for the one that imports them."""
    text = "train gpt.toml train.steps=100 log.folder=run"
    _shell(f"towpath {text} && mkdir runs && mv run/checkpoints runs/a && towpath export runs/a llama/", folder)


PREPARED: dict[str, Callable[[Path], None]] = {"docs/guides/checkpoints.md": _trained}


def _shell(text: str, folder: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parity
@pytest.mark.parametrize("fence", LONG, ids=_named)
def test_the_commands_of_a_fence_work(fence: Fence, workplace: Path) -> None:
    if prepare := PREPARED.get(fence.page):
        prepare(workplace)
    _shell(fence.text, workplace)


# --- what is not run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", [f for f in FENCES if f.said in ("setup", "cluster")], ids=_named)
def test_what_is_not_run_is_at_least_a_command(fence: Fence) -> None:
    checked = subprocess.run(["bash", "-n", "-c", fence.text], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    for command in commands(fence):
        words = shlex.split(command)
        if words[0] == "make":
            make = ["make", "--dry-run", f"PYTHON={sys.executable}"]  # else it tries interpreters first
            subprocess.run([*make, *words[1:]], cwd=ROOT, check=True, capture_output=True)
        for word in words:
            if word.startswith("examples/"):
                assert (ROOT / word).exists(), f"{fence.page}: there is no {word}"
