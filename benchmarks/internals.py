"""The one place where the benchmarks reach into Towpath's engine: its transfers with nothing computed, and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from towpath.collectives.rank_transfer import RankTransfer
from towpath.core.schedule import Compute, steady_step
from towpath.core.step_state import CheckRanks, InvalidateViews, SetGrads, SwapParameters


def without_transfers(step: Callable[[], None]) -> None:
    """A step that computes with whatever the buffers hold."""
    run, RankTransfer.run = RankTransfer.run, lambda self, region, shard, workspace: None
    try:
        step()
    finally:
        RankTransfer.run = run


def communicate(model: Any) -> None:
    """Every transfer of a step but for what says who computed what, in the engine's order, one unit ahead as there."""
    engine = model.towpath_engine
    with torch.no_grad():
        for _, action in steady_step(engine.machine, [unit.plan for unit in engine.units], 1):
            # Nothing is computed: weights need not be shown, nor waited for before the gradients are there.
            if not isinstance(action, (Compute, SwapParameters, InvalidateViews, CheckRanks, SetGrads)):
                engine.execute([action])
        engine._abandon()  # forgets the gradients, which were nobody's
