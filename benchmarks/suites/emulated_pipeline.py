"""A pipeline's optimizer steps in one process, with the messages and sums that its ranks would exchange.

Communication is the only thing left out. Stages, encoders of messages and the arithmetic of low rank are those of
`towpath`. tests/ranks/test_low_rank.py compares the steps with those of a pipeline on ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import ceil
from typing import cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.suites.pipeline import COPIES, STAGES, Sizes, Stage, loss_of
from towpath.codecs.low_rank import first_factor, matmul_thin, orthonormal, with_unit_columns
from towpath.core.passes import encoded_gradients, one_forward_one_backward
from towpath.core.transport import LowRank
from towpath.pipeline import Compression
from towpath.pipeline.messages import Encoding, Sender


@dataclass(frozen=True, slots=True)
class Observed:
    """The error of one encoded message of a copy, and its relation to the activations (eq. 14 of the paper).

    `lost` is the norm of the error over that of the gradient. `cosine` is that of the error and the difference of the
    activations of this micro-batch and the next one. The means are over the root mean squares.
    """

    stage: int
    micro_batch: int
    lost: float
    cosine: float | None
    mean_of_error: float
    mean_of_difference: float | None


@dataclass
class _LowRankSum:
    """The state of one matrix that copies sum in low rank."""

    factor: Tensor
    errors: list[Tensor]


class EmulatedPipeline:
    """The optimizer steps of a pipeline with 1F1B and DDP stages, in one process.

    Micro-batches of a copy are computed together. Their gradients pass between stages one after the other, through the
    copy's `Sender` of each stage. Gradients are those of the pipeline up to the order of sums, and up to the random
    factors that low-rank sums of gradients start from.
    """

    def __init__(
        self,
        sizes: Sizes,
        compression: Compression,
        seed: int,
        stages: int = STAGES,
        copies: int = COPIES,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        assert not sizes.wait_seconds, "blocks that wait do not compute"
        self._sizes, self._compression, self._copies = sizes, compression, copies
        self._taken, self._encodes = 0, False
        self.stages = [Stage(sizes, index, seed, stages).to(dtype) for index in range(stages)]
        # Both ends compute with one table, and have gradients of their own.
        self._tied = self.stages[0].get_parameter("tokens.weight"), nn.Parameter(torch.empty(0))
        self._tied[1].data = self._tied[0].data
        cast("nn.Linear", self.stages[-1].head).weight = self._tied[1]
        self._encoded = encoded_gradients(one_forward_one_backward(stages, sizes.micro_batches), compression)
        shape, transport = (sizes.batch, sizes.length, sizes.width), compression.activation_gradients
        encoding = Encoding(shape, dtype, transport)
        self._senders = {
            (stage, copy): Sender(encoding, torch.device("cpu"), f"gradients of stage {stage}, 0")
            for stage in range(1, stages)
            for copy in range(copies if encoding.used else 0)
        }
        self._sums: dict[tuple[int, str], _LowRankSum] = {}
        self.observed: list[Observed] | None = None  # a list, if messages are to be observed

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, the tied one once."""
        return [p for stage in self.stages for p in stage.parameters() if p is not self._tied[1]]

    def _is_tied(self, parameter: nn.Parameter) -> bool:
        return any(parameter is each for each in self._tied)

    def step(self, ids: Tensor, targets: Tensor) -> float:
        """Set the gradients of a batch, which has the samples of each copy one after the other. Return the loss."""
        copies = list(zip(ids.chunk(self._copies), targets.chunk(self._copies), strict=True))
        now = self._compression.at(self._taken)
        self._encodes = not now.activation_gradients.served
        found = [self._backward(copy, *each) for copy, each in enumerate(copies)]
        divisor = self._copies * self._sizes.micro_batches
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
        (loss * self._sizes.micro_batches).backward()
        for stage in range(len(self.stages) - 1, 0, -1):
            outputs[stage - 1].backward(self._sent(stage, copy, inputs[stage]))
        gradients = [{name: cast("Tensor", p.grad) for name, p in stage.named_parameters()} for stage in self.stages]
        return loss.item(), gradients

    def _sent(self, stage: int, copy: int, inputs: Tensor) -> Tensor:
        """Return the gradients of a stage's inputs as the stage before it gets them."""
        assert inputs.grad is not None
        sender = self._senders.get((stage, copy))
        if sender is None or not self._encodes:
            return inputs.grad
        gradients, activations = (list(t.split(self._sizes.batch)) for t in (inputs.grad, inputs.detach()))
        for each, gradient in enumerate(gradients):
            if (stage, each) in self._encoded:
                before = sender.state[1] if len(sender.state) > 1 else torch.zeros(())
                given = gradient.view(-1, gradient.shape[-1]) + before
                gradients[each] = sender.encoding.decoded(sender.encoded(gradient))
                if self.observed is not None:
                    error = given - gradients[each].view_as(given)
                    self.observed.append(_observed(stage, each, error, gradient, activations[each : each + 2]))
        return torch.cat(gradients)

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


def _observed(stage: int, micro_batch: int, error: Tensor, gradient: Tensor, activations: Sequence[Tensor]) -> Observed:
    """Observe a message. `activations` are those of its micro-batch and of the next one, if the step has one."""

    def relative_mean(x: Tensor) -> float:
        return (x.mean() / x.square().mean().sqrt()).item()

    lost = (error.norm() / gradient.norm()).item()
    if len(activations) < 2:
        return Observed(stage, micro_batch, lost, None, relative_mean(error), None)
    difference = activations[0] - activations[1]
    cosine = F.cosine_similarity(error.flatten(), difference.flatten(), 0).item()
    return Observed(stage, micro_batch, lost, cosine, relative_mean(error), relative_mean(difference))
