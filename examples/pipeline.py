"""Four machines on a slow switch, and a model that is too large for any of them: a quarter of its blocks on each.

towpath lab run --nodes 4 --ranks 1 --inter 100mbit -- examples/pipeline.py
torchrun --nnodes 4 --nproc-per-node 1 … examples/pipeline.py 100

Between machines goes one activation for each micro-batch, and its gradient back: never a weight; and those gradients
that others wait for go in low rank.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import towpath
from towpath.pipeline import Pipeline, compression, split
from towpath.train.config import DataConfig
from towpath.train.data.sources import open_tokens
from towpath.train.models.gpt import GPT, Shape

MICRO_BATCHES, BATCH, LENGTH = 8, 2, 128


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(steps: str = "5") -> None:
    device = towpath.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = open_tokens(DataConfig(), LENGTH, first_here=rank == 0, wait=dist.barrier)
    shape = Shape(vocabulary=tokens.vocabulary, width=256, depth=8, heads=8, kv_heads=8, hidden=704, tied=True)
    with torch.device("meta"):  # without memory: each machine draws the weights of its own stage
        model = GPT(shape)
    example = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    torch.manual_seed(rank)
    pipeline = Pipeline(
        split(model, world, example),
        "ddp",  # of each stage there is one copy; with more, `mesh` has more than one column
        mesh=init_device_mesh(device.type, (world, 1), mesh_dim_names=("pp", "dp")),
        micro_batches=MICRO_BATCHES,
        loss=loss_of,
        example=example,
        compression=compression("optimus-cb+fe", activation_gradients="low-rank:8"),
    )
    held = sum(p.numel() for p in pipeline.parameters())
    print(f"rank {rank}: {held / 1e6:.1f} of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters")
    optimizer = torch.optim.AdamW(list(pipeline.parameters()), lr=1e-3)
    for step in range(int(steps)):
        batch = tokens.train.batch(step * MICRO_BATCHES * BATCH, MICRO_BATCHES * BATCH)
        inputs, targets = (tensor.to(device) for tensor in batch)
        loss = pipeline.step(inputs, target=targets)
        norm = pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {norm.item():.3f}", flush=True)
    found = pipeline.stats()  # every rank has to ask
    if rank == 0:
        print(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
