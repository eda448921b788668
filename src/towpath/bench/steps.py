"""Workers of a race: one optimizer step of a contestant is one turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import towpath
from towpath.bench import deepspeed_peer
from towpath.bench.harness.allocator import give_freed_memory_back
from towpath.bench.harness.worker import timed
from towpath.bench.peers import DEEPSPEED, CandidateSpec, Context, build
from towpath.bench.workload import Workload

_STATUS = Path("/proc/self/status")

Span = tuple[float, float]  # when something began, and ended


class Step:
    """A turn is one optimizer step, or what of it the contestant does."""

    def __init__(self, rank: int, world: int, contestant: str, workload: Workload) -> None:
        kind = CandidateSpec.parse(contestant)
        self._bytes_before = held_bytes()
        self._optimizing: list[Span] = []  # by turn: to clip, to step and to zero
        self._model, context = build(contestant, workload)
        data = workload.data(rank)
        if kind.name == "compute" or kind.has("silent"):
            self._work = forward_and_backward(self._model, data)
        elif kind.name == DEEPSPEED:
            self._work = deepspeed_peer.stepper(self._model, data, workload.micro_steps)
        else:
            self._work = stepper(self._model, context, data, workload.micro_steps, self._optimizing.append)
        self._ours = not kind.foreign
        self._processor_seconds: list[float] = []  # by turn
        self._exposed_seconds: list[float] = []
        self.forget()

    def forget(self) -> None:
        """What the facts say is of the turns from here on."""
        self._seconds = self._host_seconds = 0.0
        for kept in (self._processor_seconds, self._exposed_seconds, self._optimizing):
            kept.clear()

    def turn(self) -> float:
        before = towpath.stats(self._model) if self._ours else None
        processor = time.process_time()
        seconds = timed(self._work)
        self._processor_seconds.append(time.process_time() - processor)
        self._seconds += seconds
        if before is not None:
            after = towpath.stats(self._model)
            self._host_seconds += after.seconds_host - before.seconds_host
            self._exposed_seconds.append(after.seconds_exposed - before.seconds_exposed)
        return seconds

    def facts(self) -> dict[str, Any]:
        """What this rank says of its turns: medians, for a first one also imports and makes what later ones have.
        `memory_bytes`: more than before the model was made. `optimizing`: of each turn, by this machine's clock."""
        found: dict[str, Any] = {
            "processor_seconds": median(self._processor_seconds),
            "memory_bytes": max(0, held_bytes() - self._bytes_before),
        }
        if self._optimizing:
            found["optimizing"] = list(self._optimizing)
        if not self._ours:
            return found
        return found | {
            "host_share": self._host_seconds / self._seconds,
            "exposed_seconds": median(self._exposed_seconds),
            "stats": str(towpath.stats(self._model)),
            "strategy": str(self._model.towpath_engine.strategy),
        }


def held_bytes() -> int:
    """Of this process: on a GPU the most that tensors have held, else its private memory; 0 where nobody tells."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    if not _STATUS.exists():
        return 0
    give_freed_memory_back()
    with _STATUS.open() as lines:
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def stepper(
    model: Any,
    context: Context,
    data: Any,
    micro_steps: int,
    optimized: Callable[[Span], None] = lambda span: None,
) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        for micro in range(micro_steps):
            with context(model, micro == micro_steps - 1):
                (model(*next(data)) / micro_steps).backward()
        began = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        optimized((began, time.perf_counter()))

    return step


def forward_and_backward(model: nn.Module, data: Any) -> Callable[[], None]:
    def step() -> None:
        model(*next(data)).backward()
        model.zero_grad()

    return step
