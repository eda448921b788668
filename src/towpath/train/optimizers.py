"""The optimizers that `towpath train` offers.

adamw   every parameter
muon    Muon for the matrices of the model's blocks; AdamW for all else: embeddings, the output layer, vectors
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.optim import chain, owner_stepped
from towpath.train.config import TrainConfig


def optimizer_for(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """Of a sharded model. Every rank must call it."""
    trained = [p for p in parameters if p.requires_grad]
    if config.optimizer == "adamw":
        return adamw(trained, config)
    matrices = [p for p in trained if _is_hidden_matrix(p)]
    muon = torch.optim.Muon(
        matrices,
        lr=config.muon_learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
    )
    chosen = {id(p) for p in matrices}
    return chain(owner_stepped(muon), adamw([p for p in trained if id(p) not in chosen], config))


def _is_hidden_matrix(parameter: nn.Parameter) -> bool:
    """What lies in no block is the root unit's: embeddings and the output layer, which Muon is not meant for."""
    return parameter.dim() == 2 and isinstance(parameter, ShardTensor) and bool(parameter.shard_spec.unit)


def adamw(trained: Sequence[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """Matrices decay; vectors (norms, biases) do not."""
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=all(p.device.type in ("cpu", "cuda") for p in trained),
    )


def peak_of(group: dict[str, Any], config: TrainConfig) -> float:
    """Of the learning rate of one of their groups: Muon's are known by what they iterate with."""
    return config.muon_learning_rate if "ns_steps" in group else config.learning_rate
