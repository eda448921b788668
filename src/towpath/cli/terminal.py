"""Code that all commands share: the format of help, numbers with a range, tables, and output without a reader."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import typer
from rich.console import Console
from rich.table import Table

from towpath.errors import ConfigError
from towpath.files import check_output_file
from towpath.topology.launcher import launched


class CommandGroup(typer.Typer):
    """A group of commands with plain help, as `argparse` prints it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            rich_markup_mode=None,
            add_completion=False,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
            **options,
        )


# --- numbers ----------------------------------------------------------------------------------------------------------


def above_zero(kind: type[int] | type[float], most: float) -> Callable[[str], float]:
    """Return a parser of numbers above 0, up to `most`. Its error has the value and the range."""
    expected = f"a whole number from 1 to {most:,}" if kind is int else f"a number above 0, up to {most:,.0f}"

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value <= most:  # NaN neither
            raise typer.BadParameter(f"got {text}; expected {expected}")
        return value

    return number


# --- tables and messages ----------------------------------------------------------------------------------------------


def table_of(*headings: str, numbers: int, **options: Any) -> Table:
    """Return a table without lines. Its columns from the index `numbers` on are aligned to the right."""
    options.setdefault("pad_edge", False)
    table = Table(*headings, box=None, **options)
    for column in table.columns:
        column.overflow = "fold"  # a name is not cut short
    for column in table.columns[numbers:]:
        column.justify = "right"
    return table


def load_torch() -> None:
    """Import torch, which takes some seconds. On a terminal, rank 0 shows a message in the meantime."""
    if "torch" not in sys.modules and os.environ.get("RANK", "0") == "0":
        with Console(stderr=True).status("Loading torch"):
            importlib.import_module("torch")


def check_launched(command: str) -> None:
    """Raise `ConfigError` if no launcher has started this process as a rank."""
    if not launched():
        raise ConfigError(
            f"{command} measures between ranks, but no launcher started this process as a rank. Start it with torchrun "
            f"… -m towpath {command} on every node."
        )


def check_picture_file(option: str, path: Path | None) -> None:
    """Raise `ConfigError` if the option names a file of pictures that cannot be drawn or written."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"{option} {path}: pictures are drawn by matplotlib, which is not installed. Run pip install matplotlib "
            "(the extra towpath[plot])."
        )
    check_output_file(option, path)


# --- output -----------------------------------------------------------------------------------------------------------
#
# If the reader of a pipe leaves (`towpath train … | head`), the rest of the text is discarded, and training continues.


@final
class _Pipe(io.FileIO):
    """A file that discards what is written to it once its reader has left."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # the descriptor itself, because libraries write to it too
            os.close(null)
            return memoryview(data).nbytes


def survive_closed_pipes() -> None:
    """Let stdout and stderr take text whose reader has left, and escape characters that their encoding lacks."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        if before is not None:  # a program without stdout may have used the descriptor for a file
            before.flush()
            raw = io.BufferedWriter(_Pipe(descriptor, "w", closefd=False))
            at_once = before.line_buffering or before.write_through
            setattr(sys, name, io.TextIOWrapper(raw, before.encoding, "backslashreplace", line_buffering=at_once))
