"""The report of `python -m lab demo`: a table of strategies, and a page with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towpath.cli.plots import (
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
from towpath.observe.trace import Interval

_MEGA = 1e6
FASTEST, LOSSY = "★", "~"
MARKS = f"{FASTEST}: the fastest strategy, and the fastest lossless one. {LOSSY}: lossy, a codec rounds what it sends."
HEADINGS = (
    "strategy", "step", "× faster", "exposed", "MB between nodes", "as scheduled", "MB a rank", "loss", "held-out loss",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The training of one strategy, as rank 0 saw it. Seconds and bytes are the means of one optimizer step."""

    strategy: str
    losses: tuple[float, ...]  # by step
    ends: tuple[float, ...]  # seconds from the start of the first step to the end of each step
    validation: float | None
    step_seconds: float
    exposed_seconds: float  # the time in which the rank only waited for transfers
    host_seconds: float  # the time of the engine, the optimizer and the data: neither computing nor waiting
    cable_bytes: float | None  # bytes sent over a node's cable as the kernel counted them, or None if there is no cable
    scheduled_bytes: int  # the same, as `towpath.schedule()` predicts it
    inside_bytes: float  # bytes sent inside one node
    memory_bytes: dict[str, int]  # the engine's memory by kind
    lossless: bool  # whether no codec rounds what is sent
    timeline: tuple[Interval, ...]  # of one step on rank 0

    @property
    def compute_seconds(self) -> float:
        """The rest of the step's time, in which the rank computed."""
        return max(0.0, self.step_seconds - self.exposed_seconds - self.host_seconds)


def _loss_steps(figure: Any, outcomes: Sequence[Outcome]) -> None:
    axes = axes_of(figure, "optimizer steps", "training loss")
    for i, outcome in enumerate(outcomes):
        axes.plot(range(1, len(outcome.losses) + 1), outcome.losses, linewidth=0.7, color=color(i))
    for i, outcome in enumerate(outcomes):
        steps, look = range(1, len(outcome.losses) + 1), {"color": color(i)}
        # The curves of lossless strategies coincide. Their dashes alternate, so that each can be seen.
        axes.plot(
            steps, outcome.losses, linewidth=2.2, linestyle=dashes(i, len(outcomes)), dash_capstyle="butt", **look
        )
        axes.plot([], [], linewidth=2.2, label=outcome.strategy, **look)
    axes.legend(frameon=False)


def _loss_seconds(figure: Any, outcomes: Sequence[Outcome]) -> None:
    axes = axes_of(figure, "seconds", "training loss")
    for i, outcome in enumerate(outcomes):
        axes.plot(outcome.ends, outcome.losses, color=color(i), linewidth=1.3, label=outcome.strategy)
        axes.plot(outcome.ends[-1:], outcome.losses[-1:], "o", color=color(i), markersize=4)
    axes.legend(frameon=False)


def _plots(outcomes: Sequence[Outcome]) -> list[Figure]:
    """Return the figures of the report."""
    small = (5.2, 3.3)

    def stacked(label: str, parts: Mapping[str, Sequence[float]]) -> str:
        names = [o.strategy for o in outcomes]
        return svg(lambda figure, shown: draw_stacked(figure, names, label, shown), parts, small)

    times = {
        "compute": [o.compute_seconds for o in outcomes],
        "exposed communication": [o.exposed_seconds for o in outcomes],
        "optimizer, data, engine": [o.host_seconds for o in outcomes],
    }
    slowest = max(o.step_seconds for o in outcomes)
    speeds = {f"steps in {slowest:.2f} s": [slowest / o.step_seconds for o in outcomes]}
    sent = {
        "between nodes": [(o.scheduled_bytes if o.cable_bytes is None else o.cable_bytes) / _MEGA for o in outcomes],
        "inside nodes": [o.inside_bytes / _MEGA for o in outcomes],
    }
    kinds = list(dict.fromkeys(kind for o in outcomes for kind, held in o.memory_bytes.items() if held))
    memory = {kind.replace("_", " "): [o.memory_bytes.get(kind, 0) / _MEGA for o in outcomes] for kind in kinds}
    figures = (
        (
            "Loss against steps",
            "Lossless strategies change what is sent, not what is learned.",
            svg(_loss_steps, outcomes, small),
        ),
        (
            "Loss against seconds",
            "The same losses, over the time that the steps took.",
            svg(_loss_seconds, outcomes, small),
        ),
        ("Where a step's time goes", "The mean step, on rank 0.", stacked("seconds", times)),
        ("Speed", "Of the same steps, with the same batch.", stacked("times as fast as the slowest", speeds)),
        ("Bytes of one step", "Over the cable of one node, and inside it.", stacked("MB", sent)),
        ("Memory of a rank", "What the engine holds, after the first steps.", stacked("MB", memory)),
    )
    return [Figure(*figure) for figure in figures]


def write_report(path: Path, title: str, about: str, outcomes: Sequence[Outcome]) -> None:
    """Write a page that compares strategies. It has a table and plots, the fastest strategy first."""
    outcomes = fastest_first(outcomes)
    figures = _plots(outcomes)
    traced = [(o.strategy, o.timeline) for o in outcomes if o.timeline]
    if traced:
        timelines = svg(draw_timelines, traced, (11, 0.8 + 0.95 * len(traced)))
        caption = (
            "Rank 0, on one scale of time: what it computes, and what is on its links meanwhile. Gaps in the first "
            "row are waiting."
        )
        figures.append(Figure("One step, from inside", caption, timelines, wide=True))
    kinds = [" ".join(["best"] * wins(o, outcomes) + ["lossy"] * (not o.lossless)) for o in outcomes]
    write_page(path, title, f"{about} {MARKS}", table_html(HEADINGS, rows_of(outcomes), kinds), figures)


def fastest_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes in the order of their step times."""
    return sorted(outcomes, key=lambda outcome: outcome.step_seconds)


def wins(outcome: Outcome, outcomes: Sequence[Outcome]) -> bool:
    """Return whether no other strategy is faster, or none of the lossless ones, if it is lossless."""
    others = [other for other in outcomes if other.lossless or not outcome.lossless]
    return outcome.step_seconds == min(other.step_seconds for other in others)


def rows_of(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return the rows of a table under HEADINGS, for the page and for the terminal, the fastest first.

    The third cell compares with the slowest.
    """
    slowest = max(outcome.step_seconds for outcome in outcomes)
    rows: list[list[str]] = []
    for outcome in fastest_first(outcomes):
        marks = FASTEST * wins(outcome, outcomes) + LOSSY * (not outcome.lossless)
        rows.append(
            [
                f"{outcome.strategy} {marks}".strip(),
                f"{outcome.step_seconds:.2f} s",
                f"{slowest / outcome.step_seconds:.2f}",
                f"{outcome.exposed_seconds / outcome.step_seconds:.0%}",
                "not counted" if outcome.cable_bytes is None else f"{outcome.cable_bytes / 1e6:.2f}",
                f"{outcome.scheduled_bytes / 1e6:.2f}",
                f"{sum(outcome.memory_bytes.values()) / 1e6:.1f}",
                f"{outcome.losses[-1]:.4f}",
                "–" if outcome.validation is None else f"{outcome.validation:.4f}",
            ]
        )
    return rows
