"""One HTML file that shows what several strategies made of the same training: plots inside it, nothing to fetch."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from string import Template

from towpath.train.observe.plots import DARK_COLOURS, PLOTS, Outcome, draw_timelines, svg

FASTEST, LOSSY = "★", "~"
MARKS = f"{FASTEST}: the fastest strategy, and the fastest lossless one. {LOSSY}: lossy, a codec rounds what it sends."


def write_report(path: Path, title: str, about: str, outcomes: Sequence[Outcome]) -> None:
    outcomes = fastest_first(outcomes)
    figures = [figure_html(plot.title, plot.about, svg(plot.draw, outcomes, plot.size)) for plot in PLOTS]
    traced = [o for o in outcomes if o.timeline]
    if traced:
        figures.append(
            figure_html(
                "One step, from inside",
                "Rank 0, on one scale of time: what it computes, and what is on its links meanwhile. Gaps in the first "
                "row are waiting.",
                svg(draw_timelines, traced, (11, 0.8 + 0.95 * len(traced))),
                wide=True,
            )
        )
    table = table_html(HEADINGS, rows_of(outcomes), [_kind(outcome, outcomes) for outcome in outcomes])
    write_page(path, title, f"{about} {MARKS}", table, figures)


def write_page(path: Path, title: str, about: str, table: str, figures: Sequence[str]) -> None:
    """`table` and `figures`: as `table_html()` and `figure_html()` make them."""
    page = Template(_PAGE).substitute(
        title=html.escape(title),
        about=html.escape(about),
        table=table,
        figures="\n".join(figures),
        dark_colours=DARK_COLOURS,
    )
    path.write_text(page, encoding="utf-8")


def figure_html(title: str, about: str, drawn: str, wide: bool = False) -> str:
    """Return a figure of the page. A `wide` one takes the whole width, and scrolls sideways on a narrow screen."""
    kind = ' class="wide"' if wide else ""
    if wide and drawn.startswith("<svg"):
        drawn = _scrolling(drawn)
    return f"<figure{kind}><h2>{html.escape(title)}</h2><p>{html.escape(about)}</p>{drawn}</figure>"


def table_html(headings: Sequence[str], rows: Sequence[Sequence[str]], kinds: Sequence[str] = ()) -> str:
    """Return a table that scrolls sideways where it has no room. `kinds`: the classes of its rows, if any."""
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    opened = [f'<tr class="{kind}">' if kind else "<tr>" for kind in kinds or [""] * len(rows)]
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"{row}{inside}</tr>" for row, inside in zip(opened, cells, strict=True))
    return _scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _scrolling(content: str) -> str:
    """Put content into a container that scrolls sideways, and shows that it does."""
    return f'<p class="hint">Scroll sideways for the rest →</p><div class="scrolls" tabindex="0">{content}</div>'


HEADINGS = (
    "strategy",
    "step",
    "× faster",
    "exposed",
    "MB between nodes",
    "as scheduled",
    "MB a rank",
    "loss",
    "held-out loss",
)


def fastest_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes in the order of their step times."""
    return sorted(outcomes, key=lambda outcome: outcome.step_seconds)


def wins(outcome: Outcome, outcomes: Sequence[Outcome]) -> bool:
    """Return whether no other strategy is faster, or none of the lossless ones, if it is lossless."""
    others = [other for other in outcomes if other.lossless or not outcome.lossless]
    return outcome.step_seconds == min(other.step_seconds for other in others)


def _kind(outcome: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Return the classes of an outcome's row."""
    return " ".join(["best"] * wins(outcome, outcomes) + ["lossy"] * (not outcome.lossless))


def rows_of(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return the rows of a table under HEADINGS, for the page and for the terminal, the fastest first.

    The third cell compares with the slowest.
    """
    slowest = max(outcome.step_seconds for outcome in outcomes)
    return [_cells(each, slowest, wins(each, outcomes)) for each in fastest_first(outcomes)]


def _cells(outcome: Outcome, slowest: float, won: bool) -> list[str]:
    marks = FASTEST * won + LOSSY * (not outcome.lossless)
    return [
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
th:first-child, td:first-child { text-align: left; font-weight: 600; }
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
          --best: #20382a; $dark_colours }
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
