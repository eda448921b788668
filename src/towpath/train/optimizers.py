"""The optimizers and the learning rate of `towpath train`.

adamw   every parameter
muon    Muon for the matrices of the model's blocks; AdamW for embeddings, the output layer and vectors
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.optim import chain, owner_stepped
from towpath.train.config import TrainConfig

BETAS = (0.9, 0.95)  # of AdamW, as Llama was trained
FINAL_SHARE = 0.1  # the last learning rate, as a share of the peak


def build_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of a sharded model. Every rank must call it."""
    trained = [p for p in parameters if p.requires_grad]
    if config.optimizer == "adamw":
        return _adamw(trained, config)
    # Embeddings and the output layer, which Muon is not meant for, are in no block and so in the root unit.
    matrices = [p for p in trained if p.dim() == 2 and isinstance(p, ShardTensor) and p.shard_spec.unit]
    # Scaled so that AdamW's learning rate suits it.
    muon = torch.optim.Muon(
        matrices, lr=config.learning_rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    chosen = {id(p) for p in matrices}
    return chain(owner_stepped(muon), _adamw([p for p in trained if id(p) not in chosen], config))


def _adamw(trained: Sequence[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    # Matrices decay. Vectors, which are norms and biases, do not.
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.learning_rate,
        betas=BETAS,
        fused=all(p.device.type in ("cpu", "cuda") for p in trained),
    )


def learning_rate(config: TrainConfig, done: int) -> float:
    """Return the learning rate after `done` steps: a line up to the peak, then a cosine down to its final share."""
    warmup = round(config.warmup * config.steps)
    if done < warmup:
        return config.learning_rate * (done + 1) / warmup
    progress = (done - warmup) / max(1, config.steps - warmup)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return config.learning_rate * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)
