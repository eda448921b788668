"""How long one rank computes in a step, if nothing else goes on."""

from __future__ import annotations

from towpath.planner.cluster import Cluster
from towpath.planner.model import Model
from towpath.planner.workload import Optimizer
from towpath.sim.hardware import Hardware
from towpath.sim.replay import Seconds

# The backward pass multiplies each matrix twice: for the gradient of the weights, and of the inputs.
_BACKWARD = 2


def computing(model: Model, cluster: Cluster, dtype: str, tokens: int, checkpointing: bool) -> Seconds:
    """Of one micro-step of `tokens` tokens, in `dtype`; without the optimizer's step."""
    rate = cluster.flops_of(dtype)
    root, *others = (unit.flops * tokens / rate for unit in model.units)
    backward = _BACKWARD + checkpointing  # what is recomputed is one forward pass more
    return Seconds(
        forward=(0.0, *others),
        backward=(_BACKWARD * root, *(backward * each for each in others)),
        forward_end=root,
        backward_end=0.0,
    )


def optimizer_seconds(elements: float, own: str, optimizer: Optimizer, hardware: Hardware) -> float:
    """Of so many parameters in the dtype `own`: as fast as memory is read and written; a copy does both."""
    return elements * optimizer.moved_bytes(own) / (2 * hardware.memory_rate)
