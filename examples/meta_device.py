"""Build a model without memory, and let each rank draw its slice of the weights block by block.

python -m lab run --nodes 2 --ranks 2 --inter 500mbit -- examples/meta_device.py
torchrun --nnodes 2 --nproc-per-node 2 … examples/meta_device.py 100

The model may be larger than the memory of a rank. The last line compares the peak memory of the ranks with the size of
the parameters. It is smaller, although it includes gradients and buffers.
"""

from __future__ import annotations

import resource
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import towpath

WIDTH, DEPTH = 1024, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def peak_bytes() -> int:
    """Return the peak memory of this process. `ru_maxrss` is in KiB on Linux, and in bytes on macOS."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def train(model: nn.Module, steps: int, device: torch.device) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(8, WIDTH, device=device)  # one batch, again and again
    losses: list[float] = []
    for _ in range(steps):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(steps: str = "5") -> None:
    torch.set_num_threads(1)
    device = towpath.init()
    rank = dist.get_rank()
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(DEPTH)))
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    # A first step, since process groups and threads are no part of the model.
    train(towpath.shard(nn.Sequential(Block()).to(device), "zero3"), 1, device)
    before = peak_bytes()
    torch.manual_seed(0)
    model = towpath.shard(model, "zero3")  # each rank draws one block at a time, and keeps its slice
    torch.manual_seed(1 + rank)
    for step, loss in enumerate(train(model, int(steps), device)):
        if rank == 0:
            print(f"step {step + 1}: loss {loss:.3f}", flush=True)
    grown = torch.tensor(peak_bytes() - before)
    dist.all_reduce(grown, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"parameters: {whole / 1e6:.0f} MB; no rank needed more than {grown.item() / 1e6:.0f} MB", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
