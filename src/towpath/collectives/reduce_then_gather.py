"""An all-reduce made of two collectives: a reduce-scatter, and a gather of what it left in every member's slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from towpath.codecs.packing import Draws
from towpath.collectives.collective import Binding, Collective, Members
from towpath.collectives.workspace import Workspace


@final
@dataclass(frozen=True, slots=True)
class ReduceThenGather(Collective):
    binding: Binding
    members: Members
    reduce: Collective
    gather: Collective

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return self.reduce.state

    @property
    def draws(self) -> tuple[Draws, ...]:
        return (*self.reduce.draws, *self.gather.draws)

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        mine = self.binding.own_slice(region, self.members)
        self.reduce.run(region, mine, workspace)
        self.gather.run(region, mine, workspace)
