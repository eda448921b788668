"""The WideResNet of 3 billion parameters with which MiCS measured its maximum (section 5.1.4), and its steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from tools.docs.papers.settings import BLOCKS, MATRICES, ZERO3, cluster, mics
from towpath.core.formats import Precision
from towpath.core.units import BucketSpec, UnitSpec
from towpath.plan.model import Model, ModelUnit
from towpath.plan.request import Request
from towpath.plan.solver import Batching, Solver

# Printed: bottleneck blocks in each stage, and the width factor. Pictures have 224 × 224 points.
DEPTHS, FACTOR, POINTS = (6, 8, 46, 6), 8, 224


@cache
def wide_resnet(units: str) -> Model:
    """Return the model. One picture counts as one token."""
    found = [ModelUnit(UnitSpec("", (BucketSpec((2048 * 1000,)),), root=True), 2.0 * 2048 * 1000, 0, 0)]
    before = 64
    for stage, depth in enumerate(DEPTHS):
        inner, outer, side = 64 * FACTOR << stage, 256 << stage, POINTS // 4 >> stage
        for block in range(depth):
            sizes = [before * inner, 9 * inner * inner, inner * outer]
            sizes += [before * outer] if block == 0 else []
            before = outer
            for number, together in enumerate([sizes] if units == BLOCKS else [[size] for size in sizes]):
                spec = UnitSpec(f"{stage}.{block}.{number}", (BucketSpec(tuple(together)),))
                found.append(ModelUnit(spec, 2.0 * sum(together) * side * side, 0, 0))
    return Model("wide-resnet-3b", 1, tuple(found))


def wide_resnet_cells(nodes: int) -> Iterator[str]:
    """Yield how many times as fast MiCS is as ZeRO-3: overlapped, one after the other, and by blocks."""
    here = cluster("p3dn", nodes)
    ratios: list[float] = []
    for units in (MATRICES, BLOCKS):
        solver = Solver(wide_resnet(units), here, Request(8 * 8 * nodes, 1 << 60, Precision()))
        base, found = (solver.predict(s.strategy(here), Batching(8, 1)) for s in (ZERO3, mics(8)))
        serial = [step.computing + sum(step.in_flight.values()) for step in (base, found)]
        ratios += [base.seconds / found.seconds, serial[0] / serial[1]]
    return (f"{ratio:.2f}" for ratio in ratios[:3])
