"""The lines of benchmarks/comparisons/papers.md, and what each line costs to simulate.

A page is checked line by line. `seconds.json` has the processor seconds that each line took when it was last measured.
`make test` simulates the lines that take less than `QUICK` again, and the quickest one of each table if it takes less
than `QUICKEST`. `make parity` simulates all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time

QUICK, QUICKEST = 0.2, 0.5
COSTS = Path(__file__).with_name("seconds.json")
TICK = " ✓"
NEAR = 0.25  # of the printed gain


@dataclass(frozen=True)
class Line:
    """A line of a table: `known` are the cells that identify it, and `simulate` returns those that follow."""

    known: tuple[str, ...]
    simulate: Callable[[], Iterable[str]]

    @property
    def name(self) -> str:
        return " | ".join(self.known)


@dataclass(frozen=True)
class Table:
    """A table of the page."""

    heads: tuple[str, ...]
    lines: tuple[Line, ...]


class Writer:
    """Writes tables, and measures what their lines cost.

    Args:
        slow: Whether to simulate every line. Otherwise lines that are not quick stay as they are on the page.
    """

    def __init__(self, slow: bool) -> None:
        self._slow, self._costs = slow, _costs()

    def text(self, name: str, table: Table, old: str = "") -> str:
        """Return the text of a table. Lines that are neither quick nor new are taken from `old`, its text so far."""
        before = {line: cells for cells in cells_of(old) for line in (" | ".join(cells[: len(table.lines[0].known)]),)}
        rows: list[Sequence[str]] = []
        for line in table.lines:
            kept = not self._slow and not is_quick(self._costs.get(name, {}), line.name)
            rows.append(before[line.name] if kept and line.name in before else self.simulated(name, line))
        text = [f"| {' | '.join(cells)} |" for cells in (table.heads, *rows)]
        text.insert(1, "|" + len(table.heads) * "---|")
        return "\n".join(text)

    def simulated(self, table: str, line: Line) -> list[str]:
        """Return the cells of a line, and remember what it took to simulate it."""
        start = process_time()
        cells = [*line.known, *line.simulate()]
        took, known = process_time() - start, self._costs.setdefault(table, {})
        # A machine is never equally fast twice: a cost that is about right stays.
        if not took / 2 <= known.get(line.name, 0.0) <= 2 * took:
            known[line.name] = round(took, 3)
        return cells

    def write_costs(self, tables: dict[str, Table]) -> None:
        """Write what the lines of these tables cost, and forget all others."""
        costs = {
            name: {line.name: known[line.name] for line in table.lines if line.name in known}
            for name, table in tables.items()
            if (known := self._costs.get(name, {}))
        }
        COSTS.write_text(json.dumps(costs, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def is_quick(costs: Mapping[str, float], line: str) -> bool:
    """Return whether `make test` simulates a line, by what the lines of its table cost. A line without cost is slow."""
    cost = costs.get(line, QUICKEST)
    return cost < QUICK or (cost < QUICKEST and cost == min(costs.values()))


def _costs() -> dict[str, dict[str, float]]:
    return json.loads(COSTS.read_text(encoding="utf-8")) if COSTS.exists() else {}


def cells_of(text: str) -> list[list[str]]:
    """Return the cells of each line of a table."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[1:]]


def is_near(found: float, printed: float) -> bool:
    """Return whether the simulated gain is within `NEAR` of the printed one."""
    return abs(found - printed) <= NEAR * abs(printed - 1)


def ticked(found: float, printed: float | None) -> str:
    """Return a ratio with two decimals, and a tick if it is near what was printed."""
    return f"{found:.2f}{TICK if printed is not None and is_near(found, printed) else ''}"
