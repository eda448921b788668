"""Train a model that is too large for any of four machines on a slow switch: a quarter of its blocks on each.

python -m lab run --nodes 4 --ranks 1 --inter 100mbit -- examples/pipeline.py
torchrun --nnodes 4 --nproc-per-node 1 … examples/pipeline.py 100

Each micro-batch sends one activation between machines, and its gradient back. Weights are never sent. Gradients that
other stages wait for are sent in low rank.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import towpath
from tiny_gpt import GPT, LENGTH, Bytes
from towpath.pipeline import Pipeline, compression, split

MICRO_BATCHES, BATCH = 8, 2


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(steps: str = "5") -> None:
    device = towpath.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Bytes()
    with torch.device("meta"):  # without memory: each machine draws the weights of its own stage
        model = GPT(width=256, depth=8, heads=8)
    example = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    torch.manual_seed(rank)
    pipeline = Pipeline(
        split(model, world, example),
        "ddp",  # of each stage there is one copy; with more, `mesh` has more than one column
        mesh=init_device_mesh(device.type, (world, 1), mesh_dim_names=("pp", "dp")),
        micro_batches=MICRO_BATCHES,
        loss=loss_of,
        example=example,
        # Lossy, for slow links only: docs/guides/pipeline-compression.md has what it costs.
        compression=compression("optimus-cb+fe", activation_gradients="low-rank:8"),
    )
    held = sum(p.numel() for p in pipeline.parameters())
    print(f"rank {rank}: {held / 1e6:.1f} of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters")
    optimizer = torch.optim.AdamW(list(pipeline.parameters()), lr=1e-3)
    for step in range(int(steps)):
        inputs, targets = (tensor.to(device) for tensor in data.batch(step, MICRO_BATCHES * BATCH))
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
