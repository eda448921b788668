"""The table of docs/guides/unequal-machines.md: steps with equal batches, with shares, and with measured shares."""

from __future__ import annotations

from tools.docs import figures


def steps_table() -> str:
    """Return what shares gain over equal batches, and how near they come to the ideal, for each case."""
    body: list[figures.Row] = []
    for run in figures.runs("shares"):
        if "failed" in run:
            continue
        strategy, _, slow = run["case"]["name"].rpartition("-1to")
        found = {check["what"]: check["found"] for check in run["checks"]}
        gain = found["step of equal batches / step with shares"]
        body.append(
            (
                f"`{strategy}`",
                f"{slow} times",
                " ".join(map(str, run["rows"]["shares"])),
                f"**{gain:.2f}**",
                f"{found['step with shares / ideal']:.3f}",
                f"{found['step with measured shares / with the best']:.3f}",
            )
        )
    head = ("strategy", "slow ranks take", "rows", "times as fast", "over the ideal", "`auto`, over these shares")
    return figures.table(head, body)


TABLES = {"shares": steps_table}
