"""The table of registers in docs/reference/what-has-run.md, from tests/results/kernels.json (`tools.kernels --out`)."""

from __future__ import annotations

import json
from typing import Any

from tools.docs import figures
from tools.kernels import BOUNDS

RESULTS = figures.ROOT / "tests" / "results" / "kernels.json"


def table() -> str:
    """Return a row for each kernel: the most registers of its variants, with each Triton, for each architecture."""
    tables: dict[str, list[dict[str, Any]]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    body: list[figures.Row] = []
    for kernel in sorted(BOUNDS):
        rows = {name: [row for row in each if row["kernel"] == kernel] for name, each in tables.items()}
        every = [row for each in rows.values() for row in each]
        registers = (" / ".join(str(row["registers"]) for row in each) for each in rows.values())
        most = {key: max(row[key] for row in every) for key in ("variants", "warps", "spilled", "shared", "seconds")}
        body.append(
            (
                kernel,
                str(most["variants"]),
                str(most["warps"]),
                *registers,
                str(BOUNDS[kernel]),
                f"{most['spilled']}",
                f"{most['shared']:,}",
                f"{most['seconds']:.2f}",
            )
        )
    names = (f"registers, Triton {name}" for name in tables)
    head = ("kernel", "variants", "warps", *names, "at most", "bytes spilled", "bytes shared", "seconds")
    return figures.table(head, body)


TABLES = {"kernels": table}
