"""What one rank holds at most in a training step, part by part."""

from __future__ import annotations

from collections.abc import Sequence

from towpath.core.formats import item_bytes
from towpath.core.precision import Precision
from towpath.core.schedule import buffer_bytes, host_memory_bytes, memory_bytes
from towpath.core.unit_plan import UnitPlan
from towpath.planner.model import Model, Unit
from towpath.planner.request import Optimizer


def engine_bytes(plans: Sequence[UnitPlan], optimizer: Optimizer) -> dict[str, int]:
    """By part: the states that stay, and the engine's buffers. Activations come on top."""
    return memory_bytes(plans) | {"optimizer": optimizer_bytes(plans, optimizer)} | buffer_bytes(plans)


def host_bytes(plans: Sequence[UnitPlan], optimizer: Optimizer) -> dict[str, int]:
    """The same in the host's memory: nothing unless the strategy offloads."""
    held = host_memory_bytes(plans)
    return held | {"optimizer": optimizer_bytes(plans, optimizer, on_host=True)} if held else {}


def optimizer_bytes(plans: Sequence[UnitPlan], optimizer: Optimizer, on_host: bool = False) -> int:
    return sum(
        b.numel // b.optimizer.count * item_bytes(b.own_dtype) * optimizer.states
        for plan in plans
        for b in plan.buckets
        if b.spec.trainable and b.optimizer_on_host == on_host
    )


def activation_bytes(model: Model, precision: Precision, tokens: int, checkpointing: bool) -> int:
    """At most: when the backward pass begins, or, of blocks that are recomputed, when the first of them is."""
    root, *others = model.units

    def item(unit: Unit) -> int:
        return item_bytes(precision.compute_dtype(unit.spec.buckets[0].dtype if unit.spec.buckets else "float32"))

    def kept(unit: Unit) -> float:
        return unit.kept * item(unit) + 4 * unit.kept_fp32

    end = kept(root) + 4 * root.passing_fp32
    if not checkpointing:
        return round(tokens * (sum(map(kept, others)) + end))
    # Block by block: a unit of several recomputes one at a time.
    block = max((kept(unit) / unit.modules for unit in others), default=0.0)
    return round(tokens * (sum(unit.entering * item(unit) for unit in others) + max(end, kept(root) + block)))
