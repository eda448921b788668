"""Workers of benchmarks/pipeline.py: a GPT in stages, by Towpath's pipeline or by PyTorch's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import towpath
from towpath.bench import gpt
from towpath.bench.harness.worker import timed
from towpath.bench.workload import Touch, Wait, Waiting
from towpath.core.pipeline import SCHEDULES
from towpath.pipeline import Compression, Pipeline, pipeline

TOPOLOGY = towpath.Topology(8, 1)
STAGES, COPIES = 4, 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """`batch` sequences of `length` tokens are a micro-batch. `wait_seconds`: of each block's forward pass; its
    backward pass waits twice as long, and where it `halves` half of that for the gradients of its weights. `rank`: of
    messages between stages; `gradient_rank`: of stages' gradients. `at_once`: of a schedule that computes the weights'
    gradients later, all are computed with the inputs'."""

    width: int = 256
    blocks: int = 8
    heads: int = 4
    vocabulary: int = 2048
    batch: int = 2
    length: int = 64
    micro_batches: int = 8
    wait_seconds: float = 0.01
    rank: int = 8
    gradient_rank: int = 16
    tied: bool = True
    computes: bool = True  # or only waits
    halves: bool = False
    schedule: str = "1F1B"
    strategy: str = "ddp"
    at_once: bool = False

    def quick(self) -> Sizes:
        return replace(self, width=48, vocabulary=256, length=16, micro_batches=4, wait_seconds=0.001, rank=4)


class ComputingToo(gpt.Block):
    """Before it waits."""

    wait_seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return Wait.apply(super().forward(x), self.wait_seconds)


class Halved(gpt.Block):
    """Waits as long for the gradients of its weights as for those of its inputs, and for either by itself."""

    wait_seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.parameters()
        first = WaitBack.apply(first, self.wait_seconds)
        return Touch.apply(WaitBack.apply(Wait.apply(x, self.wait_seconds, 0.0), self.wait_seconds), first, *others)


class WaitBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Stage(nn.Module):
    """One of `count`: its blocks of the model, with what comes before and after them."""

    def __init__(self, sizes: Sizes, index: int, seed: int = 0, count: int = STAGES) -> None:
        super().__init__()
        torch.manual_seed((count + 1) * seed + index)
        each = sizes.blocks // count
        self.blocks = nn.ModuleList(gpt.Block(sizes.width, sizes.heads) for _ in range(each))
        for block in self.blocks if sizes.wait_seconds else ():
            block.__class__ = Halved if sizes.halves else ComputingToo if sizes.computes else Waiting
            block.wait_seconds = sizes.wait_seconds
        torch.manual_seed((count + 1) * seed + count)  # the same at both ends
        table = nn.Parameter(torch.randn(sizes.vocabulary, sizes.width) * 0.02)
        self.tokens: nn.Embedding | None = None
        self.head: nn.Module | None = None
        if index == 0:
            self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
            self.tokens.weight = table
            self.positions = nn.Parameter(torch.randn(sizes.length, sizes.width) * 0.02)
        if index == count - 1:
            self.norm = nn.LayerNorm(sizes.width)
            self.head = gpt.Linear(sizes.width, sizes.vocabulary, bias=False)
            self.head.weight = table

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def mesh_of_nodes() -> DeviceMesh:
    """Every copy of every stage has a node of its own."""
    return init_device_mesh("cpu", (STAGES, COPIES), mesh_dim_names=("pp", "dp"))


def compression_of(name: str, sizes: Sizes) -> Compression:
    parts = name.split("+")
    return Compression(
        activation_gradients=f"low-rank:{sizes.rank}" if "cb" in parts else "none",
        gradients=f"low-rank:{sizes.gradient_rank}" if {"sc", "sc-all"} & set(parts) else "none",
        share_of_stages=1.0 if "sc-all" in parts else 0.75,
        fused_embeddings="fe" in parts,
    )


class Piped:
    """A turn is one optimizer step."""

    def __init__(self, rank: int, world: int, contestant: str, sizes: Sizes) -> None:
        mesh = mesh_of_nodes()
        made = _torchs(mesh, sizes) if contestant.startswith("torch") else _ours(mesh, contestant, sizes)
        self._parameters, self._step, self._pipeline = made
        self._data = _data(mesh["dp"].get_local_rank(), sizes)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-3, fused=True)

    def turn(self) -> float:
        return timed(self._work)

    def _work(self) -> None:
        self._step(*next(self._data))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def inter_bytes(self) -> int:
        """Scheduled, of all ranks."""
        return self._pipeline.schedule(TOPOLOGY).inter_bytes

    def facts(self) -> dict[str, Any]:
        schedule = self._pipeline.schedule(TOPOLOGY)
        return {"cable bytes": max(schedule.cable_bytes(node) for node in range(TOPOLOGY.nodes))}


# What trains, one step of it, and the pipeline, if it is ours.
Made = tuple[list[nn.Parameter], Callable[[Tensor, Tensor], Any], Pipeline | None]


def _ours(mesh: DeviceMesh, contestant: str, sizes: Sizes) -> Made:
    if sizes.at_once:
        pipeline.can_be_halved = lambda engines: False
    count = STAGES * SCHEDULES[sizes.schedule]
    made = Pipeline(
        [partial(Stage, sizes, index, count=count) for index in range(count)],
        sizes.strategy,
        mesh=mesh,
        schedule=sizes.schedule,
        micro_batches=sizes.micro_batches,
        loss=loss_of,
        example=torch.zeros(sizes.batch, sizes.length, dtype=torch.int64),
        compression=compression_of(contestant, sizes),
        tied=("tokens", "head") if sizes.tied else ("", ""),
    )
    return list(made.parameters()), lambda ids, targets: made.step(ids, target=targets), made


def _torchs(mesh: DeviceMesh, sizes: Sizes) -> Made:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.parallel import DistributedDataParallel

    index, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    module = DistributedDataParallel(
        Stage(sizes, index), process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True
    )
    hidden = torch.empty(sizes.batch, sizes.length, sizes.width, device="meta", requires_grad=True)
    logits = torch.empty(sizes.batch, sizes.length, sizes.vocabulary, device="meta", requires_grad=True)
    ids = torch.empty(sizes.batch, sizes.length, dtype=torch.int64, device="meta")
    stage = PipelineStage(
        module,
        index,
        STAGES,
        torch.device("cpu"),
        input_args=(ids if index == 0 else hidden,),
        output_args=(logits if index == STAGES - 1 else hidden,),
        group=group,
    )
    schedule = Schedule1F1B(stage, sizes.micro_batches, loss_fn=loss_of)

    def step(ids: Tensor, targets: Tensor) -> None:
        losses: list[Tensor] = []
        schedule.step(*((ids,) if index == 0 else ()), target=targets if index == STAGES - 1 else None, losses=losses)

    return list(module.parameters()), step, None


def _data(copy: int, sizes: Sizes) -> Iterator[tuple[Tensor, Tensor]]:
    return gpt.batches(copy, sizes.batch * sizes.micro_batches, sizes.length)
