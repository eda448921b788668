"""The tables of measured figures in docs/*.md and README.md, between markers, from benchmarks/results/*.jsonl, and the
picture of the races, docs/standings.svg.

    python docs/figures.py            writes them anew
    python docs/figures.py --check    says which are old

A page has `<!-- figures: strategies -->` where the table of that suite begins, and `<!-- end of figures -->` where it
ends; `lossless` and `lossy` are the races at a glance, `headline` a sentence about them. Each row says the commit that
it was measured at, or, where the code that the suite measures is another now, that it was "measured before" it changed.
The working tree is compared with the commit that was measured: so the change that makes a figure one of the past says
so itself, once; later changes find the page as it has to be. A test of `make test` holds the pages to this.
"""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from towpath.bench import standings
from towpath.bench.drawing import draw_standings
from towpath.bench.harness import results
from towpath.bench.harness.age import SOURCES, is_old, when
from towpath.bench.harness.figures import bound
from towpath.bench.selection import OUR_LOSSLESS, OUR_LOSSY
from towpath.train.observe.plots import standalone_svg

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
PICTURE = DOCS / "standings.svg"
_MARKED = re.compile(r"(<!-- figures: ([a-z]+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)
NOT_YET = "Not measured yet.\n"

# At a glance: how our best stands beside the best lossless peer.
STANDINGS: Mapping[str, str] = {"lossless": OUR_LOSSLESS, "lossy": OUR_LOSSY}
HEADLINE = "headline"
_STRATEGIES = "strategies"
QUALITY = "quality"
# What a page can ask for: the table of a suite, or what is made of the races.
KNOWN = (*SOURCES, *STANDINGS, HEADLINE)
_QUALITY_HEAD = ("variant", "mean", "95 % interval", "by seed", "asked", "measured")
_HEAD = ("case", "figure", "found", "95 % interval", "asked", "measured")


def table(suite: str, folder: Path = results.FOLDER, root: Path = ROOT) -> str:
    """The last run of each case, whether it met what was asked or not."""
    if suite == QUALITY:
        head, body = _QUALITY_HEAD, list(quality_rows(folder, root))
    elif suite == HEADLINE:
        said = standings.headline(_last_lines(_STRATEGIES, folder), lambda line: is_old(line, _STRATEGIES, root))
        return textwrap.fill(said, 119) + "\n"
    elif suite in STANDINGS:
        head, body = standings.HEADINGS, standings_rows(STANDINGS[suite], folder, root)
    else:
        lines = _last_lines(suite, folder)
        head, body = _HEAD, [row for line in lines for row in rows(line, when(line, suite, root))]
    if not body:
        return NOT_YET
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body))


def _last_lines(suite: str, folder: Path) -> list[dict[str, Any]]:
    return list(results.last(results.read(folder / f"{suite}.jsonl")).values())


def rows(line: Mapping[str, Any], measured: str) -> Iterable[Sequence[str]]:
    for check in line["checks"]:
        interval = f"{check['low']:.3g} – {check['high']:.3g}" if "low" in check else ""
        missed = ", missed" if check.get("met") is False else ""
        yield (
            line["case"]["name"],
            check["what"],
            f"{check['found']:.4g}",
            interval,
            f"{bound(check)}{missed}",
            measured,
        )


def standings_rows(what: str, folder: Path, root: Path) -> Sequence[Sequence[str]]:
    def mark(line: Mapping[str, Any]) -> str:
        return " \\*" * is_old(line, _STRATEGIES, root)

    every = results.read(folder / f"{_STRATEGIES}.jsonl")
    return standings.rows([*results.last(every, failed=True).values(), *results.last(every).values()], what, mark)


def quality_rows(folder: Path, root: Path) -> Iterable[Sequence[str]]:
    """Of each variant the final loss over zero3's with the same seed, less one."""
    sys.path.append(str(ROOT / "benchmarks"))
    draw_quality = importlib.import_module("draw_quality")
    runs = draw_quality.runs_of(folder)
    measured = {run["case"]["variant"]: when(run, QUALITY, root) for run in runs}
    variants = {variant.name: variant for variant in draw_quality.VARIANTS}
    for row in draw_quality.judged(runs, list(variants), "zero3", float):
        seeds = ", ".join(f"{share:+.2%}" for share in row.each)
        most, asked = variants[row.variant].most, draw_quality.asked(variants[row.variant])
        if most is not None and row.mean > most:
            asked += ", missed"
        yield row.variant, f"{row.mean:+.2%}", f"± {row.around:.2%}", seeds, asked, measured[row.variant]


def written(page: str, folder: Path = results.FOLDER, root: Path = ROOT) -> str:
    """A page with its tables as they are now."""
    return _MARKED.sub(lambda found: f"{found[1]}{table(found[2], folder, root)}{found[4]}", page)


def picture() -> str:
    """The races at a glance."""
    return standalone_svg(draw_standings, _last_lines(_STRATEGIES, results.FOLDER), (10.4, 4.6))


def old_pages() -> dict[Path, str]:
    """What each of them would be now."""
    pages = {page: written(page.read_text(encoding="utf-8")) for page in PAGES} | {PICTURE: picture()}
    return {page: text for page, text in pages.items() if not page.exists() or page.read_text("utf-8") != text}


def main(arguments: Sequence[str]) -> None:
    old = old_pages()
    for page, text in old.items():
        if "--check" not in arguments:
            page.write_text(text, encoding="utf-8")
        print(f"{page.relative_to(ROOT)} {'is old' if '--check' in arguments else 'is written anew'}")
    if old and "--check" in arguments:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
