"""What one rank holds at most in a training step, part by part."""

from __future__ import annotations

from collections.abc import Sequence

from towpath.core.formats import item_bytes
from towpath.core.precision import Precision
from towpath.core.schedule import UnitPlan, buffer_bytes, memory_bytes
from towpath.planner.model import Model, Unit
from towpath.planner.request import Optimizer


def engine_bytes(plans: Sequence[UnitPlan], optimizer: Optimizer) -> dict[str, int]:
    """By part: the states that stay, and the engine's buffers. Activations come on top."""
    return memory_bytes(plans) | {"optimizer": optimizer_bytes(plans, optimizer)} | buffer_bytes(plans)


def optimizer_bytes(plans: Sequence[UnitPlan], optimizer: Optimizer) -> int:
    return sum(
        b.numel // b.optimizer.count * item_bytes(b.own_dtype) * optimizer.states
        for plan in plans
        for b in plan.buckets
        if b.spec.trainable
    )


def activation_bytes(model: Model, precision: Precision, tokens: int, checkpointing: bool) -> int:
    """At the end of the forward pass; or where a block is recomputed, and of all others only the inputs are there."""
    root, *others = model.units

    def item(unit: Unit) -> int:
        return item_bytes(precision.compute_dtype(unit.spec.buckets[0].dtype if unit.spec.buckets else "float32"))

    def kept(unit: Unit) -> float:
        return unit.kept * item(unit) + 4 * unit.kept_fp32

    if checkpointing:
        # Block by block: a unit of several recomputes one at a time.
        blocks = sum(u.entering * item(u) for u in others) + max((kept(u) / u.modules for u in others), default=0.0)
    else:
        blocks = sum(map(kept, others))
    return round(tokens * (blocks + kept(root)))
