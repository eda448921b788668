"""The reference table of benchmarks/comparisons/papers.md: what the papers print, and what the simulator predicts.

python -m tools.docs.papers               lists the rows
python -m tools.docs.papers "PaRO, Fig"   simulates those that contain a text, and prints them
python -m tools.docs.generate             writes all of them into the page
"""

from __future__ import annotations

from functools import cache

from tools.docs.papers import rows
from tools.docs.papers.lines import Table, Writer
from tools.docs.papers.summary import TABLES

__all__ = ["TABLES", "Writer", "tables"]


@cache
def tables() -> dict[str, Table]:
    """Return the tables whose lines are simulated, by name."""
    return {"papers": Table(("paper", "what", "printed", "as it ran", "overlapped"), rows.rows())}
