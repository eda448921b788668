"""The plots of `towpath bench report`: what the last runs of the suites found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from towpath.bench.table import marks
from towpath.lab import Rate
from towpath.train.observe.plots import axes_of, colour, draw_stacked

Line = dict[str, Any]

_MEGA = 1e6
_STYLES = {"ours": "o-", "peer": "s--"}


@dataclass(frozen=True, slots=True)
class Curve:
    """A contestant over several environments: (x, seconds of a step), by x."""

    name: str
    ours: bool
    points: tuple[tuple[float, float], ...]


def groups_of(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Environments that differ in their links alone, by what they share."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        workload = line["case"]["workload"]
        topology = workload["topology"]
        steps = f"{workload['micro_steps']} micro-step{'s' * (workload['micro_steps'] > 1)}"
        waits = ", blocks that wait" if workload["wait_seconds"] is not None else ""
        shape = f"{topology['nodes']} nodes × {topology['ranks_per_node']} ranks"
        found.setdefault(f"{shape}, {steps}, {workload['dtype']}{waits}", []).append(line)
    return found


def curves_by_rate(lines: Sequence[Line]) -> list[Curve]:
    """Over Mbit/s of the cables; environments without a rate are in the table only."""
    return _curves([(Rate.parse(line["inter"]).bits_per_second / 1e6, line) for line in lines if line.get("inter")])


def curves_by_nodes(lines: Sequence[Line]) -> list[Curve]:
    return _curves([(float(line["case"]["workload"]["topology"]["nodes"]), line) for line in lines])


def _curves(placed: Sequence[tuple[float, Line]]) -> list[Curve]:
    points: dict[str, list[tuple[float, float]]] = {}
    ours: dict[str, bool] = {}
    for x, line in sorted(placed, key=lambda each: each[0]):
        for name in line["communication_share"]:
            points.setdefault(name, []).append((x, line["median_seconds"][name]))
            ours[name] = line["contestants"][name]["ours"]
    return [Curve(name, ours[name], tuple(found)) for name, found in points.items()]


def draw_by_rate(figure: Any, curves: Sequence[Curve]) -> None:
    _draw_curves(figure, curves, "Mbit/s of each node's cable")


def draw_by_nodes(figure: Any, curves: Sequence[Curve]) -> None:
    _draw_curves(figure, curves, "nodes")


def _draw_curves(figure: Any, curves: Sequence[Curve], label: str) -> None:
    """Ours are whole lines with dots, peers broken ones with squares."""
    axes = axes_of(figure, label, "seconds of a step")
    for number, curve in enumerate(curves):
        style = _STYLES["ours" if curve.ours else "peer"]
        axes.plot(*zip(*curve.points, strict=True), style, color=colour(number), markersize=4, label=curve.name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = sorted({x for curve in curves for x, _ in curve.points})
    axes.set_xticks(ticks, [f"{x:.3g}" for x in ticks])
    axes.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=8, ncols=2, loc="outside lower center")


def _names(line: Line) -> list[str]:
    """The quickest first."""
    return sorted(line["communication_share"], key=lambda name: line["median_seconds"][name])


def draw_bytes(figure: Any, line: Line) -> None:
    names = _names(line)
    inside = line.get("interface_bytes", {})
    parts = {
        "between nodes": [line["bytes_between_nodes"][name] / _MEGA for name in names],
        "inside nodes": [_usual(inside.get(name, {}).get("inside_nodes", [0])) / _MEGA for name in names],
    }
    draw_stacked(figure, names, "MB of a step, all nodes together", parts)


def _usual(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def draw_memory(figure: Any, line: Line) -> None:
    names = _names(line)
    draw_stacked(figure, names, "MB", {"of one rank": [line["memory_bytes"][name] / _MEGA for name in names]})


def draw_pareto(figure: Any, line: Line) -> None:
    """Time against memory, everybody; on the line are those that nobody beats in both."""
    axes = axes_of(figure, "MB of a rank", "seconds of a step")
    points = {name: (line["memory_bytes"][name] / _MEGA, line["median_seconds"][name]) for name in _names(line)}
    for name, at in points.items():
        ours = line["contestants"][name]["ours"]
        axes.plot(*at, "o" if ours else "s", color=colour(0 if ours else 1), markersize=5)
        label = f"{name} {marks(line['contestants'][name])}".strip()
        axes.annotate(label, at, xytext=(5, 4), textcoords="offset points", fontsize=7)
    best = [points[name] for name in unbeaten(points)]
    axes.plot(*zip(*best, strict=True), "-", color=colour(7), linewidth=1)


def unbeaten(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Of (memory, seconds): who needs less memory than all that are quicker; the quickest first."""
    found: list[str] = []
    for name in sorted(points, key=lambda each: (points[each][1], points[each][0])):
        if not found or points[name][0] < points[found[-1]][0]:
            found.append(name)
    return found
