"""The help of every command: what the command is for, an example, and a name for each value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from towpath.cli.main import _run, app


def _tree(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    yield " ".join(path), command
    for name, each in getattr(command, "commands", {}).items():
        yield from _tree(each, (*path, name))


COMMANDS = dict(_tree(typer.main.get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_the_purpose_and_an_example(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, example, *_ = COMMANDS[name].help.split("\n\n")
    assert example.strip().startswith(("Example: `towpath ", "Example: `torchrun ")) and f"towpath {name}" in example
    monkeypatch.setenv("COLUMNS", "100")
    assert _run([*name.split(), "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"towpath {name}" in " ".join(printed.split()).partition("Example: ")[2]
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.parametrize("name", COMMANDS)
def test_each_value_in_help_has_a_name_and_a_meaning(name: str) -> None:
    for param in COMMANDS[name].get_params(typer.Context(COMMANDS[name])):
        assert param.help, param.name
        assert getattr(param, "is_flag", False) or param.metavar, param.name


@pytest.mark.parametrize("name", [name for name in COMMANDS if name])
def test_an_unknown_option_is_one_line_that_names_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run([*name.split(), "--no-such-option"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("towpath: No such option") and f"See towpath {name} --help." in printed.err
    assert printed.err.count("\n") == 1 and not printed.out
