"""Train under Ray Train. Its workers have a process group before the function starts.

ray job submit --working-dir . -- python examples/clusters/ray_train.py

A worker is a rank. The scaling configuration says how many GPUs it gets.
"""

from __future__ import annotations

import torch
from ray import train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import towpath

NODES, RANKS_PER_NODE, STEPS = 2, 8, 100


def train_loop() -> None:
    context = train.get_context()
    ranks = context.get_local_world_size()
    # Ray's workers say to nobody else which node they are on.
    topology = towpath.Topology(context.get_world_size() // ranks, ranks)
    device = torch.device("cuda", context.get_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to(device)
    model = towpath.shard(model, "mics", topology=topology)  # in place of ray.train.torch.prepare_model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + context.get_world_rank())
    for _ in range(STEPS):
        inputs = torch.randn(32, 64, device=device)
        loss = (model(inputs) - inputs[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        train.report({"loss": loss.item()})


if __name__ == "__main__":
    workers = ScalingConfig(num_workers=NODES * RANKS_PER_NODE, use_gpu=True)
    TorchTrainer(train_loop, scaling_config=workers).fit()
