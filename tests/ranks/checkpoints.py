"""Runs that save and load, for tests of checkpoints. Functions here run on every rank, or in one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import towpath
from tests.ranks.models import MODELS
from tests.ranks.reference import optimizer_for
from tests.ranks.strategies import strategy_of
from tests.ranks.twin import accumulating
from towpath import Topology, checkpoint

Content = dict[str, Tensor]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@dataclass
class Run:
    """A sharded model and its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer
    name: str = "gpt"
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(
        label: str,
        topology: Topology,
        name: str = "gpt",
        dtype: torch.dtype = torch.float32,
        offload: str | None = None,
        outer: towpath.Outer | None = None,
        protect: towpath.Protect | None = None,
        **options: Any,
    ) -> Run:
        strategy = strategy_of(label, topology, offload=offload, outer=outer, protect=protect)
        model = towpath.shard(MODELS[name].make(dtype), strategy, **options)
        return Run(model, optimizer_for(model), name, dtype)

    def train(self, steps: Iterable[int], micro_steps: int = 1) -> list[float]:
        """Return the losses of this rank: of each step that of the last micro-step."""
        entry, losses = MODELS[self.name], []
        for step in steps:
            loss = torch.zeros(())
            for micro in accumulating(self.model, micro_steps):
                loss = entry.loss(self.model, *entry.micro_batch(rank(), micro, step, self.dtype))
                loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def spoil(self) -> Run:
        """So that what is right afterwards was loaded."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(123.0)
        return self

    def state(self, **extras: Any) -> checkpoint.State:
        return checkpoint.State(self.model, self.optimizer, **extras)

    def content(self) -> Content:
        return content(self.model, self.optimizer)


def content(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Content:
    """Weights, buffers and optimizer states, whole."""
    found = {name: whole(p) for name, p in model.named_parameters()}
    found |= {f"buffer {name}": whole(b) for name, b in model.named_buffers()}
    for name, parameter in model.named_parameters() if optimizer is not None else ():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key} of {name}"] = whole(torch.as_tensor(value))
    return found


def whole(tensor: Tensor) -> Tensor:
    """On the host, where it can be compared with what an offloaded optimizer holds, and sent to another process."""
    full = tensor.full_tensor().detach() if isinstance(tensor, towpath.ShardTensor) else tensor.detach().clone()
    return full.cpu()


def differing(found: Content, expected: Content) -> list[str]:
    """Names of what is not there, or not the same bit for bit."""
    return sorted(found.keys() ^ expected.keys()) + [
        name
        for name in found.keys() & expected.keys()
        if found[name].dtype != expected[name].dtype or not torch.equal(found[name].cpu(), expected[name].cpu())
    ]
