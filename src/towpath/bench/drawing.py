"""The plots of `towpath bench report`: what the last runs of the suites found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import towpath
from towpath.bench.environment import UNSHAPED
from towpath.bench.peers import AUTO
from towpath.bench.summary import comparisons
from towpath.bench.table import marks
from towpath.lab import Rate
from towpath.train.report import axes_of, color, draw_stacked, set_log_scale

Line = dict[str, Any]

_MEGA, _GREY = 1e6, "#868e96"
# Whoever is named here has the same colour in every picture; peers are grey.
_OURS = ("mics", "paro-iig", "paro-nig", "paro-ngg", "zero++", "ddp", "zero3")
_PEERS = {"torch-ddp": "#343a40", "hsdp": "#868e96", "fsdp2": "#adb5bd", "deepspeed": "#ced4da"}
# Cables as fast as the machine goes stand to the right of the fastest that has a rate.
_BESIDE = 2.0
# Two ticks of a logarithmic axis are at least so far apart that their labels are.
_APART = 1.25


@dataclass(frozen=True, slots=True)
class Curve:
    """A contestant over several environments: (x, seconds of a step), by x."""

    name: str
    lossless: bool
    points: tuple[tuple[float, float], ...]


def groups_of(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Environments that differ in their links alone, by what they share."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        topology = line["case"]["workload"]["topology"]
        shape = f"{topology['nodes']} nodes × {topology['ranks_per_node']} ranks"
        found.setdefault(f"{shape}, {_work_of(line)}", []).append(line)
    return found


def groups_of_scaling(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Environments that differ in their number of nodes alone, by what they share."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        links = f", cables of {line['inter']}" if line.get("inter") else ""
        found.setdefault(f"{line['kind']} scaling: {_work_of(line)}{links}", []).append(line)
    return found


def _work_of(line: Line) -> str:
    workload = line["case"]["workload"]
    steps = f"{workload['micro_steps']} micro-step{'s' * (workload['micro_steps'] > 1)}"
    size = f"width {workload['width']}, {workload['depth']} blocks"
    # Strong scaling: a rank waits in proportion to its share of the work, which its case names.
    waits = ", which wait" if line.get("kind") == "strong" else f" that wait {workload['wait_seconds'] or 0:.2g} s"
    in_step = ", ranks in step" if workload.get("in_step") else ""
    return f"{steps}, {workload['dtype']}, {size}{waits if workload['wait_seconds'] is not None else ''}{in_step}"


def curves_by_rate(lines: Sequence[Line]) -> tuple[list[Curve], float | None]:
    """Over Mbit/s of the cables; and where on that axis unshaped ones stand, if there are any."""
    rates = [(Rate.parse(line["inter"]).bits_per_second / 1e6, line) for line in lines if line.get("inter")]
    unshaped = [line for line in lines if not line.get("inter") and UNSHAPED in line["case"]["name"]]
    at = max(rate for rate, _ in rates) * _BESIDE if rates and unshaped else None
    return _curves([*rates, *((at, line) for line in unshaped if at is not None)]), at


def curves_by_nodes(lines: Sequence[Line]) -> list[Curve]:
    return _curves([(float(line["case"]["workload"]["topology"]["nodes"]), line) for line in lines])


def _curves(placed: Sequence[tuple[float, Line]]) -> list[Curve]:
    points: dict[str, list[tuple[float, float]]] = {}
    lossless: dict[str, bool] = {}
    for x, line in sorted(placed, key=lambda each: each[0]):
        for name in line["communication_share"]:
            points.setdefault(name, []).append((x, line["median_seconds"][name]))
            lossless[name] = line["contestants"][name]["lossless"]
    return [Curve(name, lossless[name], tuple(found)) for name, found in points.items()]


def draw_by_rate(figure: Any, shown: tuple[Sequence[Curve], float | None]) -> None:
    curves, unshaped = shown
    _draw_curves(figure, curves, "Mbit/s of each node's cable", {} if unshaped is None else {unshaped: UNSHAPED})
    set_log_scale(figure.axes[0], "y")


def draw_by_nodes(figure: Any, curves: Sequence[Curve]) -> None:
    _draw_curves(figure, curves, "nodes", {})
    figure.axes[0].set_ylim(bottom=0)


def _draw_curves(figure: Any, curves: Sequence[Curve], label: str, named: Mapping[float, str]) -> None:
    """What is lossy has a broken line. `named`: places on the axis that are no number."""
    axes = axes_of(figure, label, "seconds of a step")
    for curve in curves:
        mark, paint = look_of(curve.name)
        line = mark + ("-" if curve.lossless else "--")
        points = zip(*curve.points, strict=True)
        axes.plot(*points, line, color=paint, markersize=4, linewidth=1.2, label=curve.name)
    _logarithmic(axes.xaxis, axes.set_xscale, [x for curve in curves for x, _ in curve.points], named)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=8, ncols=2, loc="outside lower center")


def _logarithmic(axis: Any, set_scale: Any, values: Sequence[float], named: Mapping[float, str]) -> None:
    """With a tick at values that there are, as many as have room."""
    set_scale("log")
    apart = max(_APART, (max(values) / min(values)) ** (1 / 9))
    ticks: list[float] = []
    for value in sorted({*values}, reverse=True):
        if not ticks or ticks[-1] / value >= apart:
            ticks.append(value)
    axis.set_ticks(ticks, [named.get(value, f"{value:.0f}" if value >= 100 else f"{value:.3g}") for value in ticks])
    axis.set_ticks([], minor=True)


def look_of(name: str) -> tuple[str, str]:
    """Mark and color, the same in every picture: peers are grey squares, who of ours is seldom raced a diamond."""
    kind = name.split()[0]  # results may name a strategy that there is no more
    if kind in _PEERS:
        return "s", _PEERS[kind]
    if kind in _OURS:
        return "o", color(_OURS.index(kind))
    others = [AUTO, *(each for each in towpath.strategies() if each not in _OURS)]
    return "D", color(others.index(kind) if kind in others else len(others))


def draw_speedups(figure: Any, lines: Sequence[Line]) -> None:
    """Draw our fastest strategy's speed-up over the communication-to-computation ratio: one point per comparison."""
    panels = dict(
        zip(("lossless strategies", "strategies with codecs"), figure.subplots(1, 2, sharey=True), strict=True)
    )
    shapes: list[tuple[int, int]] = []
    looks: dict[str, dict[str, Any]] = {}
    for each in comparisons(lines):
        shape = (each.nodes, each.ranks_per_node)
        shapes += [shape] if shape not in shapes else []
        paint, mark = color(shapes.index(shape)), "o" if each.micro_steps == 1 else "^"
        looks[f"{each.nodes} nodes × {each.ranks_per_node} ranks"] = {"marker": "s", "color": paint}
        looks[f"{each.micro_steps} micro-step{'s' * (each.micro_steps > 1)}"] = {"marker": mark, "color": _GREY}
        if each.blocks_wait:
            looks["hollow: blocks wait"] = {"marker": "o", "color": _GREY, "markerfacecolor": "none"}
        look = {"color": paint, "markerfacecolor": "none" if each.blocks_wait else paint, "markersize": 5}
        for axes, speedups in zip(panels.values(), (each.lossless, each.codecs), strict=True):
            if speedups and each.measured_ratio:
                axes.plot([each.measured_ratio], [max(speedups.values())], mark, **look)
    for title, axes in panels.items():
        axes.axhline(1.0, color=_GREY, linewidth=1)
        axes.set_xlabel("FSDP2's communication time / computation time")
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_xscale("log")
        axes.set_xticks([0.25, 0.5, 1, 2, 4, 8], ["¼", "½", "1", "2", "4", "8"])
        axes.minorticks_off()
    first, *_ = panels.values()
    first.set_ylabel("speed-up over the best tuned lossless peer")
    handles = [first.plot([], [], linestyle="none", markersize=5, **look)[0] for look in looks.values()]
    figure.legend(handles, looks.keys(), frameon=False, fontsize=8, ncols=3, loc="outside lower center")


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
    """Time against memory, everybody; on the line are those lossless ones that no lossless one beats in both."""
    axes = axes_of(figure, "MB of a rank", "seconds of a step")
    points = {name: (line["memory_bytes"][name] / _MEGA, line["median_seconds"][name]) for name in _names(line)}
    for name, at in points.items():
        about = line["contestants"][name]
        hollow = {} if about["lossless"] else {"markerfacecolor": "none"}
        label = f"{name} {marks(about)}".strip()
        mark, paint = look_of(name)
        axes.plot(*at, mark, color=paint, markersize=6, label=label, **hollow)
    lossless = {name: at for name, at in points.items() if line["contestants"][name]["lossless"]}
    if best := [lossless[name] for name in unbeaten(lossless)]:
        axes.plot(*zip(*best, strict=True), "-", color=_GREY, linewidth=1)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=8, ncols=2, loc="outside lower center")


def unbeaten(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Of (memory, seconds): who needs less memory than all that are quicker; the quickest first."""
    found: list[str] = []
    for name in sorted(points, key=lambda each: (points[each][1], points[each][0])):
        if not found or points[name][0] < points[found[-1]][0]:
            found.append(name)
    return found
