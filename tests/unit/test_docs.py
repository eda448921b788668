"""Regenerating the docs changes nothing, and the formulas in docs/concepts/routes.md are those of the plans."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ranks.strategies import seldom
from tools.docs import generate, papers
from tools.docs.draw_routes import CARRIED, DRAWN, transfer_of
from towpath.core.routes import Op
from towpath.topology.cluster import Topology

SHAPES = [Topology(*shape) for shape in ((2, 2), (2, 3), (2, 4), (2, 8), (3, 3), (4, 2))]
# The planner draws these for seconds. Other pages have its choices, too.
SLOW = ("which-by-rate.svg", "which-by-nodes.svg", "gpu-clusters.md")
FILES = [seldom(file) if file.name in SLOW else file for file in generate.files()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(generate.ROOT)))
def test_regenerating_changes_nothing(file: Path) -> None:
    same = file.exists() and file.read_text(encoding="utf-8") == generate.text_of(file)
    assert same, "run `python -m tools.docs.generate` and commit what it writes"


def test_pages_that_sources_name_exist() -> None:
    named = {
        page: file
        for file in (*generate.ROOT.glob("src/**/*.py"), generate.ROOT / "pyproject.toml")
        for page in re.findall(r"\bdocs/[\w./-]+\.md\b", file.read_text(encoding="utf-8"))
    }
    assert named
    assert not {page: file for page, file in named.items() if not (generate.ROOT / page).is_file()}


@pytest.mark.parity
def test_regenerating_the_slow_lines_changes_nothing() -> None:
    assert generate.PAPERS.read_text(encoding="utf-8") == generate.text_of(generate.PAPERS, papers.Writer(slow=True)), (
        "python -m tools.docs.generate"
    )


@pytest.mark.parametrize("route", DRAWN)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
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
