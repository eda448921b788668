"""The settings of the papers: models, clusters and systems, and the simulated step of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

from towpath.core import presets
from towpath.core.formats import Precision
from towpath.core.placement import Placement
from towpath.core.strategy import WITH_TRANSPORT, Strategy
from towpath.core.units import BucketSpec, UnitSpec
from towpath.plan.catalog import load_cluster, named_models
from towpath.plan.hardware import GIB, Cluster
from towpath.plan.model import Model, ModelUnit, Transformer
from towpath.plan.request import BF16, Request
from towpath.plan.solver import Batching, Prediction, Solver
from towpath.topology.cluster import Extent

BLOCKS, MATRICES = "blocks", "matrices"
_AFTER_ATTENTION = 3  # of a block's matrices, the one that takes what attention gives
# Parameters and gradients in 16 bits, also where gradients are summed up: the papers' 2 Ψ, 2 Ψ and 12 Ψ.
HALF = Precision("bfloat16", "bfloat16", None)
# Of the V100, as ZeRO++ counts it, and of the A100 and A800, in FLOP/s.
V100_PEAK, A100_PEAK = 120e12, 312e12

SHAPES: dict[str, Transformer] = {name: shape for name, (shape, _) in named_models().items()} | {
    # MiCS prints sizes only. These have them, and the form of its other models.
    "bert-52b": Transformer(32008, 8192, 64, 64, 4 * 8192, positions=512),
    "bert-100b": Transformer(32008, 10240, 80, 80, 4 * 10240, positions=512),
    # The paper's 128 layers for Megatron-LM-3D.
    "bert-10b-128": Transformer(32008, 2560, 128, 40, 4 * 2560, positions=512),
    # Fig. 11b: wider layers.
    "bert-10b-wide": Transformer(32008, 2560, 80, 40, 8 * 2560, positions=512),
    "gpt-175b": Transformer(51200, 12288, 96, 96, 4 * 12288, positions=2048),
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

    def step(self, setting: Setting, units: str = MATRICES) -> Prediction:
        strategy = self.strategy(setting.cluster)
        # What holds all parameters gathers none: its gradients go in buckets, whatever the modules are.
        units = BLOCKS if strategy.placement.params.size == 1 else units
        return setting.solver(units).predict(strategy, setting.batching)

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


def cluster(name: str, nodes: int, gigabytes: float | None = None, reached: float | None = None) -> Cluster:
    """Return a shipped cluster with so many nodes, and perhaps another rate between them or of matrix products."""
    found = load_cluster(name).on(nodes)
    if gigabytes is not None:
        hardware = found.hardware
        found = replace(found, hardware=replace(hardware, inter=replace(hardware.inter, rate=gigabytes * 1e9)))
    return found if reached is None else replace(found, reached=reached)
