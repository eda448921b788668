"""`towpath train` as a command: what it prints without training, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from towpath.cli.main import _run
from towpath.train.config import Config

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.toml"


def test_print_config_writes_a_file_that_trains_identically(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["train.steps=3", "strategy.name=mics", "log.trace=[2, 1]", "log.folder=a b"]
    assert _run(["train", str(EXAMPLE), *overrides, "--print-config"]) == 0
    written = tmp_path / "written.toml"
    written.write_text(capsys.readouterr().out)
    assert max(map(len, written.read_text().splitlines())) <= 100
    config = Config.load(written)
    assert config == Config.load(EXAMPLE, overrides)
    assert (config.train.steps, config.log.trace, config.log.folder) == (3, (2, 1), "a b")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere.toml"], "cannot read the configuration nowhere.toml: No such file or directory."),
        ([str(EXAMPLE), "train.stepz=3"], "did you mean 'steps'?"),
        ([], "Missing argument 'CONFIG.toml'"),
    ],
    ids=["no-file", "key", "no-argument"],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["train", *arguments]) == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert len(printed.err.splitlines()) == 1 and not printed.out
