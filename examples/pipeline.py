"""Four machines on a slow switch, and a model that is too large for any of them: a quarter of its blocks on each.

towpath lab run --nodes 4 --ranks 1 --inter 100mbit -- examples/pipeline.py
torchrun --nnodes 4 --nproc-per-node 1 … examples/pipeline.py 100

Between machines goes one activation for each micro-batch, and its gradient back: never a weight; and those gradients
that others wait for go in low rank.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import towpath
from towpath.pipeline import Pipeline, compression, split
from towpath.train.models.gpt import GPT, Shape

MICRO_BATCHES, BATCH, LENGTH = 8, 2, 128

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


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(steps: str = "5") -> None:
    device = towpath.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Bytes()
    shape = Shape(vocabulary=256, width=256, depth=8, heads=8, kv_heads=8, hidden=704, tied=True)
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
