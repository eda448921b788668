"""A pipeline's optimizer steps in one process, with the messages and sums that its ranks would exchange.

Communication is the only thing left out. Stages, encoders of messages and the arithmetic of low rank are those of
`towpath`. tests/ranks/test_emulated_pipeline.py compares the steps with those of a pipeline on ranks.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import ceil
from typing import cast
from zlib import crc32

import torch
from torch import Tensor, nn

from benchmarks.suites.pipeline import COPIES, STAGES, Sizes, Stage, loss_of
from towpath.codecs.low_rank import first_factor, matmul_thin, orthonormal, with_unit_columns
from towpath.core.passes import encoded_gradients, one_forward_one_backward
from towpath.core.transport import LowRank
from towpath.pipeline import Compression
from towpath.pipeline.messages import Encoding, Sender


class Link:
    """The gradients that one copy of a stage sends to the stage before it.

    Those of the micro-batches in `exposed` are encoded. What a message loses is added to the next encoded one, unless
    the transport has no feedback.
    """

    def __init__(self, encoding: Encoding, exposed: frozenset[int], label: str) -> None:
        self.exposed, self.sender = exposed, Sender(encoding, torch.device("cpu"), label)
        self.error: Tensor | None = None  # what the last encoded message lost, as a matrix
        self.lost: list[float] | None = None  # by message, its error over its gradient, if messages are to be observed

    def sent(self, gradient: Tensor, micro_batch: int) -> Tensor:
        """Return the gradient of a micro-batch as it arrives: the same tensor, if nothing is done to it."""
        return self.arriving(gradient) if micro_batch in self.exposed else gradient

    def arriving(self, gradient: Tensor) -> Tensor:
        """Return what arrives of the gradient of an exposed micro-batch."""
        arrived = self.sender.encoding.decoded(self.sender.encoded(gradient))
        self.error = self.kept if self.kept is not None else (gradient - arrived).flatten(0, -2)
        if self.lost is not None:
            self.lost.append((self.error.norm() / gradient.norm()).item())
        return arrived

    @property
    def kept(self) -> Tensor | None:
        """The error that the sender adds to the next encoded message, or None without feedback."""
        _, *kept = self.sender.state
        return kept[0] if kept else None


class NextMicroBatchLink(Link):
    """A link whose errors go into the next micro-batch, encoded or not, as in the text of the paper."""

    def sent(self, gradient: Tensor, micro_batch: int) -> Tensor:
        """Return the gradient of a micro-batch as it arrives. One that is not encoded brings all that was lost."""
        assert self.kept is not None, "the link needs a transport with feedback"
        if micro_batch in self.exposed or not self.kept.any():
            return super().sent(gradient, micro_batch)
        arrived = gradient + self.kept.view_as(gradient)
        self.kept.zero_()
        return arrived


class DroppingLink(Link):
    """A link that sends zeros in place of exposed gradients. Nothing is rescaled."""

    def arriving(self, gradient: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(gradient)


def links(
    sizes: Sizes,
    compression: Compression,
    stages: int,
    copies: int,
    dtype: torch.dtype = torch.float32,
    kind: type[Link] = Link,
) -> dict[tuple[int, int], Link]:
    """Return the links of a pipeline with 1F1B by sending stage and copy. There are none without a codec."""
    shape = (sizes.batch, sizes.length, sizes.width)
    encoding = Encoding(shape, dtype, compression.activation_gradients)
    encoded = encoded_gradients(one_forward_one_backward(stages, sizes.micro_batches), compression)

    def made() -> Iterator[tuple[tuple[int, int], Link]]:
        for stage in range(1, stages):
            exposed = frozenset(micro_batch for source, micro_batch in encoded if source == stage)
            for copy in range(copies):
                yield (stage, copy), kind(encoding, exposed, f"gradients of stage {stage}, 0")

    return dict(made()) if encoding.used else {}


@dataclass
class _LowRankSum:
    """The state of one matrix that copies sum in low rank."""

    factor: Tensor
    errors: list[Tensor]


class EmulatedPipeline:
    """The optimizer steps of a pipeline with 1F1B and DDP stages, in one process.

    Micro-batches of a copy are computed together. Their gradients pass between stages one after the other, through the
    copy's `Link` of each stage, which is of the class `link`. Gradients are those of the pipeline up to the order of
    sums, and up to the random factors that low-rank sums of gradients start from.
    """

    def __init__(
        self,
        sizes: Sizes,
        compression: Compression,
        seed: int,
        stages: int = STAGES,
        copies: int = COPIES,
        dtype: torch.dtype = torch.float32,
        link: type[Link] = Link,
    ) -> None:
        assert not sizes.wait_seconds, "blocks that wait do not compute"
        self.sizes, self._compression, self._copies = sizes, compression, copies
        self._taken, self._encodes = 0, False
        self.stages = [Stage(sizes, index, seed, stages).to(dtype) for index in range(stages)]
        # Both ends compute with one table, and have gradients of their own.
        self._tied = self.stages[0].get_parameter("tokens.weight"), nn.Parameter(torch.empty(0))
        self._tied[1].data = self._tied[0].data
        cast("nn.Linear", self.stages[-1].head).weight = self._tied[1]
        self._links = links(sizes, compression, stages, copies, dtype, link)
        self._sums: dict[tuple[int, str], _LowRankSum] = {}

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, the tied one once."""
        return [p for stage in self.stages for p in stage.parameters() if p is not self._tied[1]]

    def observe(self) -> None:
        """Observe what the messages of later steps lose, until `losses` is called."""
        for link in self._links.values():
            link.lost = []

    def losses(self) -> dict[int, float]:
        """Return by sending stage the mean share that messages have lost since `observe`: error over gradient."""
        by_stage: defaultdict[int, list[float]] = defaultdict(list)
        for (stage, _), link in self._links.items():
            by_stage[stage] += link.lost or ()
            link.lost = None
        return {stage: statistics.mean(each) for stage, each in by_stage.items() if each}

    def _is_tied(self, parameter: nn.Parameter) -> bool:
        return any(parameter is each for each in self._tied)

    def step(self, ids: Tensor, targets: Tensor) -> float:
        """Set the gradients of a batch, which has the samples of each copy one after the other. Return the loss."""
        copies = list(zip(ids.chunk(self._copies), targets.chunk(self._copies), strict=True))
        now = self._compression.at(self._taken)
        self._encodes = not now.activation_gradients.served
        found = [self._backward(copy, *each) for copy, each in enumerate(copies)]
        divisor = self._copies * self.sizes.micro_batches
        encoding = now.gradients.low_rank
        for index, stage in enumerate(self.stages):
            encodes = encoding is not None and index < ceil(now.share_of_stages * len(self.stages))
            for name, parameter in stage.named_parameters():
                each = [gradients[index][name] for _, gradients in found]
                if encodes and parameter.ndim > 1 and not self._is_tied(parameter) and encoding.pays(parameter.shape):
                    summed = self._low_rank_sum((index, name), each, encoding, now.gradients.feedback != "none")
                else:
                    summed = torch.stack(each).sum(0)
                parameter.grad = summed.div_(divisor)
        self._sum_tied([gradients for _, gradients in found], divisor)
        self._taken += 1
        return statistics.mean(loss for loss, _ in found)

    def _sum_tied(self, found: list[list[dict[str, Tensor]]], divisor: int) -> None:
        """Sum the gradients of both ends: at once, or first those of each end. Only the order of sums differs."""
        first, last = self._tied
        if self._compression.fused_embeddings:
            ends = [each[0]["tokens.weight"] for each in found] + [each[-1]["head.weight"] for each in found]
            first.grad = reduce(torch.add, ends) / divisor
        else:
            assert first.grad is not None and last.grad is not None
            first.grad = first.grad + last.grad
        last.grad = None

    def _backward(self, copy: int, ids: Tensor, targets: Tensor) -> tuple[float, list[dict[str, Tensor]]]:
        """Return the loss of a copy, and by stage the sums of its micro-batches' gradients."""
        for parameter in (*self.parameters(), self._tied[1]):
            parameter.grad = None
        inputs, outputs = [ids], [self.stages[0](ids)]
        for stage in self.stages[1:]:
            inputs.append(outputs[-1].detach().requires_grad_())
            outputs.append(stage(inputs[-1]))
        loss = loss_of(outputs[-1], targets)
        (loss * self.sizes.micro_batches).backward()
        for stage in range(len(self.stages) - 1, 0, -1):
            outputs[stage - 1].backward(self._sent(stage, copy, inputs[stage]))
        gradients = [{name: cast("Tensor", p.grad) for name, p in stage.named_parameters()} for stage in self.stages]
        return loss.item(), gradients

    def _sent(self, stage: int, copy: int, inputs: Tensor) -> Tensor:
        """Return the gradients of a stage's inputs as the stage before it gets them."""
        assert inputs.grad is not None
        link = self._links.get((stage, copy))
        if link is None or not self._encodes:
            return inputs.grad
        gradients = inputs.grad.split(self.sizes.batch)
        return torch.cat([link.sent(each, micro_batch) for micro_batch, each in enumerate(gradients)])

    def _low_rank_sum(self, of: tuple[int, str], each: list[Tensor], codec: LowRank, feedback: bool) -> Tensor:
        """Return the sum of the copies' gradients as `LowRankSync` has it."""
        rows, columns = each[0].shape
        if of not in self._sums:
            seed = crc32(f"{of[1]} of stage {of[0]}".encode())
            factor = first_factor(columns, codec.rank, seed, each[0].dtype, each[0].device)
            self._sums[of] = _LowRankSum(factor, [torch.zeros(rows, columns, dtype=each[0].dtype) for _ in each])
        state = self._sums[of]
        x = [gradient + error for gradient, error in zip(each, state.errors, strict=True)]
        (basis,) = orthonormal(
            [torch.stack([matmul_thin(mine, state.factor) for mine in x]).sum(0)], state.factor.dtype
        )
        factors = [matmul_thin(mine.T, basis) for mine in x]
        if feedback:
            state.errors = [mine - basis @ factor.T for mine, factor in zip(x, factors, strict=True)]
        summed = torch.stack(factors).sum(0)
        state.factor = with_unit_columns(summed, state.factor)
        return basis @ summed.T

    @torch.no_grad()
    def evaluate(self, ids: Tensor, targets: Tensor) -> float:
        """Return the loss of samples."""
        x = ids
        for stage in self.stages:
            x = stage(x)
        return loss_of(x, targets).item()
