"""Pictures: the same on every processor, many on one page, legible in the light, in the dark and on a narrow screen."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lab.report import Outcome, rows_of, write_report
from towpath.cli import plan_report
from towpath.cli.main import _run
from towpath.cli.plots import COLORS, draw_timelines, standalone_svg, svg
from towpath.engine.streams.trace import COMPUTE, Interval


def _line(figure: Any, last: float) -> None:
    figure.set_layout_engine("none")
    figure.add_axes((0.1, 0.1, 0.8, last)).plot([0, 1])


def test_a_picture_is_the_same_where_numbers_differ_in_their_last_bits() -> None:
    assert svg(_line, 0.8, (2, 2)) == svg(_line, 0.8 + 2**-50, (2, 2))


def test_pictures_on_one_page_do_not_refer_to_each_other() -> None:
    first, second = (svg(_line, height, (2, 2)) for height in (0.8, 0.5))
    for text in (first, second):
        assert set(re.findall(r"url\(#(\w+)\)", text)) <= set(re.findall(r'id="(\w+)"', text))
    clips = [set(re.findall(r"url\(#(\w+)\)", text)) for text in (first, second)]
    assert clips[0] and clips[1] and not clips[0] & clips[1]


def test_without_matplotlib_a_picture_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = ["plan", "llama-7b", "--cluster", "ethernet-10g", "--batch", "64", "--report", "report.html"]
    assert _run(arguments) == 2
    assert "--report report.html: pictures are drawn by matplotlib" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


# --- what a reader sees ----------------------------------------------------------------------------------------------


def _on_canvas(draw: Callable[[Any, Any], None], shown: Any, size: tuple[float, float]) -> FigureCanvasAgg:
    figure = Figure(figsize=size, layout="constrained")
    draw(figure, shown)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas


@pytest.mark.parametrize("draw", [plan_report.draw_rates, plan_report.draw_nodes])
@pytest.mark.parametrize(
    ("low", "high"), [(15, 1500), (5, 200), (29.37, 29.42), (2.1, 8), (9, 11), (1e-3, 900), (0.4, 0.4), (95, 1050)]
)
def test_the_ticks_of_a_logarithmic_axis_do_not_overlap(draw: Any, low: float, high: float) -> None:
    seconds = [high * (low / high) ** (step / 8) for step in range(9)]
    curve = plan_report.Curve("zero3", tuple((0.575 * 2**step, y) for step, y in enumerate(seconds)))
    (axes,) = _on_canvas(draw, [curve], (5.2, 3.3)).figure.axes
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        places = [*axis.get_majorticklocs(), *axis.get_minorticklocs()]
        ticks = [*axis.get_majorticklabels(), *axis.get_minorticklabels()]
        shown = [
            tick.get_window_extent()
            for place, tick in zip(places, ticks, strict=True)
            if tick.get_text() and limits[0] <= place <= limits[1]
        ]
        assert len(shown) >= 1
        assert not [pair for pair in combinations(shown, 2) if pair[0].overlaps(pair[1])]


def _pixels(canvas: FigureCanvasAgg, color: str) -> int:
    """How many there are of this color inside the axes."""
    (axes,) = canvas.figure.axes
    box = axes.get_window_extent()
    picture: Any = canvas.buffer_rgba()
    width, height = canvas.get_width_height()
    wanted = tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))
    raw = bytes(picture)
    rows, columns = range(int(height - box.y1), int(height - box.y0)), range(int(box.x0), int(box.x1))
    at = (4 * (y * width + x) for y in rows for x in columns)
    return sum(all(abs(raw[i + k] - wanted[k]) <= 40 for k in range(3)) for i in at)


def test_every_curve_is_seen_where_all_coincide() -> None:
    points = tuple((2.0**step, 100 / (step + 1)) for step in range(6))
    curves = [plan_report.Curve(name, points) for name in ("a", "b", "c", "d")]
    drawn = _on_canvas(plan_report.draw_rates, curves, (5.2, 3.3))
    seen = [_pixels(drawn, COLORS[number]) for number in range(4)]
    assert min(seen) > 120 and max(seen) < 4 * min(seen), seen


def _computing(start: float, seconds: float) -> Interval:
    return Interval(track=COMPUTE, name="block", start_seconds=start, seconds=seconds, args={})


def _step(seconds: float) -> Any:
    return ("zero3", [_computing(1.0, seconds)])


@pytest.mark.parametrize(("seconds", "unit", "end"), [(35, "seconds", 35), (0.02, "milliseconds", 20)])
def test_a_timeline_is_in_units_that_fit_its_length(seconds: float, unit: str, end: float) -> None:
    (axes,) = _on_canvas(draw_timelines, [_step(seconds)], (11, 2)).figure.axes
    assert axes.get_xlabel() == unit
    assert end <= axes.get_xlim()[1] < 1.2 * end


# --- in the dark -----------------------------------------------------------------------------------------------------


def _colored(figure: Any, shown: Any) -> None:
    axes = figure.add_subplot()
    axes.set_title("text")
    for color in (*COLORS, "#868e96", "black"):
        axes.plot([0, 1], [0, 1], "o", color=color)


def _bare_colors(text: str) -> list[str]:
    return re.findall(r"#[0-9a-f]{6}\b", re.sub(r"var\(--\w+, #[0-9a-f]{6}\)|--\w+: #[0-9a-f]{6};", "", text))


def test_every_color_of_a_picture_is_a_variable_of_its_page() -> None:
    text = svg(_colored, None, (3, 2))
    assert not _bare_colors(text)
    assert '<svg fill="var(--c000000, #000000)"' in text  # what matplotlib writes no color for


def test_a_picture_of_its_own_has_a_dark_shade_for_every_color() -> None:
    text = standalone_svg(_colored, None, (3, 2))
    (dark,) = re.findall(r"@media \(prefers-color-scheme: dark\) \{ :root \{(.*?)\} \}", text)
    assert set(re.findall(r"var\((--\w+)", text)) <= set(re.findall(r"(--\w+):", dark))
    assert "background: var(--cffffff, #ffffff)" in text and not _bare_colors(text)


# --- the page of several strategies ----------------------------------------------------------------------------------


def _outcome(strategy: str, step_seconds: float, lossless: bool = True) -> Outcome:
    return Outcome(
        strategy=strategy,
        losses=(4.0, 3.0),
        ends=(step_seconds, 2 * step_seconds),
        validation=3.0,
        step_seconds=step_seconds,
        exposed_seconds=step_seconds / 2,
        host_seconds=0.1,
        cable_bytes=None,
        scheduled_bytes=10,
        inside_bytes=10.0,
        memory_bytes={"params": 10},
        lossless=lossless,
        timeline=(_computing(0.0, step_seconds),),
    )


OUTCOMES = [_outcome("zero3", 3.0), _outcome("qgz", 2.5, False), _outcome("mics", 2.0), _outcome("zero++", 1.0, False)]


class _Page(HTMLParser):
    """What a page has: the classes of the rows, headings, and what lies in no container that scrolls."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[str] = []
        self.open: list[str] = []  # of divs, figures and paragraphs, their classes
        self.cut: list[str] = []
        self.hints = self.containers = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kind = dict(attrs).get("class") or ""
        if tag in ("div", "figure"):
            self.open.append(kind)
        self.hints += kind == "hint"
        self.containers += kind == "scrolls"
        if tag == "tr":
            self.rows.append(kind)
        if tag == "table" and "scrolls" not in self.open:
            self.cut.append(tag)
        if tag == "svg" and "wide" in self.open and "scrolls" not in self.open:
            self.cut.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("div", "figure"):
            self.open.pop()


@pytest.fixture
def page(tmp_path: Path) -> str:
    write_report(tmp_path / "report.html", "A title", "About it.", OUTCOMES)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_table_is_sorted_and_marks_the_fastest_and_the_lossy(page: str) -> None:
    assert [row[0] for row in rows_of(OUTCOMES)] == ["zero++ ★~", "mics ★", "qgz ~", "zero3"]
    assert _Page(page).rows[1:] == ["best lossy", "best", "lossy", ""]
    assert "★: " in page and "~: lossy" in page


def test_the_bars_are_in_the_order_of_the_table(page: str) -> None:
    bars = page[page.index("Where a step") : page.index("<h2>Speed")]
    assert re.findall(r">(zero\+\+|mics|qgz|zero3)</text>", bars) == ["zero++", "mics", "qgz", "zero3"]


def test_what_is_too_wide_for_a_narrow_screen_scrolls_with_a_hint(page: str) -> None:
    found = _Page(page)
    assert found.cut == []
    assert found.hints == found.containers == 2  # the table, and the timelines


def test_a_page_in_the_dark_has_no_color_of_the_light_one(page: str) -> None:
    style = page[page.index("<style>") : page.index("</style>")]
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    declared = set(re.findall(r"(--\w+):", dark))
    assert set(re.findall(r"var\((--\w+)", page)) <= declared
    assert set(re.findall(r"(--\w+):", light)) <= declared
    # Cards, text and lines have no color but by a variable.
    assert not re.findall(r"(?:color|background|border-top): ?[^;}]*#\w+", re.sub(r":root \{[^}]*\}", "", light))
