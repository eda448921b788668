"""The pictures which-by-rate.svg and which-by-nodes.svg: the fastest strategy, according to the simulator."""

from __future__ import annotations

from pathlib import Path

from towpath.cli.plan_report import curves, draw_nodes, draw_rates, nodes_of, rates_of
from towpath.cli.plots import standalone_svg
from towpath.plan.catalog import describe_model, load_cluster
from towpath.plan.request import Request
from towpath.plan.solver import Batching, Solver

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
MODEL, CLUSTER = "gpt-2.5b", "ethernet-10g"
LENGTH, BATCHING = 1024, Batching(8, 1, checkpointing=True)


def _solver() -> Solver:
    cluster = load_cluster(CLUSTER)
    return Solver(describe_model(MODEL, LENGTH), cluster, Request(batch=1, memory=cluster.memory))


def by_rate() -> str:
    solver = _solver()
    return standalone_svg(draw_rates, curves(solver, BATCHING, rates_of(solver)), (7, 3.6))


def by_nodes() -> str:
    solver = _solver()
    return standalone_svg(draw_nodes, curves(solver, BATCHING, nodes_of(solver)), (7, 3.6))


PICTURES = {FOLDER / "which-by-rate.svg": by_rate, FOLDER / "which-by-nodes.svg": by_nodes}
