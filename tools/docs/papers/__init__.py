"""Tables of benchmarks/comparisons/papers.md: what the papers measured, and what the simulator predicts.

python -m tools.docs.papers               lists the tables
python -m tools.docs.papers papers-mics   simulates one and prints it
python -m tools.docs.generate             writes all of them into the page
"""

from __future__ import annotations

from functools import cache

from tools.docs.papers import pipelines, placements, scale, speedups
from tools.docs.papers.lines import Table, Writer
from tools.docs.papers.speedups import COUNTS, counts

__all__ = ["COUNTS", "Writer", "counts", "tables"]


@cache
def tables() -> dict[str, Table]:
    """Return every table by its name."""
    return {**speedups.tables(), **placements.tables(), **pipelines.tables(), **scale.tables()}
