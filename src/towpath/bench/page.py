"""`towpath bench report`: all results as one HTML page that needs nothing from a network.

    towpath bench report -o bench.html                  of all files of results there are
    towpath bench report results.jsonl -o bench.html    of these

The page shows the last run of each case, failed runs and lost comparisons included.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from towpath.bench import drawing, summary
from towpath.bench.drawing import Line
from towpath.bench.harness import results
from towpath.bench.harness.help import HelpFormatter
from towpath.bench.harness.suite import Parser
from towpath.errors import ConfigError
from towpath.files import check_output_file
from towpath.train.observe.plots import svg
from towpath.train.observe.report import figure_html, table_html, write_page

_HEADINGS = ("case", "figure", "result", "95 % interval", "date", "commit")
_SIZE = (5.2, 4.2)
_COMPARED = "communication_share"  # a key that only results of strategies and scaling have
_ABOUT = (
    "A column is the time that FSDP2's communication takes alone, over the time that the model computes. A cell has "
    "the median speed-up over the best tuned lossless peer, the lowest and highest, and the number of comparisons."
)
_LOOK = "Peers are grey squares; what is lossy has a broken line."


def main(arguments: Sequence[str], command: str) -> None:
    parser = Parser(prog=command, description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=f"default: all of {results.FOLDER}")
    parser.add_argument("-o", "--output", type=Path, default=Path("bench.html"), help="default: bench.html")
    options = parser.parse_args(arguments)
    output: Path = options.output
    check_output_file("--output", output)
    write(output, read(options.files))
    print(f"The page: {output}")


def read(files: Sequence[Path]) -> list[Line]:
    """The last run of each case of each suite."""
    if missing := [str(file) for file in files if not file.is_file()]:
        raise ConfigError(f"there is no file {', '.join(missing)}.")
    found: list[Line] = []
    for file in files or sorted(results.FOLDER.glob("*.jsonl")):
        try:
            lines = results.read(file)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        for number, line in enumerate(lines, start=1):
            _check(line, f"{file}:{number}")
        found += results.last(lines, failed=True).values()
    if not found:
        where = ", ".join(map(str, files)) or str(results.FOLDER)
        raise ConfigError(f"there are no results in {where}. `towpath bench strategies --quick -o FILE` makes some.")
    return found


def _check(line: Any, where: str) -> None:
    case = line.get("case") if isinstance(line, dict) else None
    if not isinstance(case, dict) or "name" not in case or not isinstance(line.get("checks"), list):
        raise ConfigError(f"{where} is no result of `towpath bench`: a line needs `case` with a `name`, and `checks`.")


def write(path: Path, lines: Sequence[Line]) -> None:
    write_page(path, "Towpath beside its peers", counted(lines), at_a_glance(lines), [*figures(lines), *tables(lines)])


def counted(lines: Sequence[Line]) -> str:
    """Return how many cases there are, and how many failed, in one sentence."""
    failed = sum("failed" in line for line in lines)
    return f"The last run of {len(lines)} cases, of which {failed} failed."


def at_a_glance(lines: Sequence[Line]) -> str:
    """Return the picture and the table of speed-ups, or nothing without comparisons of the usual model."""
    compared = [line for line in lines if line.get("suite") == "strategies"]
    if not (rows := summary.rows(compared)):
        return ""
    drawn = svg(drawing.draw_speedups, compared, (10.4, 4.6))
    points = "One point per comparison. Above the line our strategy is faster."
    picture = figure_html("Speed-up over the best tuned lossless peer", points, drawn, wide=True)
    return f"{picture}<p>{html.escape(_ABOUT)}</p>{table_html(summary.HEADINGS, rows)}"


def tables(lines: Sequence[Line]) -> Iterable[str]:
    """Yield a table of every figure for each suite."""
    each = "Figures are medians over the rounds. An interval is that of the ratio within a round."
    suites: dict[str, list[Line]] = {}
    for line in lines:
        suites.setdefault(line.get("suite") or "other results", []).append(line)
    for suite, group in suites.items():
        table = table_html(_HEADINGS, [row for line in group for row in rows(line)])
        yield figure_html(f"Every figure: {suite}", f"{counted(group)} {each}", table, wide=True)


def rows(line: Line) -> Iterable[list[str]]:
    """Yield a row for each figure of a run, and one with the reason if it failed."""
    case, where = str(line["case"]["name"]), [str(line.get("date"))[:10], results.measured_at(line)]
    if "failed" in line:
        yield [case, f"FAILED: {str(line['failed'])[:120]}", "", "", *where]
    for check in line["checks"]:
        yield [case, str(check["what"]), f"{check['found']:.4g}", results.interval(check), *where]


def figures(lines: Sequence[Line]) -> Iterable[str]:
    """Of whatever there is."""
    raced = [line for line in lines if _COMPARED in line]
    for title, group in drawing.groups_of([line for line in raced if line["suite"] == "strategies"]).items():
        curves, unshaped = drawing.curves_by_rate(group)
        if any(len(curve.points) > 1 for curve in curves):
            drawn = svg(drawing.draw_by_rate, (curves, unshaped), _SIZE)
            yield figure_html(f"Time against link rate: {title}", _LOOK, drawn)
        yield from _of_one(group[0])
    for title, group in drawing.groups_of_scaling([line for line in raced if line["suite"] == "scaling"]).items():
        drawn = svg(drawing.draw_by_nodes, drawing.curves_by_nodes(group), _SIZE)
        yield figure_html(f"Seconds of one step, {title}", _LOOK, drawn)


def _of_one(line: Line) -> Iterable[str]:
    name, bars = line["case"]["name"], (5.2, 1.0 + 0.24 * len(line[_COMPARED]))
    sent, held = svg(drawing.draw_bytes, line, bars), svg(drawing.draw_memory, line, bars)
    yield figure_html(f"Bytes on the links: {name}", "By the kernel's counters.", sent)
    yield figure_html(f"Memory: {name}", "The rank that holds most.", held)
    about = "On the line are the lossless that none beats in both. Hollow (~): lossy; +: ours; r: with our ring."
    yield figure_html(f"Time against memory: {name}", about, svg(drawing.draw_pareto, line, _SIZE))
