"""The tables of measured figures in docs/*.md and README.md, between markers, from benchmarks/results/*.jsonl.

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
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from towpath.bench import standings
from towpath.bench.harness import results
from towpath.bench.harness.figures import bound
from towpath.bench.selection import OUR_LOSSLESS, OUR_LOSSY

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
_MARKED = re.compile(r"(<!-- figures: ([a-z]+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)
NOT_YET = "Not measured yet.\n"

_ENGINE = tuple(f"src/towpath/{part}" for part in ("api.py", "engine", "collectives", "codecs", "core", "topology"))
# What each suite measures: when it changes, figures are of the code before.
SOURCES: Mapping[str, tuple[str, ...]] = {
    "strategies": _ENGINE,
    "headline": _ENGINE,
    "lossless": _ENGINE,
    "lossy": _ENGINE,
    "scaling": _ENGINE,
    "overhead": _ENGINE,
    "lora": _ENGINE,
    "ablations": _ENGINE,
    "muon": (*_ENGINE, "src/towpath/optim.py"),
    "memory": (*_ENGINE, "src/towpath/checkpoint"),
    "collectives": ("src/towpath/collectives", "src/towpath/core/routes.py"),
    "kernels": ("src/towpath/codecs/kernels",),
    "quality": _ENGINE,
    "planner": (*_ENGINE, "src/towpath/planner", "src/towpath/sim", "src/towpath/auto"),
}
# At a glance: how our best stands beside the best lossless peer.
STANDINGS: Mapping[str, str] = {"lossless": OUR_LOSSLESS, "lossy": OUR_LOSSY}
HEADLINE = "headline"
_STRATEGIES = "strategies"
QUALITY = "quality"
_QUALITY_HEAD = ("variant", "mean", "95 % interval", "by seed", "asked", "measured")
BEFORE = ", before its code changed"
_HEAD = ("case", "figure", "found", "95 % interval", "asked", "measured")


def table(suite: str, folder: Path = results.FOLDER, root: Path = ROOT) -> str:
    """The last run of each case, whether it met what was asked or not."""
    if suite == QUALITY:
        head, body = _QUALITY_HEAD, list(quality_rows(folder, root))
    elif suite == HEADLINE:
        return textwrap.fill(standings.headline(_last_lines(_STRATEGIES, folder)), 119) + "\n"
    elif suite in STANDINGS:
        head, body = standings.HEADINGS, standings_rows(STANDINGS[suite], folder, root)
    else:
        lines = _last_lines(suite, folder)
        head, body = _HEAD, [row for line in lines for row in rows(line, when(line, SOURCES[suite], root))]
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
        return " \\*" * (BEFORE in when(line, SOURCES[_STRATEGIES], root))

    return standings.rows(_last_lines(_STRATEGIES, folder), what, mark)


def quality_rows(folder: Path, root: Path) -> Iterable[Sequence[str]]:
    """Of each variant the final loss over zero3's with the same seed, less one."""
    sys.path.append(str(ROOT / "benchmarks"))
    draw_quality = importlib.import_module("draw_quality")
    runs = draw_quality.runs_of(folder)
    measured = {run["case"]["variant"]: when(run, SOURCES[QUALITY], root) for run in runs}
    variants = {variant.name: variant for variant in draw_quality.VARIANTS}
    for row in draw_quality.judged(runs, list(variants), "zero3", float):
        seeds = ", ".join(f"{share:+.2%}" for share in row.each)
        most, asked = variants[row.variant].most, draw_quality.asked(variants[row.variant])
        if most is not None and row.mean > most:
            asked += ", missed"
        yield row.variant, f"{row.mean:+.2%}", f"± {row.around:.2%}", seeds, asked, measured[row.variant]


def when(line: Mapping[str, Any], paths: Sequence[str], root: Path) -> str:
    """The commit that was measured, and whether its code is still what there is."""
    commit = line.get("commit") or line.get("environment", {}).get("commit")
    if commit:
        return f"at {commit[:10]}{BEFORE * changed_since(commit, paths, root)}"
    version = line.get("versions", {}).get("towpath")
    return f"version {version}" if version else f"on {str(line.get('date'))[:10]}"


def changed_since(commit: str, paths: Sequence[str], root: Path) -> bool:
    """Whether `paths` in the working tree are others than in `commit`; not where git does not know that commit."""
    git = ["git", "-C", str(root), "diff", "--quiet", commit, "--", *paths]
    return subprocess.run(git, capture_output=True).returncode == 1


def written(page: str, folder: Path = results.FOLDER, root: Path = ROOT) -> str:
    """A page with its tables as they are now."""
    return _MARKED.sub(lambda found: f"{found[1]}{table(found[2], folder, root)}{found[4]}", page)


def old_pages() -> list[Path]:
    return [page for page in PAGES if written(text := page.read_text(encoding="utf-8")) != text]


def main(arguments: Sequence[str]) -> None:
    old = old_pages()
    for page in old:
        if "--check" not in arguments:
            page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{page.relative_to(ROOT)} {'is old' if '--check' in arguments else 'is written anew'}")
    if old and "--check" in arguments:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
