"""`towpath plan --report`: an HTML page that shows which strategy is best when, and why. It loads no other files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from towpath.cli.plots import (
    COLORS,
    Figure,
    axes_of,
    color,
    dashes,
    draw_stacked,
    draw_timelines,
    svg,
    table_html,
    write_page,
)
from towpath.core import presets
from towpath.core.strategy import TransferKind
from towpath.errors import TowpathError
from towpath.plan import tables
from towpath.plan.hardware import GIB, Cluster
from towpath.plan.request import Batching, Prediction, Ranking
from towpath.plan.solver import Solver

# The presets drawn over link rates and numbers of nodes: the lossless ones that differ most.
PRESETS = ("zero3", "hpz", "mics", "paro-igg", "paro-iig", "paro-nig")
_RATES = tuple(2.0**k for k in range(-4, 5))
_NODES = tuple(2.0**k for k in range(-2, 3))
# The number of strategies of which the parts of a step are drawn.
_SHOWN = 6
# By preset: what stands on the x-axis, and the seconds of a step there.
Curves = Mapping[str, Sequence[tuple[float, float]]]


def write_plan_report(path: Path, found: Ranking, solver: Solver, heading: str) -> None:
    """Write the page."""
    ranked, shown = found.ranked, found.ranked[:_SHOWN]
    best = shown[0]
    by_rate = curves(solver, best.batching, rates_of(solver))
    by_nodes = curves(solver, best.batching, nodes_of(solver))
    compared = dict.fromkeys([best.strategy, presets.strategy(tables.BASELINE, solver.cluster.topology)])
    steps = [
        (name, solver.timeline(strategy, best.batching).intervals)
        for name, strategy in zip(("best: " + tables.label(best.strategy), tables.BASELINE), compared, strict=False)
    ]
    drawn: list[tuple[str, str, Callable[[Any, Any], None], Any]] = [
        (
            "Time against memory",
            "On the line, the Pareto front, no strategy is both faster and smaller.",
            draw_front,
            ranked,
        ),
        ("Where a step's time goes", "Computation, and the transfers that it waits for.", draw_parts, shown),
        ("Which strategy when: links", "Presets that fit into memory.", draw_rates, by_rate),
        ("Which strategy when: nodes", "The same. Each rank has the same batch.", draw_nodes, by_nodes),
    ]
    figures = [Figure(title, about, svg(draw, what, (5.2, 3.3))) for title, about, draw, what in drawn]
    timelines = svg(draw_timelines, steps, (11, 0.8 + 0.95 * len(steps)))
    inside = "What a rank computes, and what its links send in the meantime."
    figures.append(Figure("One step, from inside", inside, timelines, wide=True))
    rows = [tables.row(number, priced, solver) for number, priced in enumerate(found.ranked[:10], 1)]
    title = f"Which strategy for {solver.model.name} on {solver.cluster.name}?"
    write_page(path, title, heading, table_html(tables.HEADINGS, rows), figures)


# --- curves -----------------------------------------------------------------------------------------------------------


def rates_of(solver: Solver) -> list[tuple[float, Cluster]]:
    """Return clusters with slower and faster links, each with its Gbit/s per node."""
    rates = [factor * solver.cluster.hardware.inter.rate for factor in _RATES]
    return [(rate * 8 / 1e9, solver.cluster.at_rate(rate)) for rate in rates]


def nodes_of(solver: Solver) -> list[tuple[float, Cluster]]:
    """Return clusters with fewer and more nodes, each with its number of nodes."""
    counts = sorted({max(1, round(factor * solver.cluster.topology.nodes)) for factor in _NODES})
    return [(nodes, solver.cluster.on(nodes)) for nodes in counts]


def curves(solver: Solver, batching: Batching, clusters: Sequence[tuple[float, Cluster]]) -> Curves:
    """Return the seconds of a step of each preset on each cluster."""
    made: dict[str, list[tuple[float, float]]] = {name: [] for name in PRESETS}
    for name, points in made.items():
        for at, cluster in clusters:
            seconds = _seconds(name, Solver(solver.model, cluster, solver.request), batching)
            points += [(at, seconds)] if seconds is not None else []
    return made


def _seconds(name: str, solver: Solver, batching: Batching) -> float | None:
    try:
        priced = solver.predict(presets.strategy(name, solver.cluster.topology), batching)
    except TowpathError:  # the preset does not fit this topology
        return None
    return priced.seconds if priced.peak_bytes <= solver.request.memory else None


# --- drawing ----------------------------------------------------------------------------------------------------------


def front(ranked: Sequence[Prediction]) -> list[Prediction]:
    """Return the Pareto front of seconds and memory, fastest first."""
    chosen: list[Prediction] = []
    for priced in sorted(ranked, key=lambda p: (p.seconds, p.peak_bytes)):
        if not chosen or priced.peak_bytes < chosen[-1].peak_bytes:
            chosen.append(priced)
    return chosen


def draw_front(figure: Any, ranked: Sequence[Prediction]) -> None:
    """Draw the strategies by memory and time, with their front."""
    axes = axes_of(figure, "GiB of a rank", "seconds of a step")
    axes.plot([p.peak_bytes / GIB for p in ranked], [p.seconds for p in ranked], "o", color=COLORS[7], markersize=3)
    best = front(ranked)
    axes.plot([p.peak_bytes / GIB for p in best], [p.seconds for p in best], "o-", color=COLORS[0], markersize=5)
    for priced in best:
        axes.annotate(
            tables.label(priced.strategy), (priced.peak_bytes / GIB, priced.seconds), xytext=(5, 4),
            textcoords="offset points", fontsize=8,
        )  # fmt: skip


def draw_parts(figure: Any, shown: Sequence[Prediction]) -> None:
    """Draw the parts of a step of each strategy: computing, and waiting by kind of transfer."""
    names = [f"{n}  {tables.label(p.strategy)}" for n, p in enumerate(shown, 1)]
    parts = {"computing": [p.computing for p in shown]}
    parts |= {k.value: [p.exposed.get(k, 0.0) for p in shown] for k in TransferKind
              if any(p.exposed.get(k, 0.0) > 0.01 * p.seconds for p in shown)}  # fmt: skip
    draw_stacked(figure, names, "seconds", parts)


def _draw_curves(label: str, figure: Any, drawn: Curves) -> None:
    axes = axes_of(figure, label, "seconds of a step")
    for number, (name, points) in enumerate(drawn.items()):
        if points:  # the dashes of neighbors alternate, so that equal curves can be seen
            line = dashes(number % 2, 2)
            axes.plot(*zip(*points, strict=True), "o", linestyle=line, color=color(number), label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    ticks = sorted({at for points in drawn.values() for at, _ in points})
    axes.set_xticks(ticks, [f"{at:.3g}" for at in ticks])
    figure.legend(frameon=False, fontsize=8, ncols=6, loc="outside lower center")


draw_rates = partial(_draw_curves, "Gbit/s between nodes, each way")
draw_nodes = partial(_draw_curves, "nodes")
