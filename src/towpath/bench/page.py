"""`towpath bench report`: all results as one HTML page that needs nothing from a network.

    towpath bench report -o bench.html                     of all files of results there are
    towpath bench report results.jsonl -o bench.html       of these

The last run of each case counts. Whoever loses stays where it is, and what was asked and missed says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from towpath.bench import drawing, standings
from towpath.bench.drawing import Line
from towpath.bench.harness import results
from towpath.bench.harness.figures import bound
from towpath.bench.harness.suite import HelpFormatter
from towpath.errors import ConfigError
from towpath.train.observe.plots import svg
from towpath.train.observe.report import figure_html, table_html, write_page

_HEADINGS = ("suite", "case", "figure", "found", "95 % interval", "asked", "", "measured")
_SIZE = (5.2, 4.2)
_RACED = "communication_share"  # what results of strategies and scaling have


def main(arguments: Sequence[str], command: str) -> None:
    parser = argparse.ArgumentParser(prog=command, description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=f"default: all of {results.FOLDER}")
    parser.add_argument("-o", "--output", type=Path, default=Path("bench.html"), help="default: bench.html")
    options = parser.parse_args(arguments)
    if not options.output.absolute().parent.is_dir():
        raise ConfigError(f"--output {options.output}: there is no folder {options.output.absolute().parent}.")
    write(options.output, read(options.files))
    print(f"The page: {options.output}")


def read(files: Sequence[Path]) -> list[Line]:
    """The last run of each case of each suite."""
    if missing := [str(file) for file in files if not file.exists()]:
        raise ConfigError(f"there is no file {', '.join(missing)}.")
    found: list[Line] = []
    for file in files or sorted(results.FOLDER.glob("*.jsonl")):
        try:
            lines = results.read(file)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        found += results.last(lines, failed=True).values()
    if not found:
        raise ConfigError(f"there are no results yet in {results.FOLDER}. Run `towpath bench strategies --quick -o …`.")
    return found


def write(path: Path, lines: Sequence[Line]) -> None:
    everything = table_html(_HEADINGS, [row for line in lines for row in rows(line)])
    about = (
        "The races at a glance. Columns are regimes: in a regime of 4, FSDP2's communication alone takes four times "
        "what the bare module computes. “1.15 of 1.18”: with perfect overlap it would be 1.18."
    )
    each = (
        "A figure is of medians over rounds in which all contestants took turns, each in processes of its own. The "
        "interval is of the ratio within a round. What was asked and missed is marked."
    )
    last = figure_html("Every figure", each, everything, wide=True)
    write_page(path, "Towpath beside its peers", about, at_a_glance(lines), [*figures(lines), last])


def at_a_glance(lines: Sequence[Line]) -> str:
    """How our best stands beside the best lossless peer, in every environment."""
    raced = [line for line in lines if line.get("suite") == "strategies" and "failed" not in line]
    tables: list[str] = []
    for what, title in standings.TITLES.items():
        if found := standings.rows(raced, what):
            tables.append(f"<h2>{title}</h2>{table_html(standings.HEADINGS, found)}")
    return "".join(tables)


def rows(line: Line) -> Iterable[list[str]]:
    """One for each figure; of a failed run, why there is none."""
    suite, case = line.get("suite", ""), str(line["case"]["name"])
    where = f"{str(line.get('date'))[:10]} {_code(line)}"
    if "failed" in line:
        yield [suite, case, f"FAILED: {str(line['failed'])[:120]}", "", "", "", "", where]
    for check in line["checks"]:
        interval = f"{check['low']:.3g} – {check['high']:.3g}" if "low" in check else ""
        verdict = "" if check.get("met") is None else ("met" if check["met"] else "MISSED")
        yield [suite, case, str(check["what"]), f"{check['found']:.4g}", interval, bound(check), verdict, where]


def _code(line: Line) -> str:
    commit = line.get("commit") or line.get("environment", {}).get("commit")
    return commit[:10] if commit else line.get("versions", {}).get("towpath", "")


def figures(lines: Sequence[Line]) -> Iterable[str]:
    """Of whatever there is."""
    raced = [line for line in lines if _RACED in line]
    for title, group in drawing.groups_of([line for line in raced if line["suite"] == "strategies"]).items():
        curves = drawing.curves_by_rate(group)
        if any(len(curve.points) > 1 for curve in curves):
            about = f"{title}. Ours are whole lines with dots, peers broken ones with squares."
            yield figure_html("Time against link rate", about, svg(drawing.draw_by_rate, curves, _SIZE))
        yield from _of_one(group[0])
    scaled: dict[str, list[Line]] = {}
    for line in raced:
        if line["suite"] == "scaling":
            scaled.setdefault(line["kind"], []).append(line)
    for kind, group in scaled.items():
        drawn = svg(drawing.draw_by_nodes, drawing.curves_by_nodes(group), _SIZE)
        yield figure_html(f"{kind.capitalize()} scaling", "The seconds of one step.", drawn)


def _of_one(line: Line) -> Iterable[str]:
    name, bars = line["case"]["name"], (5.2, 1.0 + 0.24 * len(line[_RACED]))
    yield figure_html("Bytes on the links", f"{name}: by the kernel's counters.", svg(drawing.draw_bytes, line, bars))
    yield figure_html("Memory", f"{name}: the rank that holds most.", svg(drawing.draw_memory, line, bars))
    about = f"{name}: + ours, ~ lossy, r a peer with our ring. None is quicker and smaller than those on the line."
    yield figure_html("Time against memory", about, svg(drawing.draw_pareto, line, _SIZE))
