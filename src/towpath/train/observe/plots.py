"""What several strategies made of the same training, as plots."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from towpath.observing import BETWEEN, COMPUTE, INSIDE, Interval

# One colour a strategy, or a part of a bar: told apart also where red and green are not.
COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#b08900", "#0b7285", "#c2255c", "#495057")
# The shade that takes a color's place on a dark ground: black and white, what is drawn above, and the greys of peers.
ON_DARK = {
    "#000000": "#e6e8ea", "#ffffff": "#1d2125", "#b0b0b0": "#8b949e",
    "#1f6feb": "#6ea8fe", "#d9480f": "#ff8552", "#2b8a3e": "#51cf66", "#9c36b5": "#d67bea",
    "#b08900": "#e3b341", "#0b7285": "#3bc9db", "#c2255c": "#f783ac", "#495057": "#c3c9d0",
    "#343a40": "#dee2e6", "#868e96": "#9aa2aa", "#adb5bd": "#78818a", "#ced4da": "#59626b",
}  # fmt: skip
_MEGA = 1e6
# A step of at least so many seconds is drawn in seconds, a shorter one in milliseconds.
_IN_SECONDS = 3.0
# Curves nearer to each other than this share of the axis coincide for the eye.
_COINCIDE = 0.012
_DASH_POINTS = 5

_HASHED = re.compile(r"\b[mp][0-9a-f]{10}\b")
_REFERRED_TO = re.compile(r'id="([mp][0-9a-f]{10})"')


Shown = TypeVar("Shown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One strategy's training, as rank 0 saw it. Seconds and bytes: of one optimizer step, in the mean."""

    strategy: str
    losses: tuple[float, ...]  # by step
    ends: tuple[float, ...]  # seconds from the start of the first step to the end of each
    validation: float | None
    step_seconds: float
    exposed_seconds: float
    host_seconds: float  # the engine's, the optimizer's, the data's: all that is neither compute nor waiting
    cable_bytes: float | None  # sent over a node's cable, counted by the kernel; None where there is no cable
    scheduled_bytes: int  # the same, as towpath.schedule() foretells it
    inside_bytes: float  # sent inside one node
    memory_bytes: dict[str, int]
    lossless: bool  # no codec rounds what travels
    timeline: tuple[Interval, ...]  # of one step on rank 0

    @property
    def compute_seconds(self) -> float:
        return max(0.0, self.step_seconds - self.exposed_seconds - self.host_seconds)


def svg(draw: Callable[[Any, Shown], None], shown: Shown, size: tuple[float, float]) -> str:
    """Return what `draw` puts on a figure of `shown`, as an <svg> element for a page.

    Its text is text, and each of its colors is a CSS variable, which a page with `DARK_COLOURS` exchanges in the dark.
    """
    return _with_variables(_drawn(draw, shown, size), ON_DARK)


def _drawn(draw: Callable[[Any, Shown], None], shown: Shown, size: tuple[float, float]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "towpath", "font.size": 9, "font.family": "sans-serif"}
    ):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        draw(figure, shown)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    text = out.getvalue()
    # Matplotlib does not write the color of what is black.
    return _same_on_every_host(text[text.index("<svg") :].replace("<svg ", '<svg fill="#000000" ', 1))


def _same_on_every_host(text: str) -> str:
    """Matplotlib names what it refers to after numbers whose last bits differ between processors: here, after what is
    written of them, so that pictures are equal where they look it, and that many can stand on one page."""
    found = list(dict.fromkeys(_REFERRED_TO.findall(text)))
    places = {name: f"{i}" for i, name in enumerate(found)}
    digest = hashlib.sha256(_HASHED.sub(lambda match: places.get(match[0], match[0]), text).encode()).hexdigest()[:8]
    return _HASHED.sub(lambda match: f"p{digest}{places[match[0]]}" if match[0] in places else match[0], text)


def standalone_svg(draw: Callable[[Any, Shown], None], shown: Shown, size: tuple[float, float]) -> str:
    """Return a picture for a file of its own, with its own ground, light or dark as the reader prefers."""
    with_ground = _drawn(draw, shown, size).replace("<svg ", '<svg style="background: #ffffff" ', 1)
    return light_and_dark(with_ground, ON_DARK)


def light_and_dark(text: str, on_dark: Mapping[str, str]) -> str:
    """Return an SVG file that exchanges its colors, the keys of `on_dark`, where the reader prefers dark pages."""
    style = f"<style>@media (prefers-color-scheme: dark) {{ :root {{ {_declared(on_dark)} }} }}</style>"
    head, bracket, rest = _with_variables(text, on_dark).partition(">")
    return f"{head}{bracket}\n{style}{rest}"


def _with_variables(text: str, on_dark: Mapping[str, str]) -> str:
    """Let each color be a CSS variable, which falls back to the color itself."""
    return re.sub("|".join(on_dark), lambda found: f"var(--c{found[0][1:]}, {found[0]})", text)


def _declared(on_dark: Mapping[str, str]) -> str:
    return " ".join(f"--c{light[1:]}: {dark};" for light, dark in on_dark.items())


# What a page declares in the dark, for all pictures on it.
DARK_COLOURS = _declared(ON_DARK)


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    about: str
    draw: Callable[[Any, Sequence[Outcome]], None]
    size: tuple[float, float] = (5.2, 3.3)  # in inches, of which a page makes what it has room for


def axes_of(figure: Any, xlabel: str, ylabel: str) -> Any:
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    return axes


def set_log_scale(axes: Any, which: str) -> None:
    """Make the axis `which` ("x" or "y") logarithmic, with round ticks whose labels do not overlap."""
    getattr(axes, f"set_{which}scale")("log")
    low, high = getattr(axes, f"get_{which}lim")()
    axis = getattr(axes, f"{which}axis")
    ticks = log_ticks(low, high)
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def log_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Return up to `most` round values from `low` to `high`, far enough apart to be labels of a logarithmic axis."""
    from matplotlib.ticker import MaxNLocator

    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = [10.0**exponent for exponent in exponents if low <= 10.0**exponent <= high]
    ticks = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    if len(ticks) > most:
        return powers[:: math.ceil(len(powers) / most)]
    if len(ticks) >= 3:
        return ticks
    # Less than a decade: as on a linear axis.
    linear = MaxNLocator(most - 2, steps=[1, 2, 5, 10]).tick_values(low, high)
    return [float(tick) for tick in linear if low <= tick <= high]


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line of a plot."""

    name: str
    points: tuple[tuple[float, float], ...]


def draw_curves(axes: Any, curves: Sequence[Curve]) -> None:
    """Draw curves over a logarithmic axis on which all can be seen: where some coincide, their dashes take turns."""
    drawn = [(colour(number), curve) for number, curve in enumerate(curves) if curve.points]
    heights = [math.log(y) for _, curve in drawn for _, y in curve.points]
    near = _COINCIDE * (max(heights) - min(heights)) if heights else 0.0

    def turn(curve: Curve, ends: Sequence[tuple[float, float]]) -> tuple[int, int]:
        """Return the curve's place among those that pass where it does, and how many there are."""
        alike = [
            other
            for _, other in drawn
            if all(any(x == at and abs(math.log(y / height)) <= near for x, y in other.points) for at, height in ends)
        ]
        return alike.index(curve), len(alike)

    for paint, curve in drawn:
        axes.plot([], [], "o-", color=paint, markersize=3, label=curve.name)
        for ends in pairwise(curve.points):
            place, count = turn(curve, ends)
            dashes = (_DASH_POINTS * place, (_DASH_POINTS, _DASH_POINTS * (count - 1))) if count > 1 else "-"
            axes.plot(*zip(*ends, strict=True), linestyle=dashes, color=paint, dash_capstyle="butt")
        for point in curve.points:
            place, count = turn(curve, [point])
            axes.plot(*point, "o", color=paint, markersize=3 + 1.5 * (count - 1 - place))


def _loss_steps(figure: Any, outcomes: Sequence[Outcome]) -> None:
    axes = axes_of(figure, "optimizer steps", "training loss")
    for i, outcome in enumerate(outcomes):
        axes.plot(range(1, len(outcome.losses) + 1), outcome.losses, linewidth=0.7, color=colour(i))
    for i, outcome in enumerate(outcomes):
        steps, look = range(1, len(outcome.losses) + 1), {"color": colour(i)}
        # Lossless strategies learn alike: where curves coincide, each has its turn to be seen.
        turns = (_DASH_POINTS * i, (_DASH_POINTS, _DASH_POINTS * (len(outcomes) - 1))) if len(outcomes) > 1 else "-"
        axes.plot(steps, outcome.losses, linewidth=2.2, linestyle=turns, dash_capstyle="butt", **look)
        axes.plot([], [], linewidth=2.2, label=outcome.strategy, **look)
    axes.legend(frameon=False)


def _loss_seconds(figure: Any, outcomes: Sequence[Outcome]) -> None:
    axes = axes_of(figure, "seconds", "training loss")
    for i, outcome in enumerate(outcomes):
        axes.plot(outcome.ends, outcome.losses, color=colour(i), linewidth=1.3, label=outcome.strategy)
        axes.plot(outcome.ends[-1:], outcome.losses[-1:], "o", color=colour(i), markersize=4)
    axes.legend(frameon=False)


def _stacked(figure: Any, outcomes: Sequence[Outcome], label: str, parts: dict[str, list[float]]) -> None:
    draw_stacked(figure, [o.strategy for o in outcomes], label, parts)


def draw_stacked(figure: Any, names: Sequence[str], label: str, parts: Mapping[str, Sequence[float]]) -> None:
    """A bar for each name, of its part of every list."""
    axes = axes_of(figure, label, "")
    left = [0.0] * len(names)
    for i, (part, values) in enumerate(parts.items()):
        axes.barh(names, values, left=left, color=colour(i), label=part, height=0.62)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, ncols=3, loc="outside upper left")


def _step_time(figure: Any, outcomes: Sequence[Outcome]) -> None:
    parts = {
        "compute": [o.compute_seconds for o in outcomes],
        "exposed communication": [o.exposed_seconds for o in outcomes],
        "optimizer, data, engine": [o.host_seconds for o in outcomes],
    }
    _stacked(figure, outcomes, "seconds", parts)


def _speed(figure: Any, outcomes: Sequence[Outcome]) -> None:
    slowest = max(o.step_seconds for o in outcomes)
    parts = {f"steps in {slowest:.2f} s": [slowest / o.step_seconds for o in outcomes]}
    _stacked(figure, outcomes, "times as fast as the slowest", parts)


def _bytes(figure: Any, outcomes: Sequence[Outcome]) -> None:
    parts = {
        "between nodes": [(o.scheduled_bytes if o.cable_bytes is None else o.cable_bytes) / _MEGA for o in outcomes],
        "inside nodes": [o.inside_bytes / _MEGA for o in outcomes],
    }
    _stacked(figure, outcomes, "MB", parts)


def _memory(figure: Any, outcomes: Sequence[Outcome]) -> None:
    kinds = list(dict.fromkeys(kind for o in outcomes for kind, held in o.memory_bytes.items() if held))
    parts = {kind.replace("_", " "): [o.memory_bytes.get(kind, 0) / _MEGA for o in outcomes] for kind in kinds}
    _stacked(figure, outcomes, "MB", parts)


class Traced(Protocol):
    """A strategy and what took place in one step under it."""

    @property
    def strategy(self) -> str: ...

    @property
    def timeline(self) -> Sequence[Interval]: ...


def draw_timelines(figure: Any, steps: Sequence[Traced]) -> None:
    """For each strategy: what one step of a rank computed, and what its links carried meanwhile."""
    begins = [min(interval.start_seconds for interval in step.timeline) for step in steps]
    ends = [max(interval.end_seconds for interval in step.timeline) for step in steps]
    longest = max(end - begin for begin, end in zip(begins, ends, strict=True))
    unit, scale = ("seconds", 1.0) if longest >= _IN_SECONDS else ("milliseconds", 1e3)
    axes = axes_of(figure, unit, "")
    tracks = {COMPUTE: (COLOURS[0], 0), INSIDE: (COLOURS[2], 1), BETWEEN: (COLOURS[1], 2)}
    ticks: list[tuple[float, str]] = []
    for i, (step, begin) in enumerate(zip(steps, begins, strict=True)):
        for interval in step.timeline:
            if interval.track not in tracks:
                continue
            shade, row = tracks[interval.track]
            shard_spec = ((interval.start_seconds - begin) * scale, interval.seconds * scale)
            axes.broken_barh([shard_spec], (i * 4 + row, 0.82), facecolors=shade, alpha=0.8, linewidth=0)
        ticks.append((i * 4 + 1.4, step.strategy))
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    handles = [(axes.broken_barh([(0, 0)], (0, 0), facecolors=c), name) for name, (c, _) in tracks.items()]
    figure.legend(*zip(*handles, strict=True), frameon=False, ncols=3, loc="outside upper left")


PLOTS = (
    Plot("Loss against steps", "A lossless strategy changes what travels, not what is learned.", _loss_steps),
    Plot("Loss against seconds", "The same steps, as long as the network makes them.", _loss_seconds),
    Plot("Where a step's time goes", "The mean step, on rank 0.", _step_time),
    Plot("Speed", "Of the same steps, with the same batch.", _speed),
    Plot("Bytes of one step", "Over the cable of one node, and inside it.", _bytes),
    Plot("Memory of a rank", "What the engine holds, after the first steps.", _memory),
)
