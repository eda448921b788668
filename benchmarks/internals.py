"""The one place where the benchmarks reach into Towpath's engine: its transfers with nothing computed, and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from towpath.engine.record import Line
from towpath.spec.strategy import Kind


def without_transfers(step: Callable[[], None]) -> None:
    """A step that computes with whatever the buffers hold."""
    run, Line.run = Line.run, lambda self, region, shard: None
    try:
        step()
    finally:
        Line.run = run


def communicate(model: Any) -> None:
    """Every transfer of a step in the engine's order, each as soon as its lane and its buffers are free."""
    engine = model.towpath_engine
    backward = [u for u in reversed(engine.units) if not u.kept] + [u for u in engine.units if u.kept]
    with torch.no_grad():
        for unit in engine.units:
            _gathered(unit, Kind.GATHER, engine)
        ready = {unit: _gathered(unit, Kind.BACKWARD_GATHER, engine) for unit in backward if not unit.kept}
        for unit in backward:
            if unit in ready and ready[unit] is not None:
                ready[unit].wait()
            unit.begin_gradients(engine.gradients)
            engine._synced.append(unit.sync(unit.reduce(), engine._world))
        engine._abandon()  # waits for the reductions, and forgets the gradients, which were nobody's


def unit_elements(model: Any) -> list[int]:
    """How many parameters each unit has."""
    return [sum(bucket.plan.numel for bucket in unit.buckets) for unit in model.towpath_engine.units]


def _gathered(unit: Any, kind: Kind, engine: Any) -> Any:
    unit.gather(kind, engine.weights, keep_copy=True)
    unit.release()  # nobody computes with it: the next unit in the same slot may follow
    return unit.ready
