"""The tables of docs/concepts/published-runs.md: forecasts of published runs, and their errors."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks import forecasts, published
from benchmarks.published import Run
from tools.docs import figures

CLOSE = 0.15  # the error of a step that counts as near


@dataclass(frozen=True)
class Row:
    """A run with its forecast."""

    run: Run
    forecast: dict[str, Any]
    on_one_node: bool  # whether a run on one node fixed the rate of its GPU

    @property
    def error(self) -> float:
        return self.run.tokens_per_second_per_gpu / self.forecast["tokens/s/GPU"] - 1

    @property
    def memory_error(self) -> float:
        return self.forecast["GiB"] / (self.run.memory_gib or 1.0) - 1

    @property
    def is_bound(self) -> bool:
        return bool(self.run.bound)


@cache
def rows() -> tuple[Row, ...]:
    found, known = published.load(), json.loads(forecasts.FILE.read_text(encoding="utf-8"))
    return tuple(Row(run, known[run.id], found.calibrating(run) is not None) for run in found.runs if run.id in known)


def summary() -> str:
    """Return the errors of the hold-out half, of parts of it, and of what served to develop."""
    kinds: list[tuple[str, Callable[[Row], bool]]] = [
        ("**hold-out half**", lambda row: row.on_one_node and row.run.half == "hold-out"),
        (
            "of them, bound by communication",
            lambda row: row.on_one_node and row.run.half == "hold-out" and row.is_bound,
        ),
        ("of them, others", lambda row: row.on_one_node and row.run.half == "hold-out" and not row.is_bound),
        ("development half", lambda row: row.on_one_node and row.run.half == "development"),
        ("on one node, with other settings", lambda row: row.run.half is None),
        (
            "clusters without a run on one node, hold-out half",
            lambda row: not row.on_one_node and row.run.half == "hold-out",
        ),
    ]
    body = [(name, *_errors([row for row in rows() if is_in(row)])) for name, is_in in kinds]
    return figures.table(("rows", "number", "mean error", f"within {CLOSE:.0%}", "worst", "mean, with sign"), body)


def by_cluster() -> str:
    """Return the errors of the rows across nodes by cluster, hold-out and development together."""
    across = [row for row in rows() if row.run.half is not None]
    clusters = {row.run.cluster.id: row.run.cluster for row in across}
    body: list[figures.Row] = []
    for name, cluster in clusters.items():
        found = [row for row in across if row.run.cluster.id == name]
        gpus = sorted({row.run.gpus for row in found})
        span = f"{gpus[0]} to {gpus[-1]}" if len(gpus) > 1 else str(gpus[0])
        net = f"{cluster.network.partition(',')[0]}, {cluster.node_gbits:,.0f} Gbit/s a node"
        body.append((f"`{name}`", span, net, *_errors(found)[:-1]))
    return figures.table(("cluster", "GPUs", "network", "rows", "mean error", f"within {CLOSE:.0%}", "worst"), body)


def pairs() -> str:
    """Return the gain of HSDP over FSDP where both were printed, and as forecast."""
    body: list[figures.Row] = []
    for hybrid in rows():
        for full in rows():
            ours, theirs = hybrid.run, full.run
            keys = ("cluster", "model", "nodes", "micro_batch", "accumulation", "sequence", "checkpointing", "compile")
            alike = all(getattr(ours, key) == getattr(theirs, key) for key in keys)
            if not alike or (ours.parallelism, theirs.parallelism) != ("hybrid shard", "full shard"):
                continue
            printed = ours.tokens_per_second_per_gpu / theirs.tokens_per_second_per_gpu
            foretold = hybrid.forecast["tokens/s/GPU"] / full.forecast["tokens/s/GPU"]
            what = f"{ours.model.id}, {ours.gpus} GPUs, micro-batch {ours.micro_batch}"
            body.append(
                (f"`{ours.cluster.id}`", what, f"{printed:.3f}", f"{foretold:.3f}", f"{foretold / printed - 1:+.1%}")
            )
    return figures.table(("cluster", "run", "HSDP / FSDP, printed", "forecast", "difference"), body)


def memory() -> str:
    """Return the memory of each run that printed it, and as forecast."""
    found = [row for row in rows() if row.run.memory_gib]
    body = [
        (
            f"`{row.run.id}`",
            row.run.half or "one node",
            f"{row.run.memory_gib:.1f}",
            f"{row.forecast['GiB']:.1f}",
            f"{row.memory_error:+.0%}",
        )
        for row in found
    ]
    return figures.table(("run", "half", "printed, GiB", "forecast", "difference"), body)


def every() -> str:
    """Return all rows."""
    body = [
        (
            f"`{row.run.id}`",
            row.run.half or "one node",
            f"{row.run.tokens_per_second_per_gpu:,.0f}",
            f"{row.forecast['tokens/s/GPU']:,.0f}",
            f"{row.error:+.1%}",
            f"{row.forecast['exposed']:.0%}",
            "yes" if row.is_bound else "",
            "" if row.on_one_node else f"`{row.forecast['fixed by']}`",
        )
        for row in rows()
    ]
    head = ("run", "half", "printed, tokens/s a GPU", "forecast", "error", "exposed", "bound", "fixed across nodes by")
    return figures.table(head, body)


def _errors(found: Iterable[Row]) -> tuple[str, ...]:
    errors = [row.error for row in found]
    sizes = [abs(error) for error in errors]
    near = sum(size <= CLOSE for size in sizes) / len(sizes)
    return (
        str(len(errors)),
        f"{statistics.fmean(sizes):.1%}",
        f"{near:.0%}",
        f"{max(errors, key=abs):+.1%}",
        f"{statistics.fmean(errors):+.1%}",
    )


TABLES = {
    "published": summary,
    "published-by-cluster": by_cluster,
    "published-pairs": pairs,
    "published-memory": memory,
    "published-rows": every,
}
