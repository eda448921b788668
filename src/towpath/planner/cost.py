"""How long one rank computes in a step, if nothing else goes on."""

from __future__ import annotations

from collections.abc import Sequence

from towpath.core.precision import Precision
from towpath.core.schedule import UnitPlan
from towpath.planner.cluster import Cluster
from towpath.planner.model import Model
from towpath.planner.workload import Optimizer
from towpath.sim.replay import Seconds

# The backward pass multiplies each matrix twice: for the gradient of the weights, and of the inputs.
_BACKWARD = 2


def computing(
    model: Model,
    plans: Sequence[UnitPlan],
    cluster: Cluster,
    precision: Precision,
    optimizer: Optimizer,
    tokens: int,
    checkpointing: bool,
) -> Seconds:
    """`tokens`: of one micro-step, on one rank."""
    rate = cluster.flops_of(precision.compute_dtype("float32"))
    forward = [unit.flops * tokens / rate for unit in model.units]
    again = 1 if checkpointing else 0
    root, *others = forward
    return Seconds(
        forward=(0.0, *others),
        backward=(_BACKWARD * root, *((_BACKWARD + again) * each for each in others)),
        forward_end=root,
        backward_end=0.0,
        optimizer=optimizer_seconds(plans, cluster, optimizer),
    )


def optimizer_seconds(plans: Sequence[UnitPlan], cluster: Cluster, optimizer: Optimizer) -> float:
    """As fast as memory is read and written; a copy does both."""
    moved = sum(
        b.numel // b.optimizer.count * optimizer.moved_bytes(b.own_dtype)
        for plan in plans
        for b in plan.buckets
        if b.spec.trainable
    )
    return moved / (2 * cluster.hardware.memory_rate)
