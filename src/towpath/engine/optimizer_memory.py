"""Where the optimizer works: in the model's own memory, or in the host's (`shard(…, offload="optimizer")`).

In the host's memory lie this rank's slice of the parameters in their own dtype (the master), its `.grad`, and with them
all that the user's optimizer keeps for each of them. Two copies connect it with the device, each on the stream of the
transfer that it belongs to:

    sync      mean gradients, as soon as they are there: under what is left of the backward pass
    publish   what was written to the parameters, rounded to the dtype that computes, before it travels on

On a GPU the host's memory is page-locked, so that a copy needs no processor; the host then has to wait for a copy
before it reads, or writes to, what was copied: `Wait(…, on_host=True)` of the step machine. What is on its way to the
device lies apart from the master, so that an optimizer may write to that at any time.
"""

from __future__ import annotations

from typing import final

import torch

from towpath.core.unit_plan import BucketPlan
from towpath.engine.dtypes import torch_dtype


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of the host, to copy to `device` from, or from there."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda")


@final
class OptimizerMemory:
    """Of one bucket whose optimizer works on a copy of its own (`BucketPlan.has_master`)."""

    def __init__(self, plan: BucketPlan, device: torch.device) -> None:
        self._device, self._on_host = device, plan.optimizer_on_host
        self._own = torch_dtype(plan.own_dtype)
        elements, compute = plan.numel // plan.optimizer.count, torch_dtype(plan.compute_dtype)
        self.outgoing = host_memory(elements, compute, device) if self._on_host else None

    def like(self, values: torch.Tensor) -> torch.Tensor:
        """For as many elements in the parameters' own dtype."""
        if self._on_host:
            return host_memory(values.numel(), self._own, self._device)
        return torch.empty_like(values, dtype=self._own)

    def holding(self, values: torch.Tensor) -> torch.Tensor:
        """These values, which the device has: itself, or a copy on the host."""
        return self.like(values).copy_(values) if self._on_host else values

    def publish(self, master: torch.Tensor, target: torch.Tensor) -> None:
        """Write what the optimizer wrote to `target`, on the device."""
        if self.outgoing is None:
            target.copy_(master)
        else:
            self.outgoing.copy_(master)
            target.copy_(self.outgoing, non_blocking=True)
