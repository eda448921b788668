"""Everything in the docs that is generated: tables between markers, pages in benchmarks/comparisons/, and pictures.

    python -m tools.docs.generate            writes what has changed (six minutes)
    python -m tools.docs.generate --check    lists what would change
    python -m tools.docs.generate --fast     leaves slow lines of benchmarks/comparisons/papers.md alone (15 seconds)

A page has `<!-- figures: NAME -->` above a table and `<!-- end of figures -->` below it. docs/pictures/step.svg has a
script of its own, tools/docs/draw_step.py, because it shows a run.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.docs import (
    draw_doctor,
    draw_exact,
    draw_first_screen,
    draw_gpus,
    draw_healing,
    draw_kernels,
    draw_leaves,
    draw_pipeline_predictions,
    draw_plans,
    draw_predictions,
    draw_published,
    draw_routes,
    draw_shares,
    draw_systems,
    draw_what_has_run,
    figures,
    papers,
    reference_tables,
)

ROOT = figures.ROOT
PAPERS = figures.COMPARISONS / "papers.md"  # written before the pages that count its rows
_MARKED = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)

TABLES: Mapping[str, Callable[[], str]] = {
    **figures.TABLES,
    **draw_doctor.TABLES,
    **draw_exact.TABLES,
    **draw_first_screen.TABLES,
    **draw_gpus.TABLES,
    **draw_healing.TABLES,
    **draw_kernels.TABLES,
    **draw_leaves.TABLES,
    **draw_predictions.TABLES,
    **draw_published.TABLES,
    **draw_pipeline_predictions.TABLES,
    **draw_routes.TABLES,
    **draw_shares.TABLES,
    **draw_systems.TABLES,
    **draw_what_has_run.TABLES,
    **reference_tables.TABLES,
    **papers.TABLES,
}
PICTURES: Mapping[Path, Callable[[], str]] = {
    **figures.PICTURES,
    **draw_exact.PICTURES,
    **draw_first_screen.PICTURES,
    **draw_healing.PICTURES,
    **draw_predictions.PICTURES,
    **draw_plans.PICTURES,
    **draw_routes.PICTURES,
    **draw_systems.PICTURES,
}


def files() -> list[Path]:
    """Return every generated file, and every page with a generated table."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("benchmarks/**/*.md"), *ROOT.glob("docs/**/*.md")]
    marked = [page for page in pages if _MARKED.search(page.read_text(encoding="utf-8"))]
    return sorted([*marked, *PICTURES, *_comparisons()])


def _comparisons() -> dict[Path, str]:
    """Return the suite of each page in benchmarks/comparisons."""
    suites = sorted(path.stem for path in figures.results.FOLDER.glob("*.jsonl"))
    return {figures.COMPARISONS / f"{suite}.md": suite for suite in suites}


def text_of(file: Path, writer: papers.Writer | None = None) -> str:
    """Return what a file should contain. By default, slow lines of the papers' page stay as they are."""
    if file in PICTURES:
        return PICTURES[file]()
    if (suite := _comparisons().get(file)) is not None:
        return figures.page_of(suite)
    simulated = writer or papers.Writer(slow=False)

    def filled(found: re.Match[str]) -> str:
        name, old = found[2], found[3]
        if name in papers.tables():
            text = simulated.text(name, papers.tables()[name], old)
        else:
            text = TABLES[name]()
        return f"{found[1]}{text.rstrip()}\n{found[4]}"

    return _MARKED.sub(filled, file.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if something would change")
    parser.add_argument("--fast", action="store_true", help="keep slow lines of benchmarks/comparisons/papers.md")
    options = parser.parse_args()
    changed, writer = 0, papers.Writer(slow=not options.fast)
    for file in files():
        text = text_of(file, writer)
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        changed += 1
        print(f"{file.relative_to(ROOT)}{' would change' if options.check else ''}", flush=True)
        if not options.check:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
    if not options.check:
        writer.write_costs(papers.tables())
    elif changed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
