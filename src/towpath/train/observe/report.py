"""One HTML file that shows what several strategies made of the same training: plots inside it, nothing to fetch."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from string import Template

from towpath.train.observe.plots import PLOTS, Outcome, draw_timelines, svg


def write_report(path: Path, title: str, about: str, outcomes: Sequence[Outcome]) -> None:
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
    write_page(path, title, about, table_html(HEADINGS, rows_of(outcomes)), figures)


def write_page(path: Path, title: str, about: str, table: str, figures: Sequence[str]) -> None:
    """`table` and `figures`: as `table_html()` and `figure_html()` make them."""
    page = Template(_PAGE).substitute(
        title=html.escape(title), about=html.escape(about), table=table, figures="\n".join(figures)
    )
    path.write_text(page, encoding="utf-8")


def figure_html(title: str, about: str, drawn: str, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}><h2>{html.escape(title)}</h2><p>{html.escape(about)}</p>{drawn}</figure>"


def table_html(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=scrolls><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


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


def rows_of(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Of a table under HEADINGS, here and in the terminal. How much faster: than the slowest."""
    slowest = max(outcome.step_seconds for outcome in outcomes)
    return [_cells(outcome, slowest) for outcome in outcomes]


def _cells(outcome: Outcome, slowest: float) -> list[str]:
    return [
        outcome.strategy,
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
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2024; background: #f6f7f9; margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 15px; margin: 0; }
p { margin: 2px 0 10px; color: #59636e; max-width: 75ch; }
table { border-collapse: collapse; width: 100%; background: #fff; border-radius: 8px; margin: 18px 0;
        font-variant-numeric: tabular-nums; box-shadow: 0 1px 2px #0002; }
th, td { padding: 7px 12px; text-align: right; border-top: 1px solid #eceef1; }
th { border: 0; font-weight: 600; font-size: 12.5px; color: #59636e; }
th:first-child, td:first-child { text-align: left; font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; background: #fff; padding: 14px 16px 6px; border-radius: 8px; box-shadow: 0 1px 2px #0002; }
figure.wide { grid-column: 1 / -1; } svg { width: 100%; height: auto; }
/* On a narrow screen a table, or a wide figure, is moved sideways; the page is not. */
.scrolls, figure.wide { overflow-x: auto; } figure { min-width: 0; } th, td { white-space: nowrap; }
/* Pictures are drawn for a light ground, and keep it. */
@media (prefers-color-scheme: dark) {
  :root { color-scheme: dark; } body { color: #e6e8ea; background: #14171a; }
  main > p, th { color: #aab2bb; } table { background: #1d2125; } th, td { border-color: #2c3238; }
  figure { color: #1c2024; }
}
@media (max-width: 600px) {
  main { padding: 16px 10px 40px; } figure { padding: 10px 6px 4px; } figure.wide svg { width: 760px; }
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
