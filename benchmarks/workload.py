"""The work of candidates: a GPT of about 17 million parameters, its data, and variants that wait or compute nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import towpath
from benchmarks import gpt, recording
from towpath.plan.cluster_probe import device_of_job

WIDTH, TINY = 384, 48
DEPTH, HEADS, LONGEST, VOCABULARY = 9, 6, 256, 2048
BATCH, LENGTH, SHORT = 4, 128, 16
SQUARE = towpath.Topology(2, 2)
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Workload:
    """One optimizer step of the model.

    Attributes:
        topology: Nodes and ranks per node.
        micro_steps: Forward and backward passes of a step.
        dtype: The dtype of computation and of messages. Master weights are fp32.
        batch: Sequences per rank and micro-step.
        length: Tokens per sequence.
        width: Width of the model.
        depth: Blocks of the model.
        wait_seconds: How long each block sleeps in the forward pass instead of computing. The backward pass sleeps
            twice as long, and replays recorded gradients. This leaves the cores to communication and codecs, as a GPU
            does.
        in_step: All ranks wait for each other before each micro-step. Ranks that share cores and exchange nothing in a
            micro-step otherwise drift apart.
        adapters: The rank of PEFT's LoRA adapters of each block's matrices, which then train alone. 0 trains
            everything.
        learning_rate: The learning rate of AdamW.
        seed: The seed of the model's first values.
    """

    topology: towpath.Topology = SQUARE
    micro_steps: int = 1
    dtype: str = "float32"
    batch: int = BATCH
    length: int = LENGTH
    width: int = WIDTH
    depth: int = DEPTH
    wait_seconds: float | None = None
    in_step: bool = False
    adapters: int = 0
    learning_rate: float = LEARNING_RATE
    seed: int = 0

    def quick(self) -> Workload:
        """Return a small workload that runs the same code."""
        return replace(self, width=TINY, depth=2, batch=1, length=SHORT, micro_steps=min(self.micro_steps, 2))

    def model(self) -> gpt.GPT:
        """Return the model on the rank's device, with the same values on every rank."""
        torch.manual_seed(self.seed)
        context = max(LONGEST, self.length)
        made = gpt.GPT(width=self.width, depth=self.depth, heads=HEADS, context=context, vocabulary=VOCABULARY)
        if self.adapters:
            _add_adapters(made, self.adapters)
        made.to(device_of_job())
        if self.wait_seconds is not None:
            own, *of_blocks = recording.replayed(self, made)
            made.__class__, made.gradients = ReplayingGPT, own
            for block, gradients in zip(made.blocks, of_blocks, strict=True):
                block.__class__ = Replaying
                block = cast(Replaying, block)
                block.wait_seconds, block.gradients = self.wait_seconds, gradients
        return made

    def silent_model(self) -> gpt.GPT:
        """Return a model that computes nothing, with the same parameters, all of them used and with a gradient."""
        made = self.model()
        made.__class__ = SilentGPT
        for block in made.blocks:
            block.__class__ = SilentBlock
        return made

    def data(self, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rank's batches without end."""
        device = device_of_job()
        for inputs, targets in gpt.batches(rank, self.batch, self.length):
            if self.in_step:
                dist.barrier()
            yield inputs.to(device), targets.to(device)

    @property
    def precision(self) -> towpath.Precision:
        """The mixed precision of our strategies."""
        narrow = self.dtype != "float32"
        return towpath.Precision(params=self.torch_dtype, reduce=self.torch_dtype) if narrow else towpath.Precision()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return getattr(torch, self.dtype)

    @property
    def computes_narrow(self) -> bool:
        """Whether matrices are multiplied in a 16-bit dtype, for which a CPU needs instructions."""
        return self.dtype != "float32" and not (gpt.WIDENED and device_of_job().type == "cpu")


def _add_adapters(model: gpt.GPT, rank: int) -> None:
    """Freeze the matrices of the blocks, and add an adapter to each."""
    import peft

    made: Any = peft.LoraConfig(r=rank, target_modules=["qkv", "out", "mlp.0", "mlp.2"])
    peft.inject_adapter_in_model(made, model)


PLAIN = Workload()


class Wait(torch.autograd.Function):
    """An identity that sleeps in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, backward: float | None = None) -> Tensor:
        """Sleep for `seconds`. The backward pass sleeps for `backward`, by default twice as long."""
        time.sleep(seconds)
        ctx.seconds = 2 * seconds if backward is None else backward
        return x.clone()  # FSDP2 would warn of a view

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None, None]:
        """Sleep, and pass the gradient on."""
        time.sleep(ctx.seconds)
        return grad, None, None


class Touch(torch.autograd.Function):
    """An identity with zero gradients for parameters that computed nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        """Return `x`, and note the shapes of the parameters."""
        ctx.like = [(p.shape, p.dtype) for p in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of `x`, and zeros."""
        return grad, *(torch.zeros(shape, dtype=dtype, device=grad.device) for shape, dtype in ctx.like)


class SilentBlock(gpt.Block):
    """A block that computes nothing and uses all of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return Touch.apply(x, *_parameters(recording.slots_of(self)))


class Waiting(SilentBlock):
    """A block that sleeps instead of computing, with gradients of zeros. Pipelines have them, whose messages matter."""

    wait_seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` after `wait_seconds`."""
        return Wait.apply(super().forward(x), self.wait_seconds)


class Replay(torch.autograd.Function):
    """An identity with recorded gradients for parameters that computed nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: recording.Replayed, *parameters: nn.Parameter) -> Tensor:
        """Return `x`, and note the dtypes of the parameters."""
        ctx.gradients, ctx.dtypes = gradients, [p.dtype for p in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of `x`, and those that were recorded."""
        return grad, None, *ctx.gradients.next(ctx.dtypes, grad)


class Replaying(gpt.Block):
    """A block that sleeps instead of computing, and has the gradients of one that computed."""

    wait_seconds = 0.0
    gradients: recording.Replayed

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` after `wait_seconds`."""
        x = Replay.apply(x, self.gradients, *_parameters(recording.slots_of(self)))
        return Wait.apply(x, self.wait_seconds)


class ReplayingGPT(gpt.GPT):
    """A GPT whose embedding and head compute, and whose own parameters have recorded gradients."""

    gradients: recording.Replayed

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return a loss."""
        own = _parameters(recording.owners(self)[0])
        tokens, positions, weight, bias = (parameter.detach() for parameter in own)
        x = F.embedding(ids, tokens) + positions[: ids.shape[1]]
        x = Replay.apply(x, self.gradients, *own)
        for block in self.blocks:
            x = block(x)
        x = gpt.widened(F.layer_norm(x, weight.shape, weight, bias, self.norm.eps))
        return F.cross_entropy(F.linear(x, gpt.widened(tokens)).flatten(0, 1).float(), targets.flatten())


def _parameters(slots: recording.Slots) -> list[nn.Parameter]:
    """Return parameters as their modules read them."""
    return [getattr(module, name) for module, name in slots]


class SilentGPT(gpt.GPT):
    """A GPT that computes nothing and uses all of its parameters."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return a loss of zero."""
        own = (self.tokens.weight, self.positions, *self.norm.parameters())  # the head shares the tokens' weight
        x = torch.zeros(1, 1, dtype=self.positions.dtype, device=self.positions.device, requires_grad=True)
        x = Touch.apply(x, *own)
        for block in self.blocks:
            x = block(x)
        return x.sum()
