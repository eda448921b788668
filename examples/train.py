"""A training script as a user writes it, for torchrun on a real cluster or `towpath lab run` on a shaped one.

towpath lab run --nodes 2 --ranks 2 --inter 200mbit -- examples/train.py zero3 8
torchrun --nnodes 2 --nproc-per-node 2 … examples/train.py paro-iig 100
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import gpt
import towpath

MICRO_STEPS = 2


def main(strategy: str = "paro-iig", steps: str = "10") -> None:
    dist.init_process_group()
    torch.manual_seed(0)
    model = towpath.shard(gpt.GPT(), strategy)  # nodes and ranks as the launcher placed them
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = gpt.batches(dist.get_rank(), batch=4, length=128)
    for step in range(int(steps)):
        for micro in range(MICRO_STEPS):
            with contextlib.nullcontext() if micro == MICRO_STEPS - 1 else model.no_sync():
                loss = model(*next(data))
                (loss / MICRO_STEPS).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {norm.item():.3f}", flush=True)
    if dist.get_rank() == 0:
        print(towpath.stats(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
