"""Train a small GPT in a plain loop, with torchrun on a real cluster or `python -m lab run` on an emulated one.

python -m lab run --nodes 2 --ranks 2 --inter 200mbit -- examples/train.py zero3 8
torchrun --nnodes 2 --nproc-per-node 2 … examples/train.py paro-iig 100
"""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F

import towpath
from tiny_gpt import GPT, Bytes

MICRO_STEPS, BATCH = 2, 4


def main(strategy: str = "paro-iig", steps: str = "10") -> None:
    device = towpath.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Bytes()
    torch.manual_seed(0)
    model = GPT(width=192, depth=6, heads=6).to(device)
    model = towpath.shard(model, strategy)  # nodes and ranks as the launcher placed them
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(int(steps)):
        mean_loss = torch.zeros((), device=device)
        for micro in range(MICRO_STEPS):
            batch = data.batch((step * MICRO_STEPS + micro) * world + rank, BATCH)  # each rank reads its own
            inputs, targets = (tensor.to(device) for tensor in batch)
            with contextlib.nullcontext() if micro == MICRO_STEPS - 1 else towpath.no_sync(model):
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                (loss / MICRO_STEPS).backward()
            mean_loss += loss.detach() / MICRO_STEPS
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {mean_loss.item():.4f}, gradient norm {norm.item():.3f}", flush=True)
    if rank == 0:
        print(towpath.stats(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
