"""Draws docs/which-by-rate.svg and docs/which-by-nodes.svg: which strategy when, as the simulator has it.

python docs/draw_plans.py
"""

from __future__ import annotations

from pathlib import Path

from towpath.cli.plan_report import curves, draw_nodes, draw_rates, nodes_of, rates_of
from towpath.planner import clusters
from towpath.planner.model import describe
from towpath.planner.request import Request
from towpath.planner.solver import Batching, Solver
from towpath.train.observe.plots import standalone_svg

DOCS = Path(__file__).parent
MODEL, CLUSTER = "gpt-2.5b", "ethernet-10g"
LENGTH, BATCHING = 1024, Batching(8, 1, checkpointing=True)


def pictures() -> dict[Path, str]:
    cluster = clusters.load(CLUSTER)
    solver = Solver(describe(MODEL, LENGTH), cluster, Request(batch=1, memory=cluster.memory))
    by_rate, by_nodes = (curves(solver, BATCHING, found, _nothing) for found in (rates_of(solver), nodes_of(solver)))
    return {
        DOCS / "which-by-rate.svg": standalone_svg(draw_rates, by_rate, (7, 3.6)),
        DOCS / "which-by-nodes.svg": standalone_svg(draw_nodes, by_nodes, (7, 3.6)),
    }


def _nothing() -> None:
    pass


def main() -> None:
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
