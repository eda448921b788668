"""How help is laid out: as wide as the terminal, and at most 100 columns. Needs no torch."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from typing import Any

_MOST_COLUMNS = 100


def help_width() -> int:
    return min(_MOST_COLUMNS, shutil.get_terminal_size().columns) - 2


class HelpFormatter(argparse.HelpFormatter):
    """Fills the paragraphs of a module's docstring anew; what is indented stays as it is."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, width=help_width(), **settings)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(each if each.startswith(" ") else textwrap.fill(each, width) for each in paragraphs)
