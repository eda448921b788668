"""Pictures and tables of docs/concepts/systems/: the schedule of each system, and its bytes and memory.

The pictures are steps that the simulator replays: what the engine would do, at the times that `ethernet-10g` gives it.
The tables are `towpath.schedule` of a GPT of 2.5 billion parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from tools.docs.papers.settings import as_published
from towpath.cli.plots import draw_timelines, standalone_svg
from towpath.core import presets
from towpath.core.passes import Compression, compression
from towpath.core.placement import Placement
from towpath.core.schedule import Schedule
from towpath.core.schedule import schedule as derive_schedule
from towpath.core.strategy import Strategy, TransferKind
from towpath.observe.trace import Interval
from towpath.plan import tables
from towpath.plan.catalog import describe_model, load_cluster, model_shape
from towpath.plan.hardware import GIB
from towpath.plan.model import Transformer
from towpath.plan.pipelines import Layout, Pipelines
from towpath.plan.request import Request
from towpath.plan.solver import Batching, Solver
from towpath.topology.cluster import Extent, Topology

PAGES = Path(__file__).parents[2] / "docs" / "concepts" / "systems"
CLUSTER = load_cluster("ethernet-10g")
TOPOLOGY = CLUSTER.topology
COUNTED, LENGTH, MICRO_STEPS = "gpt-2.5b", 1024, 2
# Few blocks, so that each transfer can be seen.
DRAWN = Transformer(vocabulary=32_000, width=4_096, depth=6, heads=32, hidden=11_008, gated=True, biases=False)
DRAWN_LENGTH, DRAWN_BATCHING = 2_048, Batching(2, MICRO_STEPS)

# Eight nodes: four stages, each in two copies on nodes of their own, whose ranks share its layers (tensor parallelism).
PIPELINE_CLUSTER = load_cluster("ethernet-10g", nodes=8)
STAGES, TENSOR, MICRO_BATCHES = 4, 4, 8
PIPELINES = {
    "none, embeddings summed twice": Compression(fused_embeddings=False),
    "none": compression("none"),
    "optimus-cb": compression("optimus-cb"),
    "optimus-cb+fe": compression("optimus-cb+fe"),
    "optimus-cb+fe+sc": compression("optimus-cb+fe+sc"),
    "optimus-cc": compression("optimus-cc"),
}
DRAWN_PIPELINES = ("none", "optimus-cb+fe+sc")

# Placements that no preset names, by what they are called here.
_LINS = {
    "lins, P 1×1": Placement(Extent(1), Extent(1), Extent(4)),
    "lins, P 2×1": Placement(Extent(2), Extent(4), Extent(4, 4)),
}


@dataclass(frozen=True, slots=True)
class System:
    """A page, and the strategies that it compares."""

    page: str
    strategies: tuple[str, ...]


SYSTEMS = (
    System("zeropp", ("zero3", "qwz", "hpz", "qgz", "zero++")),
    System("mics", ("zero3", "mics")),
    System("paro", ("zero3", "paro-igg", "paro-iig", "paro-nig")),
    System("lins", ("mics", *_LINS)),
)
OPTIMUS = "optimus-cc"


def strategy(name: str, topology: Topology = TOPOLOGY) -> Strategy:
    return as_published(presets.strategy(_LINS.get(name, name), topology))


def picture(system: System | None = None) -> str:
    """Draw the steps of a system's strategies, or those of Optimus-CC's stages."""
    steps = list(_stages() if system is None else _steps(system.strategies))
    return standalone_svg(draw_timelines, steps, (10, 0.8 + 0.8 * len(steps)))


def _steps(names: Sequence[str]) -> Iterator[tuple[str, list[Interval]]]:
    model = DRAWN.model("drawn", DRAWN_LENGTH)
    solver = Solver(model, CLUSTER, Request(batch=1, memory=CLUSTER.memory))
    for name in names:
        yield name, solver.timeline(strategy(name), DRAWN_BATCHING).intervals


def _stages() -> Iterator[tuple[str, list[Interval]]]:
    """Each rank of a pipeline, without compression and with it."""
    pipelines = _pipelines(DRAWN, "drawn", DRAWN_LENGTH)
    for name in DRAWN_PIPELINES:
        layout = Layout(STAGES, compression=PIPELINES[name], tensor=TENSOR)
        for rank, timeline in enumerate(pipelines.replay(layout, Batching(1, MICRO_BATCHES)).ranks):
            yield f"{name}\nstage {rank}", timeline.intervals


def _pipelines(shape: Transformer, name: str, length: int) -> Pipelines:
    request = Request(batch=1, memory=PIPELINE_CLUSTER.memory)
    return Pipelines(lambda count: shape.staged(name, length, count), PIPELINE_CLUSTER, request)


# Tables ---------------------------------------------------------------------------------------------------------------


def table(system: System) -> str:
    lines = ["| strategy | P, G, OS | weights | gradients | new weights | GB out of a node | GiB of a rank |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name in system.strategies:
        made = _schedule(name)
        sent = [
            _gigabytes(made, *kinds)
            for kinds in (
                (TransferKind.GATHER, TransferKind.BACKWARD_GATHER),
                (TransferKind.REDUCE, TransferKind.GRAD_SYNC),
                (TransferKind.PARAM_SYNC,),
            )
        ]
        held = (sum(made.memory_bytes().values()) + _optimizer_bytes(made)) / GIB
        columns = [f"`{name}`" if name not in _LINS else name, tables.extents(made.strategy), *sent]
        lines.append(f"| {' | '.join(columns)} | {made.cable_bytes(0) / 1e9:.1f} | {held:.2f} |")
    return "\n".join(lines)


@cache
def _schedule(name: str) -> Schedule:
    units = tuple(unit.spec for unit in describe_model(COUNTED, LENGTH).units)
    return derive_schedule(strategy(name), units, MICRO_STEPS, Request(batch=1, memory=1).precision)


def _gigabytes(made: Schedule, *kinds: TransferKind) -> str:
    """Out of the first node, in a step."""
    sent = sum(transfer.cable_bytes(0) for transfer in made.transfers if transfer.kind in kinds)
    return f"{sent / 1e9:.1f}" if sent else "–"


def _optimizer_bytes(made: Schedule) -> int:
    """AdamW's two states in float32."""
    return sum(
        2 * 4 * bucket.numel // bucket.optimizer.count
        for plan in made.plans
        for bucket in plan.buckets
        if bucket.spec.trainable
    )


def pipeline_table() -> str:
    pipelines = _pipelines(*model_shape(COUNTED, LENGTH))
    lines = ["| compression | GB out of a node | GiB of the rank that needs most |", "|---|---|---|"]
    for name, packed in PIPELINES.items():
        found = pipelines.predict(Layout(STAGES, compression=packed, tensor=TENSOR), Batching(1, MICRO_BATCHES))
        sent = found.inter_bytes / PIPELINE_CLUSTER.topology.nodes / 1e9
        lines.append(f"| {name} | {sent:.3f} | {found.peak_bytes / GIB:.2f} |")
    return "\n".join(lines)


TABLES = {system.page: partial(table, system) for system in SYSTEMS} | {OPTIMUS: pipeline_table}
PICTURES = {PAGES / f"{system.page}.svg": partial(picture, system) for system in SYSTEMS} | {
    PAGES / f"{OPTIMUS}.svg": picture
}
