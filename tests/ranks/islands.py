"""What a run with outer steps must come to: all islands simulated in one process, parameter by parameter.

Nothing here knows about slices, fragments of memory or messages. Each island is a whole copy of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

import towpath
from tests.ranks.models import Entry
from tests.ranks.twin import Loss


class Islands:
    """Copies of a model, one for each island, that train as DiLoCo says.

    `fragments` has the names of the parameters of each fragment. `optimizer` makes the inner optimizer of a copy.
    """

    def __init__(
        self,
        model: nn.Module,
        outer: towpath.Outer,
        islands: int,
        fragments: Sequence[Sequence[str]],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    ) -> None:
        self.models = [copy.deepcopy(model) for _ in range(islands)]
        self.optimizers = [optimizer(each) for each in self.models]
        self.slow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.slow.items()}
        self._outer, self._fragments = outer, fragments
        self._under_way: dict[str, Tensor] = {}
        self._steps = 0

    def step(self, gradients: Callable[[int, nn.Module], None], skipped: Collection[int] = ()) -> None:
        """Train one step. `gradients` computes the mean gradients of one island. Those in `skipped` step nothing."""
        for island, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            gradients(island, model)
            if island not in skipped:
                optimizer.step()
            optimizer.zero_grad()
        self.count()

    @torch.no_grad()
    def count(self) -> None:
        """Do what follows the optimizer steps of all islands."""
        self._steps += 1
        every, delay, count = self._outer.every, self._outer.delay, len(self._fragments)
        for number, names in enumerate(self._fragments):
            first = (number + 1) * every // count
            if self._steps % every == first % every:
                for name in names:
                    moved = [self.slow[name] - dict(m.named_parameters())[name] for m in self.models]
                    self._under_way[name] = sum(moved[1:], moved[0]) / len(moved)
            if self._steps - delay > 0 and (self._steps - delay) % every == first % every:
                for name in names:
                    self._apply(name, self._under_way.pop(name))

    @torch.no_grad()
    def flush(self) -> None:
        """Apply what is under way now. `before_flush` keeps the weights of island 0."""
        self.before_flush = {name: p.detach().clone() for name, p in self.models[0].named_parameters()}
        for name, mean in self._under_way.items():
            self._apply(name, mean)
        self._under_way.clear()

    @torch.no_grad()
    def average(self) -> None:
        """Apply what is under way now, and let all islands hold their mean."""
        self.flush()
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            mean = torch.stack([p.detach() for p in parameters]).mean(0)
            for p in parameters:
                p.copy_(mean)

    def _apply(self, name: str, mean: Tensor) -> None:
        outer = self._outer
        self.momentum[name] = outer.momentum * self.momentum[name] + mean
        self.slow[name] -= outer.lr * (mean + outer.momentum * self.momentum[name])
        for model in self.models:
            p = dict(model.named_parameters())[name]
            p.copy_((1 - outer.blend) * self.slow[name] + outer.blend * p)


def fragments_of(model: towpath.ShardedModule, outer: towpath.Outer) -> list[list[str]]:
    """The names of the parameters of each fragment: every n-th of the units that train."""
    units = [
        [name for bucket in unit.trainable for place in bucket.layout.places for name in place.names[:1]]
        for unit in model.towpath_engine.units
        if unit.trainable
    ]
    return [[name for unit in units[number :: outer.fragments] for name in unit] for number in range(outer.fragments)]


def mean_gradients(entry: Entry, ranks: Sequence[int], step: int, dtype: torch.dtype) -> Callable[[nn.Module], None]:
    """A function that leaves the mean gradients of some ranks' batches in a model."""
    return mean_of(lambda model, rank, micro, step: entry.loss(model, *entry.micro_batch(rank, micro, step, dtype)))(
        ranks, step
    )


def mean_of(
    loss: Loss, micro_steps: int = 1, buffers: dict[int, list[Tensor]] | None = None
) -> Callable[[Sequence[int], int], Callable[[nn.Module], None]]:
    """For some ranks and a step: a function that leaves the mean gradients of their micro-batches in a model.

    `buffers` keeps the buffers of each rank, as one process has only those of one.
    """
    kept = {} if buffers is None else buffers

    def of(ranks: Sequence[int], step: int) -> Callable[[nn.Module], None]:
        def compute(model: nn.Module) -> None:
            for rank in ranks:
                kept.setdefault(rank, [b.clone() for b in model.buffers()])
            for rank in ranks:
                _copy(list(model.buffers()), kept[rank])
                for micro in range(micro_steps):
                    (loss(model, rank, micro, step) / (len(ranks) * micro_steps)).backward()
                _copy(kept[rank], list(model.buffers()))

        return compute

    return of


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
