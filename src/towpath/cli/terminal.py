"""Code that all commands share: the format of help, numbers with a range, tables, and output that never fails."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import select
import sys
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, TextIO, final

import typer
from rich.console import Console
from rich.table import Table

from towpath.errors import ConfigError
from towpath.files import check_output_file


class Commands(typer.Typer):
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


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` to `most`. Its error has the value and the range."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise typer.BadParameter(f"got {text}; expected a whole number from {least:,} to {most:,}")
        return value

    return integer


def above_zero(most: float) -> Callable[[str], float]:
    """Return a parser of numbers above 0, up to `most`. Its error has the value and the range."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not (isfinite(value) and 0 < value <= most):
            raise typer.BadParameter(f"got {text}; expected a number above 0, up to {most:,.0f}")
        return value

    return number


# --- tables and messages ----------------------------------------------------------------------------------------------


def table_of(*headings: str, numbers: int, **options: Any) -> Table:
    """Return a table without lines. Its columns from the index `numbers` on are aligned to the right."""
    options.setdefault("pad_edge", False)
    table = Table(*headings, box=None, **options)
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
    from towpath.topology.groups import launched

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
# Printed text may be lost, but never what is computed. If the reader of a pipe leaves (`towpath train … | head`), the
# rest of the text is discarded, and training continues to its summary. If writing fails otherwise, as on a full disk,
# that text is lost and the next text is tried again.


@final
class _SafeFile(io.FileIO):
    """A file to which writing never fails. `lost` is the first error that was not a reader who left."""

    lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Return how much was written. The buffer in front of it comes again with the rest."""
        try:
            written: int | None = super().write(data)
        except BrokenPipeError:
            _discard(self.fileno())  # the descriptor itself, because libraries write to it too
        except OSError as error:
            self.lost = self.lost or error
        else:
            if written is None:  # the pipe is full, and another program has made it non-blocking
                select.select([], [self], [])
            return written or 0
        return memoryview(data).nbytes


@final
class Output:
    """The process's stdout and stderr, which never fail from now on."""

    def __init__(self) -> None:
        # The next open file would take a closed descriptor. Text, also from C++, must not end up in a checkpoint.
        for descriptor in (0, 1, 2):
            try:
                os.fstat(descriptor)
            except OSError:
                _discard(descriptor)
        self._stdout, stderr = _SafeFile(1, "w", closefd=False), _SafeFile(2, "w", closefd=False)
        sys.stdout = _text(self._stdout, sys.stdout)
        sys.stderr = _text(stderr, sys.stderr)

    def lost(self) -> OSError | None:
        """Return why text for stdout was lost. Return None if it was not, or if its reader left."""
        sys.stdout.flush()
        return self._stdout.lost


def _discard(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def _text(raw: _SafeFile, before: Any) -> TextIO:
    """Return a text stream like `before`. It escapes characters that its encoding lacks, instead of failing."""
    if before is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
    before.flush()
    errors = "backslashreplace" if before.errors == "strict" else before.errors
    at_once = before.line_buffering or before.write_through
    return io.TextIOWrapper(io.BufferedWriter(raw), before.encoding, errors, line_buffering=at_once)
