"""What docs/routes.md shows is what the routes are: its pictures and tables are what docs/draw_routes.py makes.

Other pages, too, show what the simulator, the results and the source say.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from docs import draw_pipeline_predictions, draw_plans, draw_predictions, draw_routes, draw_systems, papers
from docs.draw_routes import CARRIED, DOCS, DRAWN, bars, pictures, plan_of, simulate, tables, taken, transfer_of

from towpath.core.routes import Op
from towpath.topology.cluster import Topology

SHAPES = [Topology(2, 2), Topology(2, 3), Topology(2, 4), Topology(2, 8)]
PAGE = (DOCS / "routes.md").read_text(encoding="utf-8")
TROUBLES = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", pictures(), ids=lambda path: path.name)
def test_the_pictures_are_those_of_the_plans(path: Path) -> None:
    same = path.read_text(encoding="utf-8") == pictures()[path]
    assert same, f"{path.name} is not what the routes are now: run `python docs/draw_routes.py`"
    assert f"]({path.name})" in PAGE


@pytest.mark.parametrize("name", tables())
def test_the_tables_are_those_of_the_plans(name: str) -> None:
    same = tables()[name] in PAGE
    assert same, f"the table {name!r} of docs/routes.md is old: paste what `python docs/draw_routes.py --table` prints"


def test_figures_are_given_only_where_they_were_measured(tmp_path: Path) -> None:
    assert draw_routes.measured_table(tmp_path / "collectives.jsonl") is None
    same = ("Not measured yet" in PAGE) == ("measured" not in tables())
    assert same, (
        "docs/routes.md must say 'Not measured yet' just as long as benchmarks/results/collectives.jsonl is missing"
    )


def test_of_many_runs_the_last_one_with_figures_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "collectives.jsonl"
    case = {"name": "gather", "op": "all-gather", "topology": {"nodes": 2, "ranks_per_node": 4}, "inter": None}
    runs: list[dict[str, Any]] = [
        {"case": case | {"intra": None}, "checks": [{"what": "a / b", "found": found, "at_most": 0.6}]}
        for found in (0.1, 0.7)
    ]
    lines = [*runs, {"case": case, "checks": [], "failed": "rank 3 died"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = draw_routes.measured_table(file)
    assert shown is not None and "| a / b | 0.700 | ≤ 0.600 |" in shown and "0.100" not in shown


@pytest.mark.parametrize("route", DRAWN)
@pytest.mark.parametrize("shape", [*SHAPES, Topology(3, 3), Topology(4, 2)], ids=str)
def test_the_formulas_are_those_of_the_plans(shape: Topology, route: str) -> None:
    formula, nodes, ranks = CARRIED[route], shape.nodes, shape.ranks_per_node
    slice_bytes = 24 * 4
    for op, times in ((Op.ALL_GATHER, 1), (Op.REDUCE_SCATTER, 1), (Op.ALL_REDUCE, 2)):
        transfer = transfer_of(op, route, shape, 24 * shape.world)
        assert transfer.cable_bytes(0) == times * formula.cable_slices(nodes, ranks) * slice_bytes
        assert transfer.intra_bytes == nodes * times * formula.inside_slices(nodes, ranks) * slice_bytes
        # The reader's words say the same.
        names = {"p": shape.world, "R": ranks}
        for words, slices in ((formula.cable, formula.cable_slices), (formula.inside, formula.inside_slices)):
            assert eval(words.replace("−", "-").replace("·", "*"), names) == slices(nodes, ranks)


@pytest.mark.parametrize("route", DRAWN)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_simulated_links_carry_every_message_and_never_more_than_their_rate(shape: Topology, route: str) -> None:
    busy = simulate(plan_of(Op.ALL_GATHER, route, shape), shape)
    for link in {b.link for b in busy}:
        mine = list(bars(busy, link))
        assert all(earlier.end <= later.start for earlier, later in pairwise(mine))
        formula = CARRIED[route].cable_slices if link.crossing else CARRIED[route].inside_slices
        assert sum(b.slices for b in mine) == formula(shape.nodes, shape.ranks_per_node)


def test_two_nodes_of_four_take_what_the_page_says() -> None:
    shape = Topology(2, 4)
    times = {route: taken(simulate(plan_of(Op.ALL_GATHER, route, shape), shape)) for route in DRAWN}
    assert times == {
        "ring": 7,
        "hierarchical": Fraction(11, 2),
        "ho-ring": 4 + Fraction(3, 16),
        "two-hop": 4 + Fraction(6, 16),
        "one-hop": 16,
    }


def test_what_is_said_of_the_papers_is_what_the_simulator_says() -> None:
    """Of all rows those that take little time."""
    page = papers.PAGE.read_text(encoding="utf-8")
    quick = [row for row in papers.rows() if row.setting.micro_steps == 1 and "7b" in row.setting.model]
    tables = [papers.placements_table(), papers.collectives_table(), papers.ratios_table(quick)]
    tables.append(
        papers.pipelines_table({"gpt-2.5b": {k: papers.OPTIMUS_DAYS["gpt-2.5b"][k] for k in ("nothing", "CB")}})
    )
    missing = [line for table in tables for line in table.splitlines() if "|" in line and line not in page]
    assert not missing, f"docs/papers.md is old: run `python docs/papers.py --write`. It lacks {missing}"


def test_the_pictures_of_which_strategy_when_are_what_the_simulator_says() -> None:
    page = (DOCS / "planner.md").read_text(encoding="utf-8")
    for path, text in draw_plans.pictures().items():
        assert f"]({path.name})" in page
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old: run `python docs/draw_plans.py`"


def test_the_table_of_predicted_pipelines_is_that_of_the_results() -> None:
    page = draw_pipeline_predictions.PAGE.read_text(encoding="utf-8")
    told = "docs/planner.md is old: run `python -m docs.draw_pipeline_predictions --write`"
    assert draw_pipeline_predictions.table() in page, told


def test_what_is_said_of_predictions_is_what_was_measured() -> None:
    page = draw_predictions.PAGE.read_text(encoding="utf-8")
    assert draw_predictions.table() in page, "docs/planner.md is old: run `python -m docs.draw_predictions --write`"
    drawn = draw_predictions.PICTURE.read_text(encoding="utf-8")
    assert drawn == draw_predictions.picture(), "docs/timelines.svg is old: `python -m docs.draw_predictions --write`"


@pytest.mark.parametrize("page", [*(system.page for system in draw_systems.SYSTEMS), draw_systems.OPTIMUS])
def test_what_is_shown_of_each_system_is_its_schedule(page: str) -> None:
    told = "run `python -m docs.draw_systems --write`"
    text, drawn = (draw_systems.PAGES / f"{page}.md"), (draw_systems.PAGES / f"{page}.svg")
    shown = text.read_text(encoding="utf-8")
    assert draw_systems.page_tables()[text] in shown, f"docs/systems/{page}.md is old: {told}"
    assert f"]({drawn.name})" in shown
    assert drawn.read_text(encoding="utf-8") == draw_systems.pictures()[drawn], (
        f"docs/systems/{page}.svg is old: {told}"
    )


@pytest.mark.parametrize(
    "quoted", re.findall(r'\*"([^"]+)"\*', (DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
)
def test_a_message_that_is_quoted_is_one_that_is_said(quoted: str) -> None:
    """In a quotation … stands for whatever is said there."""
    words = re.compile(".*".join(re.escape(part) for part in " ".join(quoted.split()).split("…")), re.DOTALL)
    assert any(words.search(text) for text in texts_of_the_source()), f"nothing in src/towpath says {quoted!r}"


@functools.cache
def texts_of_the_source() -> list[str]:
    """Every text in src/towpath that is no docstring, with … where a value is put in."""
    found: list[str] = []
    for file in (DOCS.parent / "src" / "towpath").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found.append(re.sub(r"%[.\d]*[dfs]", "…", node.value))
    return found
