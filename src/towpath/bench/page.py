"""`towpath bench report`: all results as one HTML page that needs nothing from a network.

    towpath bench report -o bench.html                  of all files of results there are
    towpath bench report results.jsonl -o bench.html    of these

The last run of each case counts. Whoever loses stays where it is, and what was asked and missed says so.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from towpath.bench import drawing, standings
from towpath.bench.drawing import Line
from towpath.bench.harness import results
from towpath.bench.harness.age import is_old, when
from towpath.bench.harness.figures import bound
from towpath.bench.harness.help import HelpFormatter
from towpath.bench.harness.suite import Parser
from towpath.errors import ConfigError
from towpath.output_file import check_output_file
from towpath.train.observe.plots import svg
from towpath.train.observe.report import figure_html, table_html, write_page

_HEADINGS = ("case", "figure", "found", "95 % interval", "asked", "", "measured")
_SIZE = (5.2, 4.2)
_RACED = "communication_share"  # what results of strategies and scaling have
_ABOUT = (
    "Columns are regimes: in a regime of 4, FSDP2's communication alone takes four times what the bare module "
    "computes. “At 0.53”: what the race came to, where the column does not say it. “1.15 of 1.18”: with perfect "
    "overlap of ours it would be 1.18. “Mean by messages alone”: with that, beside a peer that computes, and then "
    "sends as few bytes as any, over cables in use all the time, and does nothing else. A block computes, or it "
    "waits so many seconds in its forward pass, and takes nothing from the cores. Asked: without codecs 0.97 "
    "everywhere, and in the geometric mean of 8 to 1 1.25 with one micro-step and 1.15 with four; with codecs 2.2 from "
    "a regime of 4 on. Empty: not raced; –: failed, as the tables below say; *: before the code that was measured "
    "changed; †: of blocks that wait for different times; ‡: asked is more than one of these two would give."
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
    """What was asked and missed, in one sentence."""
    asked = [check for line in lines for check in line["checks"] if check.get("met") is not None]
    missed, failed = sum(not check["met"] for check in asked), sum("failed" in line for line in lines)
    return (
        f"{len(lines)} cases, each in its last run. Of {len(asked)} figures something was asked, and {missed} missed "
        f"it; {failed} runs failed. They stand in the tables as all others do."
    )


def at_a_glance(lines: Sequence[Line]) -> str:
    """How our best stands beside the best lossless peer, in every environment."""
    raced = [line for line in lines if line.get("suite") == "strategies"]
    shown = [line for line in raced if "failed" not in line]
    if not any(standings.column_of(line) for line in shown):
        return ""
    drawn = svg(drawing.draw_standings, shown, (10.4, 4.6))
    points = "A point for each race: above the line ours is faster. Hollow: blocks wait."
    parts = [figure_html("Beside the best lossless peer", points, drawn, wide=True), f"<p>{html.escape(_ABOUT)}</p>"]
    for what, title in standings.TITLES.items():
        if found := standings.rows(raced, what, lambda line: " *" * is_old(line, "strategies")):
            parts.append(f"<h2>{title}</h2>{table_html(standings.HEADINGS, found)}")
    return "".join(parts)


def tables(lines: Sequence[Line]) -> Iterable[str]:
    """Every figure, by suite."""
    each = (
        "A figure is of medians over rounds in which all contestants took turns, each in processes of its own. The "
        "interval is of the ratio within a round."
    )
    suites: dict[str, list[Line]] = {}
    for line in lines:
        suites.setdefault(line.get("suite") or "other results", []).append(line)
    for suite, group in suites.items():
        table = table_html(_HEADINGS, [row for line in group for row in rows(line)])
        yield figure_html(f"Every figure: {suite}", f"{counted(group)} {each}", table, wide=True)


def rows(line: Line) -> Iterable[list[str]]:
    """One for each figure; of a failed run, why there is none."""
    suite, case = line.get("suite", ""), str(line["case"]["name"])
    where = f"{str(line.get('date'))[:10]}, {when(line, suite)}"
    if "failed" in line:
        yield [case, f"FAILED: {str(line['failed'])[:120]}", "", "", "", "", where]
    for check in line["checks"]:
        interval = f"{check['low']:.3g} – {check['high']:.3g}" if "low" in check else ""
        verdict = "" if check.get("met") is None else ("met" if check["met"] else "MISSED")
        yield [case, str(check["what"]), f"{check['found']:.4g}", interval, bound(check), verdict, where]


def figures(lines: Sequence[Line]) -> Iterable[str]:
    """Of whatever there is."""
    raced = [line for line in lines if _RACED in line]
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
    name, bars = line["case"]["name"], (5.2, 1.0 + 0.24 * len(line[_RACED]))
    sent, held = svg(drawing.draw_bytes, line, bars), svg(drawing.draw_memory, line, bars)
    yield figure_html(f"Bytes on the links: {name}", "By the kernel's counters.", sent)
    yield figure_html(f"Memory: {name}", "The rank that holds most.", held)
    about = "On the line are the lossless that none beats in both. Hollow (~): lossy; +: ours; r: with our ring."
    yield figure_html(f"Time against memory: {name}", about, svg(drawing.draw_pareto, line, _SIZE))
