"""Write a codec: send gradients as signs of one bit, with their mean magnitude per block, as signSGD does.

python -m lab run --nodes 2 --ranks 2 --inter 50mbit -- examples/codec.py
torchrun --nnodes 2 --nproc-per-node 2 … examples/codec.py 100

A sign loses much. So feedback="both" keeps each rounding error, and adds it to the gradient of the next step.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import towpath
from towpath.codecs import register


def encode(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale of each block and the code of each element. `blocks` is [blocks, elements] in float32."""
    return blocks.abs().mean(1), (blocks >= 0).to(torch.uint8)


def decode(scales: Tensor, codes: Tensor) -> Tensor:
    return scales[:, None] * (2.0 * codes - 1.0)


def main(steps: str = "40") -> None:
    register("sign", bits=1, encode=encode, decode=decode)
    device = towpath.init()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
    truth = (torch.randn(64, 8) / 8).to(device)
    strategy = towpath.strategy("mics", gradients="sign:64", feedback="both")
    model = towpath.shard(model.to(device), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(rank)  # other samples on every rank
    for step in range(int(steps)):
        inputs = torch.randn(64, 64, device=device)
        loss = (model(inputs) - inputs @ truth).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    if rank == 0:
        print(towpath.stats(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
