"""Predicted against measured steps of 12 strategies, and of the two that the planner itself chooses.

    towpath bench planner [CASE …] [--rounds 6] [--quick] [--resume]

A case is an environment: a rate of the cables, a shape of the cluster, a model, micro-steps, and whether its blocks
compute on the cores or wait instead. On ranks of their own, `towpath probe` measures the cluster, and then the ranks
measure the model's units; nothing else enters the predictions. Then every strategy runs, and the one that the planner
ranks first, without codecs and with them: each in processes of its own, in turns. What comes out: the error of each
predicted step; the regret, what the planner's choice takes over the best that was measured; the rank correlation; and
how far apart each transfer begins by the engine's trace and by the simulator (`timelines.py`). Every run is added to
benchmarks/results/planner.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator

import towpath
from towpath.bench.harness.suite import Suite
from towpath.bench.suites.prediction import Environment
from towpath.bench.workload import SQUARE, Workload

FOUR, THREE = towpath.Topology(4, 2), towpath.Topology(3, 1)


def environments() -> Iterator[Environment]:
    for inter in ("50mbit", "200mbit", "1gbit"):
        yield Environment(inter, Workload(SQUARE, width=192, depth=6))
    yield Environment("200mbit", Workload(SQUARE, 4, width=192, depth=6))
    yield Environment("200mbit", Workload(THREE, width=192, depth=6))
    yield Environment("200mbit", Workload(FOUR, width=192, depth=6))
    for inter, micro_steps in (("50mbit", 1), ("200mbit", 1), ("200mbit", 4)):
        yield Environment(
            inter, Workload(SQUARE, micro_steps, batch=1, length=16, wait_seconds=0.02, width=192, depth=6)
        )
    yield Environment("200mbit", Workload(THREE, 4, batch=1, length=16, wait_seconds=0.02, width=192, depth=6))
    yield Environment("200mbit", Workload(SQUARE, width=384, depth=9))
    yield Environment("1gbit", Workload(SQUARE, width=384, depth=9))
    yield Environment("1gbit", Workload(FOUR, 4, width=384, depth=9))


SUITE = Suite("planner", __doc__ or "", list(environments()))
