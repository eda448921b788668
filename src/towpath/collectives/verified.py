"""Checks, before anything travels, that a collective is given what it was made for.

That all ranks made the same collectives is agreed on by `shard()`; that they run them in the same order is compared at
every boundary (`core/journal.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from towpath.codecs.packing import Draws
from towpath.collectives.collective import Binding, Collective, Members
from towpath.collectives.workspace import Workspace
from towpath.core.routes import Op
from towpath.errors import StepError


@final
@dataclass(frozen=True, slots=True)
class Verified(Collective):
    """Runs `inner` on tensors that fit its binding, and refuses others."""

    inner: Collective
    binding: Binding
    members: Members

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return self.inner.state

    @property
    def draws(self) -> tuple[Draws, ...]:
        return self.inner.draws

    def begin(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        check_fit(self.binding, self.members, region, shard)
        self.inner.begin(region, shard, workspace)

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        check_fit(self.binding, self.members, region, shard)
        self.inner.run(region, shard, workspace)


def check_fit(binding: Binding, members: Members, region: torch.Tensor, shard: torch.Tensor) -> None:
    """A collective carries what it was made for; anything else is refused before it meets the others' messages."""
    wanted = [("region", region, binding.elements)]
    if binding.op is not Op.ALL_REDUCE:
        start, end = binding.bounds(members)
        wanted.append(("shard", shard, end - start))
    for name, tensor, elements in wanted:
        if tensor.numel() != elements or tensor.dtype != binding.dtype or not tensor.is_contiguous():
            raise StepError(
                f"rank {members.rank}: {binding.label} by {binding.route}: got a {name} of {tensor.numel()} elements "
                f"of {tensor.dtype}, expected {elements} of {binding.dtype}, contiguous. A collective carries what it "
                "was made for; make another for other tensors."
            )
