"""A training script as a user writes it, for torchrun on a real cluster or `towpath lab run` on a shaped one.

towpath lab run --nodes 2 --ranks 2 --inter 200mbit -- examples/train.py zero3 8
torchrun --nnodes 2 --nproc-per-node 2 … examples/train.py paro-iig 100
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

import towpath
from towpath.train.models.gpt import GPT, Shape

MICRO_STEPS, BATCH, LENGTH = 2, 4, 128

# The sources of Python's standard library, as bytes: a text that every machine has.
FILES = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


class Bytes:
    """Windows of a text, each byte a token."""

    def __init__(self) -> None:
        text = b"\0".join(file.read_bytes() for file in FILES)
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def batch(self, number: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of batch `number` and, one byte later, its targets. They are the same on every rank."""
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(len(self.tokens) - LENGTH, (count, 1), generator=generator)
        windows = self.tokens[starts + torch.arange(LENGTH + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def main(strategy: str = "paro-iig", steps: str = "10") -> None:
    device = towpath.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Bytes()
    torch.manual_seed(0)
    shape = Shape(vocabulary=256, width=192, depth=6, heads=6, kv_heads=6, hidden=512, tied=True)
    model = towpath.shard(GPT(shape).to(device), strategy)  # nodes and ranks as the launcher placed them
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
