"""Measure pipelines against PyTorch's own with DDP stages, and what each part of Optimus-CC's compression wins.

    pipeline [CASE …] [--rounds 6] [--quick] [--resume]

Four stages of a GPT run on two ranks each, and each rank is a node, as where tensor parallelism fills a node. So the
messages between stages and the sums of gradients use the links between nodes. A sample is one optimizer step with 1F1B
in fp32.

Cases with a link rate compare the pipeline without compression to compressed backpropagation (cb), fused embedding
synchronization (fe), selective stage compression (sc), and compression of all stages (sc-all). A pipeline on unshaped
links shows the share of the step that communication takes. Blocks wait, because eight ranks on two cores would wait for
each other. Cases `peer-…` compare with torch.distributed.pipelining and DDP stages, whose blocks compute and wait.
`large-embeddings-…` has fe alone, where the tied matrix is most of the model. Cases `coder…` measure what encoding and
decoding a message takes, over the transfer that it saves.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import towpath
from benchmarks import gpt
from benchmarks.harness import figures
from benchmarks.harness.candidates import LabPlace, Launch, timed
from benchmarks.harness.comparison import compare, started
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.workload import Wait, Waiting
from towpath.core.passes import SCHEDULES, messages
from towpath.core.strategy import TransferKind
from towpath.core.transport import LowRank, Transport
from towpath.pipeline import Compression, Pipeline
from towpath.pipeline.messages import Encoding, Sender

# Workers --------------------------------------------------------------------------------------------------------------

TOPOLOGY = towpath.Topology(8, 1)
STAGES, COPIES = 4, 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model and the schedule of a pipeline.

    A micro-batch has `batch` sequences of `length` tokens. A block waits `wait_seconds` in the forward pass and twice
    as long in the backward pass. `rank` is that of messages between stages, and `gradient_rank` that of the gradients
    of stages.
    """

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
    computes: bool = True  # otherwise it only waits
    schedule: str = "1F1B"
    strategy: str = "ddp"

    def quick(self) -> Sizes:
        """Return small sizes."""
        return replace(self, width=48, vocabulary=256, length=16, micro_batches=4, wait_seconds=0.001, rank=4)


class ComputingAndWaiting(gpt.Block):
    """A block that computes and then waits."""

    wait_seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output after `wait_seconds`."""
        return Wait.apply(super().forward(x), self.wait_seconds)


class Stage(nn.Module):
    """One of `count` stages: its blocks, with the embedding in the first and the head in the last."""

    def __init__(self, sizes: Sizes, index: int, seed: int = 0, count: int = STAGES) -> None:
        super().__init__()
        torch.manual_seed((count + 1) * seed + index)
        each = sizes.blocks // count
        self.blocks = nn.ModuleList(gpt.Block(sizes.width, sizes.heads) for _ in range(each))
        for block in self.blocks if sizes.wait_seconds else ():
            block.__class__ = ComputingAndWaiting if sizes.computes else Waiting
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
        """Return the activations of the stage, or the logits of the last one."""
        if self.tokens is not None:
            x = self.tokens(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of next tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def mesh_of_nodes() -> DeviceMesh:
    """Return a mesh in which every copy of every stage has a node of its own."""
    return init_device_mesh("cpu", (STAGES, COPIES), mesh_dim_names=("pp", "dp"))


def compression_of(name: str, sizes: Sizes) -> Compression:
    """Return the compression of a candidate: parts, such as "cb+fe", and after commas what is different.

    These may be "message rank 4", "gradient rank 4", "0.5 of stages", "every message" (also those that computation
    hides) and "no feedback" (of messages and of stages).
    """
    parts, *changes = name.split(", ")
    for change in changes:
        match change.split():
            case ["message", "rank", rank]:
                sizes = replace(sizes, rank=int(rank))
            case ["gradient", "rank", rank]:
                sizes = replace(sizes, gradient_rank=int(rank))
    words = set(parts.split("+"))
    propagated = Transport(codec=f"low-rank:{sizes.rank}", feedback="first")  # as in Optimus-CC
    found = Compression(
        activation_gradients=propagated if "cb" in words else "none",
        gradients=f"low-rank:{sizes.gradient_rank}" if {"sc", "sc-all"} & words else "none",
        share_of_stages=1.0 if "sc-all" in words else 0.75,
        fused_embeddings="fe" in words,
    )
    for change in changes:
        match change.split():
            case [share, "of", "stages"]:
                found = replace(found, share_of_stages=float(share))
            case ["every", "message"]:
                found = replace(found, every_gradient=True)
            case ["no", "feedback"]:
                without = (replace(t, feedback="none") for t in (found.activation_gradients, found.gradients))
                found = replace(found, **dict(zip(("activation_gradients", "gradients"), without, strict=True)))
    return found


class Piped:
    """A worker whose sample is one optimizer step of a pipeline."""

    def __init__(self, rank: int, world: int, candidate: str, sizes: Sizes) -> None:
        mesh = mesh_of_nodes()
        made = _torchs(mesh, sizes) if candidate.startswith("torch") else _ours(mesh, candidate, sizes)
        self._parameters, self._step, self._pipeline = made
        self._data = _data(mesh["dp"].get_local_rank(), sizes)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-3, fused=True)

    def sample(self) -> float:
        """Take a step and return its seconds."""
        return timed(self._work)

    def _work(self) -> None:
        self._step(*next(self._data))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def inter_bytes(self) -> int:
        """Return the scheduled bytes between nodes, of all ranks."""
        return self._pipeline.schedule(TOPOLOGY).inter_bytes

    def facts(self) -> dict[str, Any]:
        """Return the scheduled bytes of the busiest node."""
        schedule = self._pipeline.schedule(TOPOLOGY)
        cable = max(schedule.cable_bytes(node) for node in range(TOPOLOGY.nodes))
        return {"cable bytes": cable, "bytes by part": bytes_by_part(self._pipeline)}


def bytes_by_part(made: Pipeline) -> dict[str, int]:
    """Return the scheduled bytes between nodes of all ranks, by part of a step. Every rank must call it.

    Exposed gradients are part of those between stages.
    """
    exposed = {(each.source, each.micro_batch) for each in messages(made.order) if each.exposed}
    found = dict.fromkeys(("activations", "gradients between stages", "exposed"), 0)
    sums = 0
    for each in made.schedule(TOPOLOGY).transfers:
        if each.kind is TransferKind.ACTIVATION:
            found["activations"] += each.inter_bytes
        elif each.kind is TransferKind.ACTIVATION_GRADIENT:
            found["gradients between stages"] += each.inter_bytes
            if (each.payload.stage, each.micro_step) in exposed:
                found["exposed"] += each.inter_bytes
        else:
            sums += each.inter_bytes
    of_stages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_stages, sum(made.stage_schedule(index).inter_bytes for index in made.modules))
    found["gradients of stages"] = sum(of_stages) // COPIES  # every copy of a stage has told them
    return found | {"tied embeddings": sums - found["gradients of stages"]}


# The parameters, a function that takes one step, and the pipeline if it is ours.
Made = tuple[list[nn.Parameter], Callable[[Tensor, Tensor], Any], Pipeline | None]


def _ours(mesh: DeviceMesh, candidate: str, sizes: Sizes) -> Made:
    count = STAGES * SCHEDULES[sizes.schedule]
    made = Pipeline(
        [partial(Stage, sizes, index, count=count) for index in range(count)],
        sizes.strategy,
        mesh=mesh,
        schedule=sizes.schedule,
        micro_batches=sizes.micro_batches,
        loss=loss_of,
        example=torch.zeros(sizes.batch, sizes.length, dtype=torch.int64),
        compression=compression_of(candidate, sizes),
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


# Cases ----------------------------------------------------------------------------------------------------------------

BASELINE, UNSHAPED, PEER = "uncompressed", "uncompressed, unshaped", "torch, DDP stages"
PARTS = ("cb", "cb+fe", "cb+fe+sc", "cb+fe+sc-all")
WARM_UP = 3
# By case, least speed-ups: those that the paper reports of its model of 8.3 billion parameters, and the one that the
# quality of `quality_pipeline` is to be had at.
LEAST = {"100mbit": {"cb+fe": 1.135, "cb+fe+sc": 1.449}, "optimus-50mbit": {"cb+fe": 1.1}}
UNTIED = Sizes(tied=False)
SIZES = Sizes(vocabulary=1024, batch=8, length=128, micro_batches=4, wait_seconds=0.02, computes=False)

# The setting at which both the speed and the quality of Optimus-CC are measured (`quality_pipeline`). The fewer the
# micro-batches, the more cb gains, and the larger the share of gradients that it encodes, here a third. The simulator
# predicts 1.15 for cb+fe at 50 mbit.
OPTIMUS = Sizes(
    width=128,
    blocks=4,
    vocabulary=1024,
    batch=16,
    length=64,
    micro_batches=6,
    wait_seconds=0.02,
    rank=32,
    gradient_rank=16,
    computes=False,
)
EVERY_MESSAGE, NAIVE = "cb, every message", "cb+fe+sc-all, every message, no feedback"
OPTIMUS_PARTS = ("cb", EVERY_MESSAGE, "cb+fe", "cb+fe+sc", NAIVE)
# Selective compression against another rank in all stages (Fig. 13 of the paper).
SHARES = tuple(f"cb+fe+sc, {share} of stages" for share in (0.25, 0.5))
RANKS = tuple(f"cb+fe+sc-all, gradient rank {rank}" for rank in (4, 16, 48))
# The tied matrix has 2.1 million parameters, and all blocks together have 0.8 million.
LARGE_EMBEDDINGS = replace(OPTIMUS, vocabulary=16384, batch=2)


@dataclass(frozen=True, slots=True)
class CompressedCase:
    """The parts of the compression on links of a rate."""

    inter: str
    sizes: Sizes = SIZES
    parts: tuple[str, ...] = PARTS
    called: str = ""

    @property
    def name(self) -> str:
        """The name of the case, or the link rate."""
        return self.called or self.inter

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the parts with the uncompressed pipeline."""
        sizes = self.sizes.quick() if settings.quick else self.sizes
        cluster = LabPlace(TOPOLOGY, self.inter)
        launches = {name: Launch(cluster, Piped, (name, sizes), WARM_UP) for name in (BASELINE, *self.parts)}
        launches[UNSHAPED] = Launch(LabPlace(TOPOLOGY), Piped, (BASELINE, sizes), WARM_UP)
        with started(launches, settings.say) as made:
            found = compare(made, settings.rounds, settings.say)
            facts = {name: one.ask("facts")[0] for name, one in made.items()}
        headlines = LEAST.get(self.name, {})
        return {
            "checks": [
                figures.speedup(found.seconds, f"{part}: times as fast", part, BASELINE, headlines.get(part))
                for part in self.parts
            ],
            "share of communication": round(1 - figures.ratio(found.seconds, UNSHAPED, BASELINE).found, 4),
            "facts": facts,
            **found.recorded(),
        }


@dataclass(frozen=True, slots=True)
class PeerCase:
    """Our pipeline against PyTorch's, untied, because PyTorch's stages cannot tie embeddings."""

    inter: str | None
    sizes: Sizes = UNTIED
    most: float = 1.03

    @property
    def name(self) -> str:
        """The name of the case."""
        return f"peer-{self.inter or 'unshaped'}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the two pipelines."""
        sizes = self.sizes.quick() if settings.quick else self.sizes
        cluster = LabPlace(TOPOLOGY, self.inter)
        launches = {name: Launch(cluster, Piped, (name, sizes), WARM_UP) for name in (BASELINE, PEER)}
        with started(launches, settings.say) as made:
            found = compare(made, settings.rounds, settings.say)
        return {"checks": [figures.ratio(found.seconds, BASELINE, PEER, self.most)], **found.recorded()}


@dataclass(frozen=True, slots=True)
class CoderCase:
    """The time to encode and decode a message in one thread, over the transfer that this saves."""

    rank: int
    sizes: Sizes = SIZES
    bits: float = 200e6  # per second, of the link
    most: float = 0.1

    @property
    def name(self) -> str:
        """The name of the case."""
        return f"coder, rank {self.rank}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Encode and decode messages."""
        sizes = self.sizes.quick() if settings.quick else self.sizes
        shape = (sizes.batch, sizes.length, sizes.width)
        transport = Transport(codec=f"low-rank:{self.rank}", feedback="first")
        encoding = Encoding(shape, torch.float32, transport)
        torch.set_num_threads(1)
        sender, x = Sender(encoding, torch.device("cpu"), "a message"), torch.randn(shape)
        taken: list[float] = []
        for _ in range(5 * settings.rounds):
            began = time.perf_counter()
            encoding.decoded(sender.encoded(x))
            taken.append(time.perf_counter() - began)
        codec = LowRank(self.rank)
        saved = 32 * (prod(shape) - codec.encoded_elements(shape)) / self.bits
        share = statistics.median(taken) / saved
        return {
            "checks": [Check("compress and decompress: share of the transfer saved", share, self.most)],
            "seconds": [round(s, 7) for s in taken],
            "saved_seconds": round(saved, 6),
            "kept bytes": 4 * sum(transport.kept_for_message(shape)),
            "message bytes": 4 * prod(shape),
        }


CASES: list[CompressedCase | PeerCase | CoderCase] = [
    *(CoderCase(rank) for rank in (4, 8, 16)),
    *(CompressedCase(inter) for inter in ("50mbit", "100mbit", "200mbit", "500mbit")),
    *(PeerCase(inter) for inter in (None, "200mbit", "50mbit")),
    *(CompressedCase(inter, OPTIMUS, OPTIMUS_PARTS, f"optimus-{inter}") for inter in ("50mbit", "20mbit")),
    CompressedCase("50mbit", OPTIMUS, (*SHARES, "cb+fe+sc", *RANKS), "optimus-ranks-50mbit"),
    CompressedCase("100mbit", LARGE_EMBEDDINGS, ("fe",), "large-embeddings-100mbit"),
]

SUITES = (Suite("pipeline", __doc__ or "", CASES),)
