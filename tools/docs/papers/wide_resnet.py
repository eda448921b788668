"""The WideResNet of 3 billion parameters with which MiCS measured its maximum (section 5.1.4), and its steps."""

from __future__ import annotations

from tools.docs.papers.peers import STAGE3_EARLY
from tools.docs.papers.settings import ZERO3, cluster, mics
from towpath.core.formats import Precision
from towpath.core.units import BucketSpec, UnitSpec
from towpath.plan.model import Model, ModelUnit
from towpath.plan.request import Request
from towpath.plan.solver import Batching, Solver

# Printed: bottleneck blocks in each stage, and the width factor. Pictures have 224 × 224 points.
DEPTHS, FACTOR, POINTS = (6, 8, 46, 6), 8, 224


def _wide_resnet() -> Model:
    """Return the model, with a unit for each convolution. One picture counts as one token."""
    found = [ModelUnit(UnitSpec("", (BucketSpec((2048 * 1000,)),), root=True), 2.0 * 2048 * 1000, 0, 0)]
    before = 64
    for stage, depth in enumerate(DEPTHS):
        inner, outer, side = 64 * FACTOR << stage, 256 << stage, POINTS // 4 >> stage
        for block in range(depth):
            sizes = [before * inner, 9 * inner * inner, inner * outer, *([before * outer] if block == 0 else [])]
            before = outer
            for number, size in enumerate(sizes):
                spec = UnitSpec(f"{stage}.{block}.{number}", (BucketSpec((size,)),))
                found.append(ModelUnit(spec, 2.0 * size * side * side, 0, 0))
    return Model("wide-resnet-3b", 1, tuple(found))


def wide_resnet_cells() -> list[str]:
    """Return how many times as fast MiCS is as ZeRO-3 in fp32, as DeepSpeed ran it, and overlapped."""
    here, batching = cluster("p3dn", 16), Batching(8, 1)
    solver = Solver(_wide_resnet(), here, Request(8 * 128, 1 << 60, Precision()))
    ours, base = mics(8).strategy(here), ZERO3.strategy(here)
    seconds = solver.predict(ours, batching).seconds
    steps = solver.predict(base, batching, STAGE3_EARLY.steps), solver.predict(base, batching)
    return [f"{step.seconds / seconds:.2f}" for step in steps]
