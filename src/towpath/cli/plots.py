"""Plots as SVG, and HTML pages that hold them. A page loads nothing from the network."""

from __future__ import annotations

import hashlib
import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any, Protocol, TypeVar

from towpath.observing import BETWEEN, COMPUTE, INSIDE, Interval

# One color for each strategy, or part of a bar. They can be told apart without seeing red and green.
COLORS = ("#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#b08900", "#0b7285", "#c2255c", "#495057")
# The color that replaces each color on a dark page: black and white, those above, and the greys of peers.
ON_DARK = {
    "#000000": "#e6e8ea", "#ffffff": "#1d2125", "#b0b0b0": "#8b949e",
    "#1f6feb": "#6ea8fe", "#d9480f": "#ff8552", "#2b8a3e": "#51cf66", "#9c36b5": "#d67bea",
    "#b08900": "#e3b341", "#0b7285": "#3bc9db", "#c2255c": "#f783ac", "#495057": "#c3c9d0",
    "#343a40": "#dee2e6", "#868e96": "#9aa2aa", "#adb5bd": "#78818a", "#ced4da": "#59626b",
}  # fmt: skip
# A step of at least this many seconds is drawn in seconds, and a shorter one in milliseconds.
_IN_SECONDS = 3.0
# Curves that are closer than this share of the axis look like one.
_COINCIDE = 0.012
_DASH_POINTS = 5

Shown = TypeVar("Shown")


# Drawing --------------------------------------------------------------------------------------------------------------


def svg(draw: Callable[[Any, Shown], None], shown: Shown, size: tuple[float, float]) -> str:
    """Return a picture as an <svg> element for a page.

    Text in the picture is text. Each color is a CSS variable, which the pages of `write_page` change in dark mode.

    Args:
        draw: A function that draws on a matplotlib figure.
        shown: What it draws.
        size: The width and height in inches.
    """
    return _with_variables(_drawn(draw, shown, size), ON_DARK)


def standalone_svg(draw: Callable[[Any, Shown], None], shown: Shown, size: tuple[float, float]) -> str:
    """Return a picture for a file of its own, with a background that is light or dark as the reader prefers."""
    with_background = _drawn(draw, shown, size).replace("<svg ", '<svg style="background: #ffffff" ', 1)
    return light_and_dark(with_background, ON_DARK)


def light_and_dark(text: str, on_dark: Mapping[str, str]) -> str:
    """Return an SVG file that changes its colors, the keys of `on_dark`, if the reader prefers dark pages."""
    style = f"<style>@media (prefers-color-scheme: dark) {{ :root {{ {_css_variables(on_dark)} }} }}</style>"
    head, bracket, rest = _with_variables(text, on_dark).partition(">")
    return f"{head}{bracket}\n{style}{rest}"


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
    text = text[text.index("<svg") :].replace("<svg ", '<svg fill="#000000" ', 1)
    # Matplotlib derives ids from numbers whose last bits differ between processors. Ids that are derived from the text
    # make pictures identical on every host. They are also unique on a page with many pictures.
    hashed = re.compile(r"\b[mp][0-9a-f]{10}\b")
    ids = list(dict.fromkeys(re.findall(r'id="([mp][0-9a-f]{10})"', text)))
    places = {name: f"{i}" for i, name in enumerate(ids)}
    digest = hashlib.sha256(hashed.sub(lambda match: places.get(match[0], match[0]), text).encode()).hexdigest()[:8]
    return hashed.sub(lambda match: f"p{digest}{places[match[0]]}" if match[0] in places else match[0], text)


def _with_variables(text: str, on_dark: Mapping[str, str]) -> str:
    """Replace each color by a CSS variable whose default is the color."""
    return re.sub("|".join(on_dark), lambda found: f"var(--c{found[0][1:]}, {found[0]})", text)


def _css_variables(on_dark: Mapping[str, str]) -> str:
    return " ".join(f"--c{light[1:]}: {dark};" for light, dark in on_dark.items())


def color(number: int) -> str:
    """Return the color of a strategy, or part of a bar, by its number."""
    return COLORS[number % len(COLORS)]


def axes_of(figure: Any, xlabel: str, ylabel: str) -> Any:
    """Return axes that fill a figure, in the style of all plots."""
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
    ticks = _log_ticks(low, high)
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def _log_ticks(low: float, high: float, most: int = 8) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = [10.0**exponent for exponent in exponents if low <= 10.0**exponent <= high]
    ticks = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    if len(ticks) > most:
        return powers[:: math.ceil(len(powers) / most)]
    if len(ticks) >= 3:
        return ticks
    # Less than a decade: the ticks of a linear axis.
    linear = MaxNLocator(most - 2, steps=[1, 2, 5, 10]).tick_values(low, high)
    return [float(tick) for tick in linear if low <= tick <= high]


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line of a plot."""

    name: str
    points: tuple[tuple[float, float], ...]


def draw_curves(axes: Any, curves: Sequence[Curve]) -> None:
    """Draw curves over a logarithmic axis. Where some coincide, their dashes alternate, so that all can be seen."""
    drawn = [(color(number), curve) for number, curve in enumerate(curves) if curve.points]
    heights = [math.log(y) for _, curve in drawn for _, y in curve.points]
    near = _COINCIDE * (max(heights) - min(heights)) if heights else 0.0

    def turn(curve: Curve, ends: Sequence[tuple[float, float]]) -> tuple[int, int]:
        """Return the curve's place among those that pass through the same points, and how many there are."""
        coinciding = [
            other
            for _, other in drawn
            if all(any(x == at and abs(math.log(y / height)) <= near for x, y in other.points) for at, height in ends)
        ]
        return coinciding.index(curve), len(coinciding)

    for paint, curve in drawn:
        axes.plot([], [], "o-", color=paint, markersize=3, label=curve.name)
        for ends in pairwise(curve.points):
            axes.plot(*zip(*ends, strict=True), linestyle=dashes(*turn(curve, ends)), color=paint, dash_capstyle="butt")
        for point in curve.points:
            place, count = turn(curve, [point])
            axes.plot(*point, "o", color=paint, markersize=3 + 1.5 * (count - 1 - place))


def dashes(place: int, count: int) -> Any:
    """Return the line style of one of `count` lines that alternate."""
    return (_DASH_POINTS * place, (_DASH_POINTS, _DASH_POINTS * (count - 1))) if count > 1 else "-"


def draw_stacked(figure: Any, names: Sequence[str], label: str, parts: Mapping[str, Sequence[float]]) -> None:
    """Draw a bar for each name, stacked from its value in each of `parts`."""
    axes = axes_of(figure, label, "")
    left = [0.0] * len(names)
    for i, (part, values) in enumerate(parts.items()):
        axes.barh(names, values, left=left, color=color(i), label=part, height=0.62)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, ncols=3, loc="outside upper left")


class TracedStep(Protocol):
    """A strategy, and what happened in one step under it."""

    @property
    def strategy(self) -> str: ...

    @property
    def timeline(self) -> Sequence[Interval]: ...


def draw_timelines(figure: Any, steps: Sequence[TracedStep]) -> None:
    """Draw for each strategy what one step of a rank computed, and what its links carried at the same time."""
    begins = [min(interval.start_seconds for interval in step.timeline) for step in steps]
    ends = [max(interval.end_seconds for interval in step.timeline) for step in steps]
    longest = max(end - begin for begin, end in zip(begins, ends, strict=True))
    unit, scale = ("seconds", 1.0) if longest >= _IN_SECONDS else ("milliseconds", 1e3)
    axes = axes_of(figure, unit, "")
    tracks = {COMPUTE: (COLORS[0], 0), INSIDE: (COLORS[2], 1), BETWEEN: (COLORS[1], 2)}
    for i, (step, begin) in enumerate(zip(steps, begins, strict=True)):
        for interval in step.timeline:
            if interval.track in tracks:
                shade, row = tracks[interval.track]
                bar = ((interval.start_seconds - begin) * scale, interval.seconds * scale)
                axes.broken_barh([bar], (i * 4 + row, 0.82), facecolors=shade, alpha=0.8, linewidth=0)
    axes.set_yticks([i * 4 + 1.4 for i in range(len(steps))], [step.strategy for step in steps])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    handles = [(axes.broken_barh([(0, 0)], (0, 0), facecolors=c), name) for name, (c, _) in tracks.items()]
    figure.legend(*zip(*handles, strict=True), frameon=False, ncols=3, loc="outside upper left")


# Pages ----------------------------------------------------------------------------------------------------------------


def write_page(path: Path, title: str, about: str, table: str, figures: Sequence[str]) -> None:
    """Write a page with a table of `table_html` and figures of `figure_html`. `about` may have several lines."""
    page = Template(_PAGE).substitute(
        title=html.escape(title),
        about=html.escape(about).replace("\n", "<br>"),
        table=table,
        figures="\n".join(figures),
        dark_colors=_css_variables(ON_DARK),
    )
    path.write_text(page, encoding="utf-8")


def figure_html(title: str, about: str, drawn: str, wide: bool = False) -> str:
    """Return a figure of the page. A `wide` one takes the whole width, and scrolls sideways on a narrow screen."""
    kind = ' class="wide"' if wide else ""
    if wide and drawn.startswith("<svg"):
        drawn = _scrolling(drawn)
    return f"<figure{kind}><h2>{html.escape(title)}</h2><p>{html.escape(about)}</p>{drawn}</figure>"


# A number with its unit, an interval of numbers, or nothing.
_NUMBER = re.compile(r"[-–+−]?[\d.,]*( – [\d.,]+)?( ?[%×\wµ/]{0,9})?( ?[(\[].*[)\]])?$")


def table_html(headings: Sequence[str], rows: Sequence[Sequence[str]], kinds: Sequence[str] = ()) -> str:
    """Return a table that scrolls sideways on a narrow screen. `kinds`: the CSS classes of its rows, if any.

    Columns with other text than numbers are aligned to the left.
    """
    numeric = [all(_NUMBER.match(row[i]) for row in rows) for i in range(len(headings))]
    opens = ["" if number else ' class="text"' for number in numeric]
    head = "".join(f"<th{look}>{html.escape(heading)}</th>" for look, heading in zip(opens, headings, strict=True))
    opened = [f'<tr class="{kind}">' if kind else "<tr>" for kind in kinds or [""] * len(rows)]
    cells = [
        "".join(f"<td{look}>{html.escape(cell)}</td>" for look, cell in zip(opens, row, strict=True)) for row in rows
    ]
    body = "".join(f"{row}{inside}</tr>" for row, inside in zip(opened, cells, strict=True))
    return _scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _scrolling(content: str) -> str:
    """Put content into a container that scrolls sideways, and shows that it does."""
    return f'<p class="hint">Scroll sideways for the rest →</p><div class="scrolls" tabindex="0">{content}</div>'


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1c2024; --muted: #59636e; --page: #f6f7f9; --card: #fff; --line: #eceef1;
        --shade: #0003; --best: #e6f4ea; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 15px; margin: 0; }
p { margin: 2px 0 10px; color: var(--muted); max-width: 75ch; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: right; border-top: 1px solid var(--line); white-space: nowrap; }
th { border: 0; font-weight: 600; font-size: 12.5px; color: var(--muted); }
th:first-child, td:first-child { text-align: left; font-weight: 600; } .text { text-align: left; }
tr.best td { background: var(--best); } tr.lossy td { font-style: italic; }
main > .scrolls { border-radius: 8px; margin: 18px 0; box-shadow: 0 1px 2px #0002; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; min-width: 0; background: var(--card); padding: 14px 16px 6px; border-radius: 8px;
         box-shadow: 0 1px 2px #0002; }
figure.wide { grid-column: 1 / -1; } svg { width: 100%; height: auto; display: block; }
/* Where a table or a wide figure has no room, it scrolls sideways and the page does not. A shadow lies at each edge
   beyond which there is more: the covers move with the content, the shadows stay at the edges. */
.scrolls {
  overflow-x: auto; scrollbar-width: thin;
  background: linear-gradient(90deg, var(--card) 40%, transparent) left / 40px 100% no-repeat local,
    linear-gradient(270deg, var(--card) 40%, transparent) right / 40px 100% no-repeat local,
    linear-gradient(90deg, var(--shade), transparent) left / 14px 100% no-repeat,
    linear-gradient(270deg, var(--shade), transparent) right / 14px 100% no-repeat, var(--card);
}
.hint { display: none; font-size: 12.5px; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --muted: #aab2bb; --page: #14171a; --card: #1d2125; --line: #2c3238; --shade: #fff4;
          --best: #20382a; $dark_colors }
}
@media (max-width: 700px) {
  main { padding: 16px 10px 40px; } figure { padding: 10px 6px 4px; } .hint { display: block; margin: 8px 0 4px; }
  figure.wide .scrolls svg { width: 760px; } main > .scrolls { margin-top: 0; }
}
</style>
</head>
<body><main>
<h1>$title</h1>
<p>$about</p>
$table
<div class="plots">
$figures
</div>
</main></body>
</html>
"""
