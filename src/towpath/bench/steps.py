"""Workers of a race: one optimizer step of a contestant is one turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import towpath
from towpath.bench.harness.worker import timed
from towpath.bench.peers import Context, Kind, build
from towpath.bench.workload import Workload


class Step:
    """A turn is one optimizer step, or what of it the contestant does."""

    def __init__(self, rank: int, world: int, contestant: str, workload: Workload) -> None:
        kind = Kind.parse(contestant)
        self._model, context = build(contestant, workload)
        data = workload.data(rank)
        if kind.name == "compute" or kind.has("silent"):
            self._work = forward_and_backward(self._model, data)
        else:
            self._work = stepper(self._model, context, data, workload.micro_steps)
        self._ours = not kind.foreign
        self._seconds = self._host_seconds = 0.0

    def turn(self) -> float:
        before = towpath.stats(self._model).seconds_host if self._ours else 0.0
        seconds = timed(self._work)
        self._seconds += seconds
        if self._ours:
            self._host_seconds += towpath.stats(self._model).seconds_host - before
        return seconds

    def facts(self) -> dict[str, Any]:
        """What the engine says of all turns, the warm ones too."""
        if not self._ours:
            return {}
        return {"host_share": self._host_seconds / self._seconds, "stats": str(towpath.stats(self._model))}


def stepper(model: Any, context: Context, data: Any, micro_steps: int) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        for micro in range(micro_steps):
            with context(model, micro == micro_steps - 1):
                (model(*next(data)) / micro_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def forward_and_backward(model: nn.Module, data: Any) -> Callable[[], None]:
    def step() -> None:
        model(*next(data)).backward()
        model.zero_grad()

    return step
