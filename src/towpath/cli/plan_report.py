"""`towpath plan --report`: an HTML page that shows which strategy is best when, and why. It loads no other files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from towpath.cli.plots import (
    COLORS,
    Curve,
    Figure,
    axes_of,
    draw_curves,
    draw_stacked,
    draw_timelines,
    set_log_scale,
    svg,
    table_html,
    write_page,
)
from towpath.core import presets
from towpath.core.strategy import TransferKind
from towpath.errors import TowpathError
from towpath.plan import tables
from towpath.plan.cluster_file import GIB, Cluster
from towpath.plan.prediction import Batching, Prediction, Ranking
from towpath.plan.solver import Solver

# The presets drawn over link rates and numbers of nodes: the lossless ones that differ most.
PRESETS = ("zero3", "hpz", "mics", "paro-igg", "paro-iig", "paro-nig")
_RATES = tuple(2.0**k for k in range(-4, 5))
_NODES = tuple(2.0**k for k in range(-2, 3))
# A preset that takes this many times as long counts as equally fast.
_TOLERANCE = 1.01
# The number of strategies of which the parts of a step are drawn.
_SHOWN = 6


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
        ("Which strategy when: links", caption(by_rate), draw_rates, by_rate),
        ("Which strategy when: nodes", f"Each rank has the same batch. {caption(by_nodes)}", draw_nodes, by_nodes),
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


def curves(solver: Solver, batching: Batching, clusters: Sequence[tuple[float, Cluster]]) -> list[Curve]:
    """Return the seconds of a step on each cluster, as a curve for each preset."""
    made: list[Curve] = []
    for name in PRESETS:
        points: list[tuple[float, float]] = []
        for at, cluster in clusters:
            seconds = _seconds(name, Solver(solver.model, cluster, solver.request), batching)
            points += [(at, seconds)] if seconds is not None else []
        made.append(Curve(name, tuple(points)))
    return made


def _seconds(name: str, solver: Solver, batching: Batching) -> float | None:
    try:
        priced = solver.predict(presets.strategy(name, solver.cluster.topology), batching)
    except TowpathError:  # the preset does not fit this topology
        return None
    return priced.seconds if priced.peak_bytes <= solver.request.memory else None


def crossings(curves: Sequence[Curve]) -> list[tuple[float, str, str]]:
    """Return where the fastest preset changes by more than 1 %: (x, old name, new name).

    x is the geometric mean of the two points around the change.
    """
    best: list[tuple[float, str]] = []
    for at in sorted({at for curve in curves for at, _ in curve.points}):
        there = {curve.name: seconds for curve in curves for x, seconds in curve.points if x == at}
        fastest = min(there, key=lambda name: there[name])
        before = best[-1][1] if best else fastest
        stays = there.get(before, float("inf")) <= _TOLERANCE * there[fastest]
        best.append((at, before if stays else fastest))
    return [((x * y) ** 0.5, a, b) for (x, a), (y, b) in pairwise(best) if a != b]


def caption(curves: Sequence[Curve]) -> str:
    """Return a caption for `curves`: that the fastest preset changes, or which preset is always fastest."""
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return "None of the presets fits into the memory of a rank."
    if crossings(drawn):
        return "At each dotted line, the preset named above it becomes the fastest."
    first = min(at for curve in drawn for at, _ in curve.points)
    _, fastest = min((seconds, curve.name) for curve in drawn for at, seconds in curve.points if at == first)
    return f"Everywhere, {fastest} is the fastest preset that fits, or within 1 % of it."


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


def _draw_curves(label: str, figure: Any, drawn: Sequence[Curve]) -> None:
    axes = axes_of(figure, label, "seconds of a step")
    if not any(curve.points for curve in drawn):
        return
    draw_curves(axes, drawn)
    for at, _, to in crossings(drawn):
        _mark(axes, at, to)
    axes.set_xscale("log", base=2)
    set_log_scale(axes, "y")
    ticks = sorted({at for curve in drawn for at, _ in curve.points})
    axes.set_xticks(ticks, [f"{at:.3g}" for at in ticks])
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=8, ncols=6, loc="outside lower center")


def _mark(axes: Any, at: float, text: str) -> None:
    """Draw a dotted line with a text above it."""
    axes.axvline(at, color=COLORS[7], linestyle=":", linewidth=1)
    axes.annotate(
        text, (at, 1.0), xytext=(0, 3), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=8,
        va="bottom", ha="center",
    )  # fmt: skip


draw_rates = partial(_draw_curves, "Gbit/s between nodes, each way")
draw_nodes = partial(_draw_curves, "nodes")
