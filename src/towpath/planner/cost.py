"""How long one rank computes in a step, if nothing else goes on."""

from __future__ import annotations

from towpath.core.formats import item_bytes
from towpath.planner.cluster import Cluster
from towpath.planner.model import Model, Unit
from towpath.planner.request import Optimizer
from towpath.sim.hardware import Hardware
from towpath.sim.replay import Seconds

# The backward pass multiplies each matrix twice: for the gradient of the weights, and of the inputs.
_BACKWARD = 2


def computing(model: Model, cluster: Cluster, dtype: str, tokens: int, checkpointing: bool) -> Seconds:
    """Of one micro-step of `tokens` tokens, in `dtype`; without the optimizer's step."""
    (root_forward, root_backward), *blocks = (_with_host(unit, cluster, dtype, tokens) for unit in model.units)
    return Seconds(
        forward=(0.0, *(forward for forward, _ in blocks)),
        # What is recomputed is one forward pass more.
        backward=(root_backward, *(backward + checkpointing * forward for forward, backward in blocks)),
        forward_end=root_forward,
        backward_end=0.0,
        share=_share(model, tokens),
    )


def _share(model: Model, tokens: int) -> float:
    """Of the time of all passes, in which the processor works."""
    weights = [(m, m.forward.at(tokens) + m.backward.at(tokens)) for u in model.units if (m := u.measured) is not None]
    whole = sum(seconds for _, seconds in weights)
    return sum(m.share * seconds for m, seconds in weights) / whole if whole else 1.0


def _with_host(unit: Unit, cluster: Cluster, dtype: str, tokens: int) -> tuple[float, float]:
    """Forward and backward, with what the engine itself takes of the thread that trains."""
    forward, backward = _passes(unit, cluster, dtype, tokens)
    host, parameters = cluster.hardware.host, sum(len(bucket.numels) for bucket in unit.spec.buckets)
    return forward + host.forward.of(parameters), backward + host.backward.of(parameters)


def _passes(unit: Unit, cluster: Cluster, dtype: str, tokens: int) -> tuple[float, float]:
    """Forward and backward."""
    if unit.measured is not None:
        return unit.measured.forward.at(tokens), unit.measured.backward.at(tokens)
    forward = unit.flops * tokens / cluster.flops_of(dtype)
    return forward, _BACKWARD * forward


def optimizer_seconds(
    elements: float, parameters: int, own: str, optimizer: Optimizer, hardware: Hardware, on_host: bool = False
) -> float:
    """Of so many elements in the dtype `own`: as fast as memory is read and written (a copy does both), the host's or
    the device's; and what each of the parameters that they belong to takes of the host."""
    moved = elements * (optimizer.moved_bytes(own) + item_bytes(own))  # the norm of the gradients reads them once more
    rate = hardware.offloading.memory_rate if on_host else hardware.memory_rate
    return moved / (2 * rate) + parameters * hardware.host.optimizer
