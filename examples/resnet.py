"""Train a residual network for images in bf16, with its BatchNorm layers in float32.

python -m lab run --nodes 2 --ranks 2 --inter 200mbit -- examples/resnet.py zero3
torchrun --nnodes 2 --nproc-per-node 2 … examples/resnet.py paro-iig 100

The images are synthetic: each class has its own pattern, with noise.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import towpath

CLASSES, SIDE, BATCH = 10, 16, 32


class Residual(nn.Module):
    """Two convolutions and a shortcut. It halves the image where the width grows."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        stride = 1 if width == out else 2
        self.first = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.beside = nn.Identity() if width == out else nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(inner + self.beside(x))


class ResNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.Sequential(
            *(Residual(width if number == 0 else out, out) for width, out in pairs for number in range(depth))
        )
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(images))).mean((2, 3)))


def images(patterns: Tensor) -> tuple[Tensor, Tensor]:
    labels = torch.randint(CLASSES, (BATCH,), device=patterns.device)
    return patterns[labels] + torch.randn(BATCH, 3, SIDE, SIDE, device=patterns.device), labels


def main(strategy: str = "zero3", steps: str = "30") -> None:
    device = towpath.init()
    rank = dist.get_rank()
    torch.manual_seed(0)
    patterns = torch.randn(CLASSES, 3, SIDE, SIDE).to(device)
    precision = towpath.Precision(params=torch.bfloat16, reduce=torch.float32, keep=(nn.BatchNorm2d,))
    model = towpath.shard(ResNet().to(device), strategy, units=[Residual], precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + rank)  # other images on every rank
    for step in range(int(steps)):
        inputs, labels = images(patterns)
        loss = F.cross_entropy(model(inputs).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    # Each rank's norms have seen its own images: rank 0's statistics become everyone's.
    towpath.broadcast_buffers(model)
    model.eval()
    with torch.no_grad():
        inputs, labels = images(patterns)
        right = (model(inputs).argmax(1) == labels).float().mean()
    dist.all_reduce(right)
    if rank == 0:
        print(f"of new images {right.item() / dist.get_world_size():.0%} right")
        print(towpath.stats(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
