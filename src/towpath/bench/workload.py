"""What contestants train: a GPT of about 17 million parameters, on what, how often."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import towpath
from towpath.auto.probe import device_of_job
from towpath.bench import gpt

WIDTH, TINY = 384, 48
DEPTH, HEADS, LONGEST, VOCABULARY = 9, 6, 256, 2048
BATCH, LENGTH, SHORT = 4, 128, 16
SQUARE = towpath.Topology(2, 2)


@dataclass(frozen=True, slots=True)
class Workload:
    """One optimizer step. `dtype`: what travels and computes; the masters are fp32.

    `wait_seconds`: so long each block waits instead of computing, and twice as long before its gradients, as for a
    device that takes nothing from the cores that the network's work and the codecs need.
    `in_step`: before each micro-step all ranks wait for each other. Ranks that share processors, and exchange nothing
    in a micro-step, else drift apart: what the first of them sends then waits for the last.
    `adapters`: the rank of PEFT's LoRA beside each block's matrices; they alone train. 0: all trains.
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

    def quick(self) -> Workload:
        """As little as goes through the same code."""
        return replace(self, width=TINY, depth=2, batch=1, length=SHORT, micro_steps=min(self.micro_steps, 2))

    def model(self) -> gpt.GPT:
        """The same values on every rank, on the rank's device."""
        torch.manual_seed(0)
        context = max(LONGEST, self.length)
        made = gpt.GPT(width=self.width, depth=self.depth, heads=HEADS, context=context, vocabulary=VOCABULARY)
        if self.adapters:
            _adapt(made, self.adapters)
        made.to(device_of_job())
        if self.wait_seconds is not None:
            for block in made.blocks:
                block.__class__ = Waiting
                cast(Waiting, block).wait_seconds = self.wait_seconds
        return made

    def silent_model(self) -> gpt.GPT:
        """The same parameters, each used and each with a gradient, and nothing computed."""
        made = self.model()
        made.__class__ = SilentGPT
        for block in made.blocks:
            block.__class__ = SilentBlock
        return made

    def data(self, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        device = device_of_job()
        for inputs, targets in gpt.batches(rank, self.batch, self.length):
            if self.in_step:
                dist.barrier()
            yield inputs.to(device), targets.to(device)

    @property
    def precision(self) -> towpath.Precision:
        """Of ours."""
        narrow = self.dtype != "float32"
        return towpath.Precision(params=self.torch_dtype, reduce=self.torch_dtype) if narrow else towpath.Precision()

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def computes_narrow(self) -> bool:
        """Whether matrices are multiplied in a `dtype` that is not fp32: a CPU has to have instructions for it."""
        return self.dtype != "float32" and not (gpt.WIDENED and device_of_job().type == "cpu")


def _adapt(model: gpt.GPT, rank: int) -> None:
    """In place: the block's matrices are frozen, with an adapter beside each."""
    import peft

    made: Any = peft.LoraConfig(r=rank, target_modules=["qkv", "out", "mlp.0", "mlp.2"])
    peft.inject_adapter_in_model(made, model)


PLAIN = Workload()


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, backward: float | None = None) -> Tensor:
        """`backward`: seconds of that pass, else twice as many."""
        time.sleep(seconds)
        ctx.seconds = 2 * seconds if backward is None else backward
        return x.clone()  # of a view FSDP2 would warn

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None


class Touch(torch.autograd.Function):
    """Passes `x` on, and has gradients for the parameters that nobody computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.like = [(p.shape, p.dtype) for p in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, *(torch.zeros(shape, dtype=dtype, device=grad.device) for shape, dtype in ctx.like)


class SilentBlock(gpt.Block):
    def forward(self, x: Tensor) -> Tensor:
        # As a module reads them: what `parameters()` has may be a slice.
        own = [getattr(module, name) for module in self.modules() for name, _ in module.named_parameters(recurse=False)]
        return Touch.apply(x, *own)


class Waiting(SilentBlock):
    wait_seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return Wait.apply(super().forward(x), self.wait_seconds)


class SilentGPT(gpt.GPT):
    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        own = (self.tokens.weight, self.positions, *self.norm.parameters())  # the head's is the tokens'
        x = torch.zeros(1, 1, dtype=self.positions.dtype, device=self.positions.device, requires_grad=True)
        x = Touch.apply(x, *own)
        for block in self.blocks:
            x = block(x)
        return x.sum()
