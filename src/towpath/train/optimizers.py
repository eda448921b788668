"""The optimizers, the learning rate and the loss scale of `towpath train`.

adamw   every parameter
muon    Muon for the matrices of the model's blocks; AdamW for embeddings, the output layer and vectors
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.optim import chain, owner_stepped
from towpath.train.config import TrainConfig

Loss = TypeVar("Loss", float, Tensor)


def build_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of a sharded model. Every rank must call it."""
    trained = [p for p in parameters if p.requires_grad]
    if config.optimizer == "adamw":
        return _adamw(trained, config)
    # Embeddings and the output layer, which Muon is not meant for, are in no block and so in the root unit.
    matrices = [p for p in trained if p.dim() == 2 and isinstance(p, ShardTensor) and p.shard_spec.unit]
    muon = torch.optim.Muon(
        matrices,
        lr=config.muon_learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
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
        betas=config.betas,
        eps=config.eps,
        fused=all(p.device.type in ("cpu", "cuda") for p in trained),
    )


def can_skip_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether `step_if` can step an optimizer whose gradients are computed on `device`.

    Fused AdamW can. Muon cannot, and neither can an optimizer whose states are in the host's memory.
    """
    # The groups decide, not the defaults: a loaded state may have changed them.
    fused = isinstance(optimizer, torch.optim.AdamW) and all(group["fused"] for group in optimizer.param_groups)
    return fused and all(p.device.type == device.type for group in optimizer.param_groups for p in group["params"])


def step_if(optimizer: Any, wanted: Tensor) -> None:
    """Step an optimizer if `wanted`, a boolean on the device, is true. Otherwise no weight and no state changes.

    The host does not wait for the value. The kernels of a fused optimizer read it, as they read what a `GradScaler` has
    found.
    """
    optimizer.found_inf = wanted.logical_not().float()
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


def learning_rate(config: TrainConfig, done: int) -> float:
    """Return the learning rate after `done` steps: a line up to the peak, then a cosine down to its final share."""
    warmup = round(config.warmup * config.steps)
    if done < warmup:
        return config.learning_rate * (done + 1) / warmup
    progress = (done - warmup) / max(1, config.steps - warmup)
    low = config.final_share
    return config.learning_rate * (low + (1 - low) * (1 + math.cos(math.pi * min(1.0, progress))) / 2)


def set_learning_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, done: int) -> float:
    """Set the learning rate of every parameter group for the step after `done` steps, and return AdamW's."""
    rate = learning_rate(config, done)
    for group in optimizer.param_groups:
        # Muon's groups, which have "ns_steps", get the same share of their own peak.
        peak = config.muon_learning_rate if "ns_steps" in group else config.learning_rate
        group["lr"] = rate * (peak / config.learning_rate)
    return rate


class LossScale:
    """Dynamic loss scaling, which keeps gradients of fp16 within its range.

    The loss is multiplied by `value` before the backward pass, and gradients are divided by it afterwards. `value`
    halves when a gradient has overflowed, and doubles after 2000 steps without an overflow. It is a power of two, so it
    changes no digits. Every rank must make the same calls. If it is not `active`, `value` stays 1.
    """

    GROWS_AFTER = 2000

    def __init__(self, first: float, active: bool) -> None:
        self.active = active
        self.value = first if active else 1.0
        self._unchanged = 0  # steps since the scale has changed

    def scaled(self, loss: Loss) -> Loss:
        """Return the loss for the backward pass."""
        return loss * self.value if self.active else loss

    def unscaled(self, loss: Loss) -> Loss:
        """Return the loss of a backward pass as it is without scaling."""
        return loss / self.value if self.active else loss

    def unscale_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        if self.active:
            gradients: Sequence[Tensor] = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / self.value)  # pyright: ignore

    def update(self, overflowed: bool) -> None:
        """Change the scale after a step."""
        if not self.active:
            return
        self._unchanged = 0 if overflowed else self._unchanged + 1
        if overflowed:
            self.value /= 2
        elif self._unchanged == self.GROWS_AFTER:
            self.value, self._unchanged = self.value * 2, 0

    def state(self) -> list[float]:
        """Return the state for a checkpoint."""
        return [self.value, float(self._unchanged)]

    def restore(self, state: Sequence[float]) -> None:
        """Restore the state from a checkpoint, unless the checkpoint is of a run in another precision."""
        if self.active and state[0] != 1.0:
            self.value, self._unchanged = float(state[0]), int(state[1])
