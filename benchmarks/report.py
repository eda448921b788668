"""Results as text and tables: one comparison, the runs of a suite, and the summary of all speed-ups.

The summary has the speed-ups of our strategies over the best tuned lossless peer, by family and comm ratio. Every
speed-up is a ratio of medians of steps that were interleaved in one comparison.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environment import UNSHAPED
from benchmarks.harness import results
from benchmarks.harness.figures import against_limit, verdict
from towpath.cli.plots import color
from towpath.errors import ConfigError
from towpath.progress import format_bytes

Line = Mapping[str, Any]

WIDTH = 100
_HEADS = ("candidate", "", "step", "interval", "speed", "comm.", "sent", "cpu s", "memory")
_COLUMNS = (29, 2, 8, 15, 6, 5, 9, 7, 9)
_REPORT_COLUMNS = (28, 24, 7, 15, 22)  # case or date, figure, result, interval, limit


def comparison_table(line: Line) -> str:
    """Return one comparison as text: every candidate, the fastest first, then the pairs and what went wrong."""
    ratio = line.get("comm_ratio", {}).get("found")
    about = [] if line.get("inter") is None else [f"links of {line['inter']}"]
    about += [] if ratio is None else [f"communication / computation {ratio:.2f}"]
    about.append(f"{line.get('rounds', 0)} rounds")
    head = f"{line['case']['name']}: {', '.join(about)}"
    if "failed" in line:
        return _fitted([head, *_notes(f"FAILED: {line['failed']}")])
    names = sorted(line["communication_share"], key=lambda name: line["median_seconds"][name])
    body = [_aligned(row) for row in (_HEADS, *(_row(line, name) for name in names))]
    body.append("+: ours. ~: lossy. r: a peer with our ring. speed: over the best lossless peer.")
    pairs = [f"  {text}" for check in line["checks"] for text in _wrapped(verdict(check))]
    notes = [text for name, why in line.get("skipped", {}).items() for text in _notes(f"not measured: {name}: {why}")]
    notes += [text for warning in line["warnings"] for text in _notes(f"warning: {warning}")]
    return _fitted([head, *body, *pairs, *notes])


def _row(line: Line, name: str) -> tuple[str, ...]:
    seconds, interval, peer = line["median_seconds"][name], line["intervals"][name], best_lossless_peer(line)
    about = line["candidates"][name]
    return (
        name,
        "+" * about["ours"] + "~" * (not about["lossless"]) + "r" * about["helped"],
        f"{seconds:.4g} s",
        f"{interval['low']:.4g}–{interval['high']:.4g}",
        "" if peer is None else f"{peer / seconds:.2f}",
        f"{line['communication_share'][name]:.0%}",
        format_bytes(line["bytes_between_nodes"][name]),
        f"{line['processor_seconds'][name]:.4g}",
        format_bytes(line["memory_bytes"][name]),
    )


def _aligned(row: Sequence[str]) -> str:
    """Return a row with names to the left, and figures to the right."""
    cells = [
        text[:width].ljust(width) if column < 2 else text.rjust(width)
        for column, (text, width) in enumerate(zip(row, _COLUMNS, strict=True))
    ]
    return " ".join(cells).rstrip()


def _notes(text: str) -> list[str]:
    return [f"  {part}" for part in _wrapped(text)]


def _wrapped(text: str) -> list[str]:
    """Return the lines of a text, of which all but the first are indented."""
    lines, limit = [""], WIDTH - 6
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > limit:
            lines.append("  ")
        lines[-1] += word if not lines[-1].strip() else f" {word}"
    return lines


def _fitted(lines: Sequence[str]) -> str:
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in lines)


# python -m benchmarks report ------------------------------------------------------------------------------------------


def overview() -> str:
    """Return the number of cases and runs in every file of results."""
    found: list[str] = []
    for path in sorted(results.FOLDER.glob("*.jsonl")):
        lines = results.read(path)
        cases = len(results.last(lines))
        found.append(f"{path.stem:<20} {cases:>3} cases, {len(lines):>4} runs, the last {lines[-1]['date']}")
    return "\n".join(found)


def last_runs(path: Path) -> str:
    """Return the last run of every case of a file."""
    found = results.last(results.read(path), failed=True)
    body = [row for name, line in found.items() for row in _figures(name, line)]
    return _table(("case", "figure", "result", "interval", "limit"), body)


def history_of(path: Path, case: str) -> str:
    """Return all runs of one case, oldest first."""
    lines = results.read(path)
    found = [line for line in lines if line["case"]["name"] == case]
    if not found:
        raise ConfigError(f"no run of {case} in {path}; there are {', '.join(results.last(lines, failed=True))}")
    body = [
        row
        for line in found
        for row in _figures(f"{line['date'][:16].replace('T', ' ')} {(line.get('commit') or '')[:7]}", line)
    ]
    return f"{case}\n" + _table(("run", "figure", "result", "interval", "limit"), body)


def _figures(label: str, line: Line) -> Iterable[tuple[str, ...]]:
    """Yield a row for each figure of a run. The first has the label, `!` for a warning, `old` for an old form."""
    checks: list[Any] = line["checks"] or [
        {"what": "FAILED" if "failed" in line else "(no figure)", "found": float("nan")}
    ]
    mark = "old" if line["harness"] < results.HARNESS else "!" * bool(line.get("warnings"))
    for number, check in enumerate(checks):
        interval = f"[{check['low']:.3g}, {check['high']:.3g}]" if "low" in check else ""
        name = f"{label} {mark}".strip() if number == 0 else ""
        yield name, check["what"], f"{check['found']:.4g}", interval, against_limit(check)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    def cell(text: str, width: int) -> str:
        return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"

    rows = [" ".join(cell(*each) for each in zip(row, _REPORT_COLUMNS, strict=True)) for row in (head, *lines)]
    return "\n".join(row.rstrip()[:WIDTH] for row in rows)


# The summary of speed-ups ---------------------------------------------------------------------------------------------

COMM_RATIOS = ("8", "4", "2", "1", "0.5", UNSHAPED)
README_RATIOS = COMM_RATIOS[:4]
HEADINGS = ("micro-steps", "strategies", "lossless", *COMM_RATIOS)
# A case's name has everything that differs from the usual model (`Environment.name`).
_USUAL = re.compile(r"\d+x\d+-(ratio)?(?P<ratio>[\w.]+)-micro\d+(-waiting[\d.]*)?(-in-step)?")
# The first pattern that a candidate's name matches.
_FAMILIES = (
    (re.compile(r"gradients=low-rank"), "low-rank gradients"),
    (re.compile(r"gradients=int4"), "int4 gradients"),
    (re.compile(r"gradients=int8"), "int8 gradients"),
    (re.compile(r"^paro-"), "PaRO"),
    (re.compile(r"^mics\b"), "MiCS"),
    (re.compile(r"^zero\+\+"), "ZeRO++"),
    (re.compile(r"^hpz\b"), "ZeRO++, hpZ alone"),
    (re.compile(r"^(ddp|zero\d)\b"), "DDP, ZeRO"),
)


def comm_ratio_of(line: Line) -> str | None:
    """Return the column of a comparison, or None for another model, precision or a link rate given by hand."""
    found = _USUAL.fullmatch(line["case"]["name"])
    return found["ratio"] if found is not None and found["ratio"] in COMM_RATIOS else None


def best_lossless_peer(line: Line) -> float | None:
    """Return the seconds of a step of the fastest lossless peer, or None if none took part."""
    peers = [
        line["median_seconds"][name]
        for name, about in line["candidates"].items()
        if name in line["communication_share"] and not about["ours"] and about["lossless"]
    ]
    return min(peers, default=None)


def family_of(candidate: str) -> str:
    """Return the name of a strategy's family, or the strategy's own name if it has none."""
    return next((family for pattern, family in _FAMILIES if pattern.search(candidate)), candidate)


@dataclass(frozen=True, slots=True)
class CaseSpeedups:
    """The speed-up of each of our candidates in one run of one case.

    `measured_ratio` is the communication-to-computation ratio found during the run, if it was measured. With
    `blocks_wait`, blocks sleep instead of computing.
    """

    comm_ratio: str
    measured_ratio: float | None
    nodes: int
    ranks_per_node: int
    micro_steps: int
    blocks_wait: bool
    lossless: Mapping[str, float]
    codecs: Mapping[str, float]

    @staticmethod
    def of(line: Line) -> CaseSpeedups | None:
        """Return the speed-ups of a result line, or None if it failed or does not belong in the summary."""
        ratio = comm_ratio_of(line)
        if ratio is None or "failed" in line or (peer := best_lossless_peer(line)) is None:
            return None
        speedups: dict[bool, dict[str, float]] = {True: {}, False: {}}
        for name in line["communication_share"]:
            if (about := line["candidates"][name])["ours"]:
                speedups[about["lossless"]][name] = peer / line["median_seconds"][name]
        workload = line["case"]["workload"]
        return CaseSpeedups(
            ratio,
            line.get("comm_ratio", {}).get("found"),
            workload["topology"]["nodes"],
            workload["topology"]["ranks_per_node"],
            workload["micro_steps"],
            bool(workload["wait_seconds"]),
            speedups[True],
            speedups[False],
        )

    def by_family(self) -> dict[tuple[bool, str], float]:
        """Return the fastest member of each family, by whether it uses codecs and the family's name."""
        found: dict[tuple[bool, str], float] = {}
        for codecs, speedups in ((False, self.lossless), (True, self.codecs)):
            for name, speedup in speedups.items():
                family = (codecs, family_of(name))
                found[family] = max(speedup, found.get(family, 0.0))
        return found


def speedups_of(lines: Iterable[Line]) -> list[CaseSpeedups]:
    """Return the speed-ups of all result lines that belong in the summary."""
    return [found for found in map(CaseSpeedups.of, lines) if found is not None]


def rows(lines: Iterable[Line]) -> list[Sequence[str]]:
    """Return the table below `HEADINGS`: a row per number of micro-steps and family of strategies."""
    found: dict[tuple[int, bool, str], dict[str, list[float]]] = {}
    for each in speedups_of(lines):
        for (codecs, family), speedup in each.by_family().items():
            row = found.setdefault((each.micro_steps, codecs, family), {})
            row.setdefault(each.comm_ratio, []).append(speedup)
    return [
        (
            str(micro_steps),
            family,
            "no" if codecs else "yes",
            *(_with_count(row.get(ratio, ())) for ratio in COMM_RATIOS),
        )
        for (micro_steps, codecs, family), row in sorted(found.items())
    ]


def readme_rows(lines: Iterable[Line]) -> list[Sequence[str]]:
    """Return a row per ratio: our fastest lossless strategy and our fastest with codecs, over all comparisons."""
    found = speedups_of(lines)
    by_ratio = {ratio: [each for each in found if each.comm_ratio == ratio] for ratio in README_RATIOS}
    return [
        (
            ratio,
            str(len(here)),
            _range([max(each.lossless.values()) for each in here if each.lossless]),
            _range([max(each.codecs.values()) for each in here if each.codecs]),
        )
        for ratio, here in by_ratio.items()
    ]


def _with_count(speedups: Sequence[float]) -> str:
    if not speedups:
        return ""
    spread = "" if len(speedups) == 1 else f" ({min(speedups):.2f}–{max(speedups):.2f})"
    return f"{median(speedups):.2f}{spread}, n = {len(speedups)}"


def _range(speedups: Sequence[float]) -> str:
    if not speedups:
        return "not measured"
    return f"{min(speedups):.2f}× to {max(speedups):.2f}×, median {median(speedups):.2f}×"


# The picture of docs/benchmarks.md ------------------------------------------------------------------------------------

_GREY = "#868e96"


def draw_speedups(figure: Any, lines: Sequence[Line]) -> None:
    """Draw our fastest strategy's speed-up over the communication-to-computation ratio: one point per comparison."""
    panels = dict(
        zip(("lossless strategies", "strategies with codecs"), figure.subplots(1, 2, sharey=True), strict=True)
    )
    shapes: list[tuple[int, int]] = []
    looks: dict[str, dict[str, Any]] = {}
    for each in speedups_of(lines):
        shape = (each.nodes, each.ranks_per_node)
        shapes += [shape] if shape not in shapes else []
        paint, mark = color(shapes.index(shape)), "o" if each.micro_steps == 1 else "^"
        looks[f"{each.nodes} nodes × {each.ranks_per_node} ranks"] = {"marker": "s", "color": paint}
        looks[f"{each.micro_steps} micro-step{'s' * (each.micro_steps > 1)}"] = {"marker": mark, "color": _GREY}
        if each.blocks_wait:
            looks["hollow: blocks wait"] = {"marker": "o", "color": _GREY, "markerfacecolor": "none"}
        look = {"color": paint, "markerfacecolor": "none" if each.blocks_wait else paint, "markersize": 5}
        for axes, speedups in zip(panels.values(), (each.lossless, each.codecs), strict=True):
            if speedups and each.measured_ratio:
                axes.plot([each.measured_ratio], [max(speedups.values())], mark, **look)
    for title, axes in panels.items():
        axes.axhline(1.0, color=_GREY, linewidth=1)
        axes.set_xlabel("FSDP2's communication time / computation time")
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_xscale("log")
        axes.set_xticks([0.25, 0.5, 1, 2, 4, 8], ["¼", "½", "1", "2", "4", "8"])
        axes.minorticks_off()
    first, *_ = panels.values()
    first.set_ylabel("speed-up over the best tuned lossless peer")
    handles = [first.plot([], [], linestyle="none", markersize=5, **look)[0] for look in looks.values()]
    figure.legend(handles, looks.keys(), frameon=False, fontsize=8, ncols=3, loc="outside lower center")
