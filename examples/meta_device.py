"""A model that is larger than the memory of any rank: built without memory, and given its values slice by slice.

towpath lab run --nodes 2 --ranks 2 --inter 500mbit -- examples/meta_device.py
torchrun --nnodes 2 --nproc-per-node 2 … examples/meta_device.py 100

So that it shows on any machine, each rank forbids itself more memory than 85 % of what the parameters take up
(Linux; on a GPU nothing is limited). Whoever held the whole model for a moment would end here.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import towpath

WIDTH, DEPTH, SHARE = 1024, 48, 0.85


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def data_bytes() -> int:
    """What this process has of memory that is limited by RLIMIT_DATA."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []
    for _ in range(steps):
        loss = model(torch.randn(8, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(steps: str = "5") -> None:
    torch.set_num_threads(1)
    dist.init_process_group()
    rank = dist.get_rank()
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(DEPTH)))
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    if sys.platform == "linux":
        train(towpath.shard(nn.Sequential(Block()), "zero3"), 1)  # process groups, threads: no part of the model
        limit = data_bytes() + int(SHARE * whole)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.manual_seed(0)
    model = towpath.shard(model, "zero3")  # each rank draws one block at a time, and keeps its slice
    torch.manual_seed(1 + rank)
    for step, loss in enumerate(train(model, int(steps))):
        if rank == 0:
            print(f"step {step + 1}: loss {loss:.3f}", flush=True)
    if rank == 0:
        held = sum(towpath.stats(model).memory_bytes.values())
        print(
            f"parameters: {whole / 1e6:.0f} MB; a rank holds {held / 1e6:.0f} MB of parameters, gradients and buffers"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
