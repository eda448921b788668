"""What a run must come to: the same training in one process, every rank's micro-batches one after the other."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.ranks.models import LOUDNESS, MODELS


@dataclass(frozen=True)
class Task:
    """One training run, whatever the strategy: what the reference is computed, and cached, for."""

    model: str
    world: int
    micro_steps: int
    dtype: str
    steps: int = len(LOUDNESS)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def file(self) -> str:
        return f"{self.model}-{self.world}-{self.micro_steps}-{self.dtype}-{self.steps}.pt"


@dataclass(frozen=True)
class Result:
    """`losses` and `norms`: one for each step, before clipping; `parameters`: after the last step."""

    max_norm: float
    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]


def optimizer_for(model: nn.Module, kind: str = "foreach") -> torch.optim.Optimizer:
    """AdamW with an eps that fp32 can bear: at 1e-8 it makes whole steps of a zero gradient's rounding."""
    switches = {"for-loop": {"foreach": False, "fused": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    return torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5, weight_decay=0.1, **switches[kind])


def train_in_one_process(task: Task) -> Result:
    entry = MODELS[task.model]
    model = entry.make(task.torch_dtype)
    optimizer = optimizer_for(model)
    share = 1.0 / (task.world * task.micro_steps)
    max_norm = 0.0
    losses: list[float] = []
    norms: list[float] = []
    for step in range(task.steps):
        total = 0.0
        for rank in range(task.world):
            for micro_step in range(task.micro_steps):
                inputs = entry.micro_batch(rank, micro_step, step, task.torch_dtype)
                loss = LOUDNESS[step] * share * entry.loss(model, *inputs)
                loss.backward()
                total += loss.item()
        # Between the loud steps' norms and the soft ones': some steps are clipped, others are not.
        max_norm = max_norm or 0.8 * _norm(model)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) < max_norm < max(norms), f"{task}: {norms} are all on one side of {max_norm}"
    return Result(max_norm, losses, norms, {name: p.detach() for name, p in model.named_parameters()})


def _norm(model: nn.Module) -> float:
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()


def load_or_train(task: Task, folder: Path, train: Callable[[Task], Result]) -> Path:
    """The file that holds a task's result; `train` makes it where it is missing, once for all pytest workers."""
    path = folder / task.file
    with (folder / f"{task.file}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            result = train(task)
            partial = path.with_suffix(".partial")
            torch.save(result, partial)
            partial.rename(path)
    return path


def read(path: Path) -> Result:
    return torch.load(path, weights_only=False)
