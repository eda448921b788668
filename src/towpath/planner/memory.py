"""What one rank holds at most in a training step, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from towpath.core.formats import Precision, item_bytes
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
    """Return the peak of activations in a micro-step of `tokens` tokens.

    The peak is either where the backward pass begins, with all that was kept and the gradient of the loss, or in the
    backward pass of a unit. By then, what later units and the end of the root had kept is released. With
    `checkpointing`, blocks are recomputed one at a time.
    """
    root, *others = [_PerToken.of(unit, precision) for unit in model.units]
    peak = root.kept + sum(unit.stays(checkpointing) for unit in others) + root.passing
    before = root.entering
    for unit in others:
        before += unit.stays(checkpointing)
        peak = max(peak, before + unit.passing + (unit.recomputed if checkpointing else 0.0))
    return round(tokens * peak)


def kept_bytes(model: Model, precision: Precision, tokens: int, checkpointing: bool) -> int:
    """Return what stays of a micro-step between its forward and its backward pass, as in a pipeline."""
    root, *others = [_PerToken.of(unit, precision) for unit in model.units]
    return round(tokens * (root.kept + sum(unit.stays(checkpointing) for unit in others)))


@dataclass(frozen=True, slots=True)
class _PerToken:
    """Bytes of a unit's activations for each token. `recomputed`: of one block, beside its input."""

    entering: float
    kept: float
    recomputed: float
    passing: float

    def stays(self, checkpointing: bool) -> float:
        return self.entering if checkpointing else self.kept

    @staticmethod
    def of(unit: Unit, precision: Precision) -> _PerToken:
        dtype = precision.compute_dtype(unit.spec.buckets[0].dtype if unit.spec.buckets else "float32")
        item = item_bytes(dtype)
        kept = unit.kept * item + 4 * unit.kept_fp32
        kept_input = unit.kept_input * item + (4 * unit.kept_input_fp32 if dtype == "float32" else 0.0)
        recomputed = (kept - kept_input) / unit.modules
        return _PerToken(unit.entering * item, kept, recomputed, unit.passing * item + 4 * unit.passing_fp32)
