"""Plots as SVG, and HTML pages that hold them. A page loads nothing from the network."""

from __future__ import annotations

import hashlib
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from towpath.observe.trace import BETWEEN, COMPUTE, INSIDE, Interval

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
_DASH_POINTS = 5

# Drawing --------------------------------------------------------------------------------------------------------------


def svg(draw: Callable[[Any, Any], None], shown: Any, size: tuple[float, float]) -> str:
    """Return a picture as an <svg> element for a page.

    Text in the picture is text. Each color is a CSS variable, which the pages of `write_page` change in dark mode.

    `draw` draws `shown` on a matplotlib figure of `size` inches.
    """
    return _with_variables(_drawn(draw, shown, size), ON_DARK)


def standalone_svg(draw: Callable[[Any, Any], None], shown: Any, size: tuple[float, float]) -> str:
    """Return a picture for a file of its own, with a background that is light or dark as the reader prefers."""
    with_background = _drawn(draw, shown, size).replace("<svg ", '<svg style="background: #ffffff" ', 1)
    return light_and_dark(with_background, ON_DARK)


def light_and_dark(text: str, on_dark: Mapping[str, str]) -> str:
    """Return an SVG file that changes its colors, the keys of `on_dark`, if the reader prefers dark pages."""
    style = f"<style>@media (prefers-color-scheme: dark) {{ :root {{ {_css_variables(on_dark)} }} }}</style>"
    head, bracket, rest = _with_variables(text, on_dark).partition(">")
    return f"{head}{bracket}\n{style}{rest}"


def _drawn(draw: Callable[[Any, Any], None], shown: Any, size: tuple[float, float]) -> str:
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


def draw_timelines(figure: Any, steps: Sequence[tuple[str, Sequence[Interval]]]) -> None:
    """Draw what a step of a rank computed, and what its links carried meanwhile. `steps` are intervals with a name."""
    begins = [min(interval.start_seconds for interval in timeline) for _, timeline in steps]
    ends = [max(interval.end_seconds for interval in timeline) for _, timeline in steps]
    longest = max(end - begin for begin, end in zip(begins, ends, strict=True))
    unit, scale = ("seconds", 1.0) if longest >= _IN_SECONDS else ("milliseconds", 1e3)
    axes = axes_of(figure, unit, "")
    tracks = {COMPUTE: (COLORS[0], 0), INSIDE: (COLORS[2], 1), BETWEEN: (COLORS[1], 2)}
    for i, ((_, timeline), begin) in enumerate(zip(steps, begins, strict=True)):
        for interval in timeline:
            if interval.track in tracks:
                shade, row = tracks[interval.track]
                bar = ((interval.start_seconds - begin) * scale, interval.seconds * scale)
                axes.broken_barh([bar], (i * 4 + row, 0.82), facecolors=shade, alpha=0.8, linewidth=0)
    axes.set_yticks([i * 4 + 1.4 for i in range(len(steps))], [name for name, _ in steps])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    handles = [(axes.broken_barh([(0, 0)], (0, 0), facecolors=c), name) for name, (c, _) in tracks.items()]
    figure.legend(*zip(*handles, strict=True), frameon=False, ncols=3, loc="outside upper left")


# Pages ----------------------------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A figure of a page. A `wide` one takes the whole width, and scrolls sideways on a narrow screen."""

    title: str
    about: str
    drawn: str  # by `svg`
    wide: bool = False

    def html(self) -> str:
        """Return the figure as an element."""
        drawn, kind = (_scrolling(self.drawn), ' class="wide"') if self.wide else (self.drawn, "")
        return f"<figure{kind}><h2>{html.escape(self.title)}</h2><p>{html.escape(self.about)}</p>{drawn}</figure>"


def write_page(path: Path, title: str, about: str, table: str, figures: Sequence[Figure]) -> None:
    """Write a page with a table of `table_html` and figures."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    page = Template(template).substitute(
        title=html.escape(title),
        about=html.escape(about),
        table=table,
        figures="\n".join(figure.html() for figure in figures),
        dark_colors=_css_variables(ON_DARK),
    )
    path.write_text(page, encoding="utf-8")


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
