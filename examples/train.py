"""A training script as a user writes it, for torchrun on a real cluster or `towpath lab run` on a shaped one.

towpath lab run --nodes 2 --ranks 2 --inter 200mbit -- examples/train.py zero3 8
torchrun --nnodes 2 --nproc-per-node 2 … examples/train.py paro-iig 100
"""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F

import towpath
from towpath.train.config import DataConfig
from towpath.train.data.sources import open_tokens
from towpath.train.models.gpt import GPT, Shape

MICRO_STEPS, BATCH, LENGTH = 2, 4, 128


def main(strategy: str = "paro-iig", steps: str = "10") -> None:
    device = towpath.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    # The sources of Python's standard library, as bytes; each rank reads samples of its own.
    tokens = open_tokens(DataConfig(), LENGTH, first_here=rank == 0, wait=dist.barrier)
    torch.manual_seed(0)
    shape = Shape(vocabulary=tokens.vocabulary, width=192, depth=6, heads=6, kv_heads=6, hidden=512, tied=True)
    model = towpath.shard(GPT(shape).to(device), strategy)  # nodes and ranks as the launcher placed them
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(int(steps)):
        mean_loss = torch.zeros((), device=device)
        for micro in range(MICRO_STEPS):
            batch = tokens.train.batch(((step * MICRO_STEPS + micro) * world + rank) * BATCH, BATCH)
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
