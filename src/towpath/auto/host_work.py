"""What a training step takes of the processor beside arithmetic: the engine's bookkeeping, and the optimizer's.

Models that hardly compute are trained, bare and sharded; what counts is seconds of the processor, without any waiting.
Between any two parameters the processor's caches are filled with something else, as a product of matrices fills them.
Where a device computes by itself, the host goes on meanwhile, and nothing of this is measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from towpath.core import presets
from towpath.core.formats import Precision
from towpath.engine.build import build
from towpath.engine.hooks import attach
from towpath.engine.layout import lay_out
from towpath.planner.profile import HOST_PARTS, HOST_SHAPES, HostShape, Point, host_name
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups

_ELEMENTS = 16  # of a parameter
_CACHED_BYTES = 1 << 21  # that a processor keeps near


class _FillCaches(torch.autograd.Function):
    """Passes its input on, and works on `memory`, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Tensor) -> Tensor:
        memory.add_(1.0)
        ctx.memory = memory
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.memory.add_(1.0)
        return grads[0], None


class _Unit(nn.Module):
    def __init__(self, parameters: int, memory: Tensor) -> None:
        super().__init__()
        self.memory = [memory]  # no buffer: it is nobody's values
        self.factors = nn.ParameterList(nn.Parameter(torch.ones(_ELEMENTS)) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = _FillCaches.apply(x, self.memory[0]) * factor
        return x


@dataclass(frozen=True, slots=True)
class _Kind:
    """`groups`: over which it is sharded, if it is."""

    name: str
    strategy: str = ""
    groups: Groups | None = None


def measured(groups: Groups, warm: int, repeats: int) -> list[Point]:
    """Every rank must call it. Of so many steps, behind some that make buffers."""
    alone = Groups(groups.of(tuple((rank,) for rank in range(groups.world)), "one rank alone"))
    kinds = [_Kind("bare"), _Kind("sharded", "ddp", alone), _Kind("over all ranks", "zero3", groups)]
    return [point for kind in kinds for shape in HOST_SHAPES for point in _points(kind, shape, warm, repeats)]


def _points(kind: _Kind, shape: HostShape, warm: int, repeats: int) -> Iterator[Point]:
    taken = list(zip(*_steps(kind, shape, warm, repeats), strict=True))
    for part, seconds in zip(HOST_PARTS, taken, strict=True):
        yield Point(host_name(kind.name, part, shape), shape.units, (median(seconds),))


def _steps(kind: _Kind, shape: HostShape, warm: int, repeats: int) -> list[Sequence[float]]:
    """Processor seconds of each part of a step."""
    memory = torch.zeros(_CACHED_BYTES // 4)
    model: Any = nn.Sequential(*(_Unit(shape.parameters, memory) for _ in range(shape.units)))
    if kind.groups is not None:
        strategy = presets.strategy(kind.strategy, Topology(kind.groups.world, 1))
        attach(model, build(model, strategy, Precision(), None, lay_out(model, [_Unit]), kind.groups))
    optimizer, x = torch.optim.AdamW(model.parameters(), fused=True), torch.ones(_ELEMENTS)

    def step() -> Sequence[float]:
        marks = [time.process_time()]
        loss = model(x).sum()
        marks.append(time.process_time())
        loss.backward()
        marks.append(time.process_time())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.process_time())
        return [after - before for before, after in pairwise(marks)]

    return [step() for _ in range(warm + repeats)][warm:]
