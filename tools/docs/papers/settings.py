"""The settings of the papers: models, clusters and systems, and the simulated step of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

from tools.docs.papers.peers import Program
from towpath.core import presets
from towpath.core.formats import Precision
from towpath.core.placement import Placement
from towpath.core.strategy import WITH_TRANSPORT, Strategy
from towpath.core.units import BucketSpec, UnitSpec
from towpath.plan.catalog import load_cluster, named_models
from towpath.plan.hardware import GIB, Cluster
from towpath.plan.model import Model, ModelUnit, Transformer
from towpath.plan.replay import in_our_order
from towpath.plan.request import BF16, Request
from towpath.plan.solver import Batching, Solver
from towpath.topology.cluster import Extent

BLOCKS, MATRICES = "blocks", "matrices"
_AFTER_ATTENTION = 3  # of a block's matrices, the one that takes what attention gives
# Parameters and gradients in 16 bits, also where gradients are summed up: the papers' 2 Ψ, 2 Ψ and 12 Ψ.
HALF = Precision("bfloat16", "bfloat16", None)
# Of the V100, as ZeRO++ counts it, and of the A100 and A800, in FLOP/s.
V100_PEAK, A100_PEAK = 120e12, 312e12

SHAPES: dict[str, Transformer] = {name: shape for name, (shape, _) in named_models().items()} | {
    # MiCS prints the size only. This has it, and the form of its other models.
    "bert-100b": Transformer(32008, 10240, 80, 80, 4 * 10240, positions=512),
    # The paper's 128 layers for Megatron-LM-3D.
    "bert-10b-128": Transformer(32008, 2560, 128, 40, 4 * 2560, positions=512),
}


@lru_cache(maxsize=64)
def model_of(name: str, length: int, units: str) -> Model:
    """Return a model whose units are blocks, as in Towpath, or single matrices, as in the papers' systems."""
    shape = SHAPES[name]
    whole = shape.model(name, length)
    if units == BLOCKS:
        return whole
    found = [whole.units[0]]
    for block in range(shape.depth):
        for i, matrix in enumerate(shape.matrices):
            spec = UnitSpec(f"{block}.{i}", (BucketSpec((prod(matrix),)),))
            scores = shape.attention_flops(length) if i == _AFTER_ATTENTION else 0
            found.append(ModelUnit(spec, 2.0 * prod(matrix) + scores, 0, 0))
    return Model(name, length, tuple(found))


@dataclass(frozen=True)
class Setting:
    """A run of a paper: one model on one cluster."""

    model: str
    length: int
    cluster: Cluster
    micro_batch: int = 1
    micro_steps: int = 1
    checkpointing: bool = False

    @property
    def batching(self) -> Batching:
        return Batching(self.micro_batch, self.micro_steps, self.checkpointing)

    def solver(self, units: str, precision: Precision = BF16) -> Solver:
        batch = self.micro_batch * self.micro_steps * self.cluster.topology.world
        model = model_of(self.model, self.length, units)
        return Solver(model, self.cluster, Request(batch=batch, memory=1 << 60, precision=precision))

    def tflops(self, seconds: float) -> float:
        """Return the FLOP/s of one rank in 10¹². Recomputed blocks count, as in Megatron's formula."""
        model = model_of(self.model, self.length, BLOCKS)
        passes = 4 / 3 if self.checkpointing else 1.0
        return model.flops * passes * self.length * self.micro_batch * self.micro_steps / seconds / 1e12


def as_published(made: Strategy) -> Strategy:
    """Return the strategy with flat routes over NCCL, too, where Towpath's presets take columns and rows."""
    return replace(made, **{k.value: replace(made.transport(k), nccl_route=None) for k in WITH_TRANSPORT})


@dataclass(frozen=True)
class System:
    """A strategy as one of the papers ran it."""

    preset: str | Placement
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def strategy(self, cluster: Cluster) -> Strategy:
        return as_published(presets.strategy(self.preset, cluster.topology, **self.options))

    def seconds(self, setting: Setting, program: Program | None = None) -> float:
        """Return the seconds of a step in the order of a program, or of Towpath, which overlaps everything."""
        strategy = self.strategy(setting.cluster)
        # What holds all parameters gathers none: its gradients go in buckets, whatever the modules are.
        solver = setting.solver(BLOCKS if strategy.placement.params.size == 1 else MATRICES)
        return solver.predict(strategy, setting.batching, program.steps if program else in_our_order).seconds

    def gib(self, setting: Setting) -> float:
        """Return the GiB that a rank needs at most, with gradients summed in 16 or in 32 bits: what needs less."""
        strategy = self.strategy(setting.cluster)
        needed = (
            setting.solver(BLOCKS, precision).predict_memory(strategy, setting.batching) for precision in (BF16, HALF)
        )
        # Towpath keeps no 16-bit shards where it casts masters for each gather. The papers' systems do.
        shards = 2 * model_of(setting.model, setting.length, BLOCKS).parameters / strategy.placement.params.size
        return min(sum(memory.values()) + (0 if memory["params"] else shards) for memory in needed) / GIB


ZERO1, ZERO2, ZERO3 = System("zero1"), System("zero2"), System("zero3")
# ZeRO++, and its part that encodes nothing.
ZEROPP, ZEROPP_PLAIN = System("zero++"), System("hpz")


def mics(*group: int) -> System:
    return System("mics", {"group": Extent(*group), "route": "hierarchical"})


def lins(params: int) -> System:
    """Return a placement of Table III of Lins, whose optimizer states are sharded over a node."""
    return System(Placement(Extent(params), Extent(params), Extent(8)), {"route": "flat"})


# What `python -m tools.docs.papers` changes about all clusters: arguments of `_changed`.
CHANGE: dict[str, float] = {}


def cluster(name: str, nodes: int, gigabytes: float | None = None) -> Cluster:
    """Return a shipped cluster with so many nodes, and perhaps another rate between them."""
    found = load_cluster(name).on(nodes)
    return _changed(found if gigabytes is None else found.at_rate(gigabytes * 1e9), **CHANGE)


def _changed(
    found: Cluster,
    latency: float | None = None,
    latency_inside: float | None = None,
    rate: float | None = None,
    reached: float | None = None,
) -> Cluster:
    hardware = found.hardware
    inter, intra = hardware.inter, hardware.intra
    if latency is not None:
        inter = replace(inter, latency=latency * 1e-6)
    if latency_inside is not None:
        intra = replace(intra, latency=latency_inside * 1e-6)
    if rate is not None:
        inter = replace(inter, rate=rate * 1e9)
    share = found.reached if reached is None else reached
    return replace(found, hardware=replace(hardware, inter=inter, intra=intra), reached=share)


# Lins's placements (Table III), and the group of MiCS. In the text of the paper that we have, the last cell of the
# table is cut off for 30B.
LINS = {
    "llama-7b": (lins(1), System("mics", {"group": Extent(8)})),
    "llama-13b": (lins(4), System("mics", {"group": Extent(8)})),
    "llama-30b": (lins(8), System("mics", {"group": Extent(8, 2)})),
}


def lins_setting(name: str, nodes: int = 128) -> Setting:
    """Return a run of Lins: a step has 1,024 sequences of 4,096 tokens, one at a time."""
    return Setting(name, 4096, cluster("a800-4hdr", nodes), 1, 128 // nodes, checkpointing=name == "llama-30b")


def mics_setting(model: str, nodes: int, name: str = "p3dn") -> Setting:
    """Return a run of MiCS: a step has 8,192 sequences of 512 tokens, eight at a time on each rank."""
    return Setting(model, 512, cluster(name, nodes), 8, 8192 // (8 * 8 * nodes), checkpointing=True)


def zeropp_setting(model: str, tokens: int, adapters: int, nodes: int) -> Setting:
    """Return a run of ZeRO++: one micro-step of so many tokens. An adapter has 85 % of 100 Gbit/s."""
    return Setting(model, tokens, cluster("dgx-2", nodes, 10.625 * adapters), checkpointing=True)


def paro_setting(model: str, nodes: int) -> Setting:
    """Return a run of PaRO: ten micro-steps of four sequences of 512 tokens. It measured 56 GB/s between nodes."""
    here = cluster("dgx-a100-800g", nodes, 56)
    return Setting(model, 512, here, 4, 10, checkpointing=model == "llama-65b")
