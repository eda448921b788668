"""The forward and backward passes of an optimizer step: of one model, or of a pipeline's stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from towpath.engine.executor import engine_of
from towpath.observing import Interval, Stats, Sums, Trace, running_trace, stats, sums, traced
from towpath.topology.groups import Groups
from towpath.train.loss_scale import LossScale
from towpath.train.models.from_config import next_token_loss

if TYPE_CHECKING:
    from towpath.pipeline import Pipeline

Batch = tuple[Tensor, Tensor]  # inputs, targets
Clock = Callable[[str], AbstractContextManager[Any]]


class Passes(Protocol):
    """`model`: what has the parameters. `shares`: among so many the samples of a step are shared out; `share`: which of
    them this rank computes. `together`: of its micro-batches, how many an evaluation computes at once."""

    @property
    def model(self) -> Any: ...

    @property
    def shares(self) -> int: ...

    @property
    def share(self) -> int: ...

    def together(self, micro_steps: int) -> int: ...

    def step(self, batch: Callable[[int], Batch], micro_steps: int, on: Clock) -> Tensor:
        """Gradients of the micro-steps 0 to `micro_steps`, scaled as the loss; the mean loss, which is not.

        `on(clock)`: whose seconds it takes.
        """
        ...

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor: ...

    def clip(self, most: float) -> Tensor:
        """The global norm, above which gradients are scaled down; 0: they stay."""
        ...

    # What is seen of them: bytes of all ranks together, seconds of this one.

    def stats(self) -> Stats: ...

    def sums(self) -> Sums: ...

    def summed_up(self, done: Stats) -> Stats:
        """`done`, of this rank, with what others know of it. Every rank must call it."""
        ...

    def running_trace(self) -> Trace | None: ...

    def traced(self) -> AbstractContextManager[Trace]: ...

    def intervals(self, trace: Trace) -> dict[int, tuple[Interval, ...]]: ...


@dataclass
class OneModel:
    """Sharded over all ranks; or each part of it over those that have that part, where so many neighbours, `tensor`,
    share its layers. `groups`: of the whole job."""

    model: Any
    groups: Groups
    device: torch.device
    scale: LossScale
    tensor: int = 1
    # Around each forward pass that a backward pass follows.
    forward: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def shares(self) -> int:
        return self.groups.world // self.tensor

    @property
    def share(self) -> int:
        return self.groups.rank // self.tensor

    def together(self, micro_steps: int) -> int:
        return 1

    def step(self, batch: Callable[[int], Batch], micro_steps: int, on: Clock) -> Tensor:
        total = torch.zeros((), device=self.device)
        for micro_step in range(micro_steps):
            with on("data"):
                inputs, targets = batch(micro_step)
            with on("passes"), nullcontext() if micro_step == micro_steps - 1 else self.model.no_sync():
                with self.forward():
                    loss = next_token_loss(self.model, inputs, targets) / micro_steps
                self.scale.scaled(loss).backward()
            total += loss.detach()
        return total

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(self.model, inputs, targets)

    def clip(self, most: float) -> Tensor:
        parameters = list(self.model.parameters())
        if most > 0:
            return nn.utils.clip_grad_norm_(parameters, most)
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def stats(self) -> Stats:
        return stats(self.model).of_groups(self.tensor)

    def sums(self) -> Sums:
        return sums(self.model).of_groups(self.tensor)

    def summed_up(self, done: Stats) -> Stats:
        return done

    def running_trace(self) -> Trace | None:
        return running_trace(self.model)

    def traced(self) -> AbstractContextManager[Trace]:
        return traced([engine_of(self.model)], [self.groups])

    def intervals(self, trace: Trace) -> dict[int, tuple[Interval, ...]]:
        return dict(enumerate(self.groups.collect_objects(trace.intervals)))


@dataclass
class Stages:
    """A pipeline; each of its copies computes a share of the samples. `groups`: of the whole job. Its loss is scaled by
    `scale`."""

    model: Pipeline
    groups: Groups
    shares: int
    share: int
    scale: LossScale

    def together(self, micro_steps: int) -> int:
        return micro_steps

    def step(self, batch: Callable[[int], Batch], micro_steps: int, on: Clock) -> Tensor:
        with on("data"):
            pairs = [batch(micro_step) for micro_step in range(micro_steps)]
            inputs, targets = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
        with on("passes"):
            return self.scale.unscaled(self.model.step(inputs, target=targets))

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.scale.unscaled(self.model.evaluate(inputs, target=targets))

    def clip(self, most: float) -> Tensor:
        return self.model.clip_grad_norm_(most if most > 0 else float("inf"))

    def stats(self) -> Stats:
        return self.model.stats()

    def sums(self) -> Sums:
        return self.model.sums()

    def summed_up(self, done: Stats) -> Stats:
        return done

    def running_trace(self) -> Trace | None:
        return self.model.running_trace

    def traced(self) -> AbstractContextManager[Trace]:
        return self.model.tracing()

    def intervals(self, trace: Trace) -> dict[int, tuple[Interval, ...]]:
        return dict(enumerate(self.groups.collect_objects(trace.intervals)))
