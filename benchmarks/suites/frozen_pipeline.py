"""The gradients of a pipeline whose weights do not change: exact ones, and what each variant of its messages changes.

Only messages of exposed micro-batches differ from the exact ones, and the first micro-batch that takes what was lost.
So only these are computed for each variant. tests/ranks/test_emulated_pipeline.py compares the sums with the gradients
of an emulated pipeline.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.gpt import Block
from benchmarks.suites.emulated_pipeline import Link, NextMicroBatchLink, links
from benchmarks.suites.pipeline import Sizes, Stage, loss_of
from towpath.pipeline import Compression

# Copies are computed together up to so many sequences, which bounds the memory.
_TOGETHER = 96

WEIGHTS, BIASES, LAST_BIAS, EMBEDDINGS = "weights", "other biases", "bias before the cut", "embeddings"


def last_matrix(stage: Stage) -> str:
    """Return the name of the last matrix before the cut. Its outputs are added to what the stage sends."""
    return f"blocks.{len(stage.blocks) - 1}.mlp.2.weight"


def group_of(name: str, stage: Stage) -> str:
    """Return the group of a parameter. The last bias before a cut sums the message itself, without any pairing."""
    if name in ("tokens.weight", "positions"):
        return EMBEDDINGS
    if name == last_matrix(stage).replace("weight", "bias"):
        return LAST_BIAS
    return BIASES if name.endswith("bias") else WEIGHTS


@dataclass
class Pairing:
    """Sums of ε ⊗ Y for one sender: errors of messages, and inputs of the last matrix before the cut.

    `lost` pairs an error with the inputs of its own micro-batch, `delivered` with those of the message that it is added
    to. The gradient of that matrix is wrong by their difference, Σ ε ⊗ ΔY (eq. 14 of the paper), as far as this cut is
    concerned.
    """

    lost: Any = 0.0
    delivered: Any = 0.0
    _before: dict[int, Tensor] = field(default_factory=dict)

    def add(self, copy: int, error: Tensor, inputs: Tensor) -> None:
        """Add the message of a copy with its error, both as matrices with a row per token."""
        if copy in self._before:
            self.delivered = self.delivered + self._before[copy].T @ inputs
        self.lost = self.lost + error.T @ inputs
        self._before[copy] = error.clone()

    def restart(self) -> None:
        """Begin sums anew. Errors that are under way stay."""
        self.lost, self.delivered = 0.0, 0.0


class FrozenPipeline:
    """The changes by variants of messages in the gradients of all stages but the last, which has exact ones.

    `variants` has the compression of each, and the class of its links. The errors of those in `paired` are paired with
    activations.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        sizes: Sizes,
        copies: int,
        variants: Mapping[str, tuple[Compression, type[Link]]],
        paired: Sequence[str] = (),
    ) -> None:
        self.stages, self.sizes, self.copies = stages, sizes, copies
        dtype = next(stages[0].parameters()).dtype
        self._links = {
            name: links(sizes, compression, len(stages), copies, dtype, kind)
            for name, (compression, kind) in variants.items()
        }
        every = [link for found in self._links.values() for link in found.values()]
        first = {0} if any(isinstance(link, NextMicroBatchLink) for link in every) else set[int]()
        self._micro_batches = sorted(first.union(*(link.exposed for link in every)))
        # By variant and sending stage.
        self.pairings = {(name, stage): Pairing() for name in paired for stage in range(1, len(stages))}
        self._inputs: dict[int, Tensor] = {}  # by stage, those of its last matrix in the current micro-batch

    @contextmanager
    def _keeping_inputs(self) -> Generator[None]:
        """Keep the inputs of the last matrix of each stage inside the block."""

        def keep(index: int, _: nn.Module, given: tuple[Tensor, ...]) -> None:
            self._inputs[index] = given[0].detach()

        handles = [
            cast("Block", stage.blocks[-1]).mlp[2].register_forward_pre_hook(partial(keep, index))
            for index, stage in enumerate(self.stages[:-1])
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def exposed(self, stage: int) -> int:
        """Return how many messages to a stage are exposed in each step and copy."""
        name = next(iter(self._links))
        return len(self._links[name][stage + 1, 0].exposed)

    def observe(self) -> None:
        """Begin the sums of pairings, and the shares that messages lose, anew."""
        for pairing in self.pairings.values():
            pairing.restart()
        for found in self._links.values():
            for link in found.values():
                link.lost = []

    def losses(self) -> dict[str, dict[int, float]]:
        """Return by variant and sending stage the mean error of messages over their gradient."""
        found: dict[str, dict[int, float]] = {}
        for name, each in self._links.items():
            by_stage: defaultdict[int, list[float]] = defaultdict(list)
            for (stage, _), link in each.items():
                by_stage[stage] += link.lost or ()
            found[name] = {stage: sum(lost) / len(lost) for stage, lost in by_stage.items() if lost}
        return found

    def exact(self, ids: Tensor, targets: Tensor) -> list[list[Tensor]]:
        """Return the exact gradients of the mean loss, by stage."""
        wanted = [list(stage.parameters()) for stage in self.stages[:-1]]
        flat = [parameter for each in wanted for parameter in each]
        sums = [torch.zeros_like(parameter) for parameter in flat]
        for part, aims in zip(ids.split(_TOGETHER), targets.split(_TOGETHER), strict=True):
            x = part
            for stage in self.stages:
                x = stage(x)
            loss = loss_of(x, aims) * (len(part) / len(ids))
            for total, gradient in zip(sums, torch.autograd.grad(loss, flat), strict=True):
                total += gradient
        found = iter(sums)
        return [[next(found) for _ in each] for each in wanted]

    def differences(self, ids: Tensor, targets: Tensor) -> dict[str, list[list[Tensor]]]:
        """Return by variant and stage what the gradients of a step differ by. Samples are those of copy after copy."""
        shape = (self.copies, self.sizes.micro_batches, self.sizes.batch, self.sizes.length)
        ids, targets = ids.reshape(shape), targets.reshape(shape)
        found = {
            name: [[torch.zeros_like(p) for p in stage.parameters()] for stage in self.stages[:-1]]
            for name in self._links
        }
        together = torch.arange(self.copies).split(max(1, _TOGETHER // self.sizes.batch))
        with self._keeping_inputs():
            for copies, micro_batch in product(together, self._micro_batches):
                given = (each[copies, micro_batch].flatten(0, 1) for each in (ids, targets))
                self._add(copies.tolist(), micro_batch, *given, found)
        divisor = self.copies * self.sizes.micro_batches
        return {name: [[each / divisor for each in stage] for stage in stages] for name, stages in found.items()}

    def _add(
        self,
        copies: Sequence[int],
        micro_batch: int,
        ids: Tensor,
        targets: Tensor,
        found: dict[str, list[list[Tensor]]],
    ) -> None:
        """Add the differences of one micro-batch of some copies."""
        inputs, outputs = [ids], [self.stages[0](ids)]
        for stage in self.stages[1:]:
            inputs.append(outputs[-1].detach().requires_grad_())
            outputs.append(stage(inputs[-1]))
        (exact,) = torch.autograd.grad(loss_of(outputs[-1], targets) * len(copies), inputs[-1])
        arrived = dict.fromkeys(self._links, exact)
        for stage in range(len(self.stages) - 1, 0, -1):
            output, before = outputs[stage - 1], inputs[stage - 1]
            wanted = [*self.stages[stage - 1].parameters(), *([before] if stage > 1 else [])]
            # A backward pass is linear, so that of a difference gives the differences.
            changed: dict[str, Tensor] = {}
            for name, gradient in arrived.items():
                sent = self._sent(name, stage, copies, micro_batch, gradient)
                if sent is exact:
                    continue
                found_here = torch.autograd.grad(output, wanted, sent - exact, retain_graph=True)
                for total, difference in zip(found[name][stage - 1], found_here, strict=False):
                    total += difference
                changed[name] = found_here[-1]
            if stage > 1:
                (exact,) = torch.autograd.grad(output, before, exact)
                arrived = {name: exact + changed[name] if name in changed else exact for name in arrived}

    def _sent(self, name: str, stage: int, copies: Sequence[int], micro_batch: int, gradient: Tensor) -> Tensor:
        """Return the messages of some copies as they arrive: the same tensor, if nothing is done to them."""
        parts = gradient.split(self.sizes.batch)
        each = [self._links[name][stage, copy] for copy in copies]
        sent = [link.sent(part, micro_batch) for link, part in zip(each, parts, strict=True)]
        pairing = self.pairings.get((name, stage))
        if pairing is not None and micro_batch in each[0].exposed:
            inputs = self._inputs[stage - 1].split(self.sizes.batch)
            for copy, link, given in zip(copies, each, inputs, strict=True):
                assert link.error is not None
                pairing.add(copy, link.error, given.flatten(0, 1))
        return gradient if all(a is b for a, b in zip(parts, sent, strict=True)) else torch.cat(sent)


@dataclass
class Moments:
    """A vector of each step: its sums over the two halves of the steps, and its mean square norm."""

    halves: list[Any] = field(default_factory=lambda: [0.0, 0.0])
    square: float = 0.0
    steps: int = 0

    def add(self, vector: Tensor, second: bool) -> None:
        """Add the vector of a step of the first or the second half."""
        self.halves[second] = self.halves[second] + vector
        self.square += vector.square().sum().item()
        self.steps += 1

    @property
    def spread(self) -> float:
        """How far the vector of a step is from the mean of all, relative to the vector."""
        around = self.square - sum(self.halves).square().sum().item() / self.steps
        return math.sqrt(around / (self.steps - 1) * self.steps / self.square)

    def over(self, exact: Moments) -> dict[str, float]:
        """Return the noise and the bias of these differences, relative to the exact gradients.

        `noise` is the norm in a step, and `bias` that of the mean. `bias of halves` is without chance: the root of the
        product of the means of both halves, which is 0 in expectation if the mean is 0.
        """
        whole, of_exact = sum(self.halves), sum(exact.halves)
        product, of_halves = ((each[0] * each[1]).sum().item() for each in (self.halves, exact.halves))
        return {
            "noise": math.sqrt(self.square / exact.square),
            "bias": (whole.norm() / of_exact.norm()).item(),
            "bias of halves": math.sqrt(max(0.0, product) / abs(of_halves)),
        }


def grouped(gradients: Sequence[Tensor], stage: Stage) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of each group of a stage's parameters as one vector."""
    found: defaultdict[str, list[Tensor]] = defaultdict(list)
    for (name, _), gradient in zip(stage.named_parameters(), gradients, strict=True):
        found[group_of(name, stage)].append(gradient.flatten())
    for group, each in found.items():
        yield group, torch.cat(each)
