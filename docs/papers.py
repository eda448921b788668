"""Tables of docs/concepts/papers*.md: what the papers measured, and what the simulator predicts for the same runs.

`python -m docs.generate` writes them; the slow ones take a minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, log2, prod
from typing import Any

from towpath.core import presets
from towpath.core.pipeline import Compression
from towpath.core.pipeline import compression as named_compression
from towpath.core.placement import Placement, legal_placements
from towpath.core.routes import Grid, Op
from towpath.core.strategy import MoveShape, TransferKind, move_shapes
from towpath.core.transport import Transport
from towpath.core.units import BucketSpec, UnitSpec
from towpath.pipeline.schedules import walks
from towpath.planner.catalog import MODELS, load_cluster
from towpath.planner.cluster import Cluster
from towpath.planner.model import Model, ModelUnit, activation_bytes
from towpath.planner.pipelines import Layout, Pipelines
from towpath.planner.request import BF16, Request
from towpath.planner.solver import Batching, Prediction, Solver
from towpath.sim.hardware import Hardware, TransferShape, phase_costs, seconds_alone
from towpath.topology.cluster import Extent

BLOCKS, MATRICES = "blocks", "matrices"
_AFTER_ATTENTION = 3  # of a block's matrices, the one that takes what attention gives
NEAR = 0.15  # what the papers' figures are to be met within


@lru_cache(maxsize=64)
def model_of(name: str, length: int, units: str) -> Model:
    """Return a model whose units are blocks, as in Towpath, or single matrices, as in the papers' systems."""
    shape, _ = MODELS[name]
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


@dataclass(frozen=True)
class System:
    """A strategy as one of the papers ran it."""

    preset: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def step(self, setting: Setting, units: str) -> Prediction:
        strategy = presets.strategy(self.preset, setting.cluster.topology, **self.options)
        # What holds all parameters gathers none: its gradients go in buckets, whatever the modules are.
        units = BLOCKS if strategy.placement.params.size == 1 else units
        model = model_of(setting.model, setting.length, units)
        batch = setting.micro_batch * setting.micro_steps * setting.cluster.topology.world
        solver = Solver(model, setting.cluster, Request(batch=batch, memory=1 << 60))
        return solver.predict(strategy, Batching(setting.micro_batch, setting.micro_steps, setting.checkpointing))


@dataclass(frozen=True)
class Row:
    """`printed`: how many times as fast as `base` the paper says that `system` is."""

    paper: str
    what: str
    printed: float
    base: System
    system: System
    setting: Setting

    def simulated(self, units: str) -> tuple[float, float]:
        """Return the speed-up with full overlap, and without any."""
        base, system = self.base.step(self.setting, units), self.system.step(self.setting, units)
        return base.seconds / system.seconds, _one_after_the_other(base) / _one_after_the_other(system)


def _one_after_the_other(priced: Prediction) -> float:
    return priced.computing + sum(priced.in_flight.values())


ZERO1, ZERO2, ZERO3 = System("zero1"), System("zero2"), System("zero3")
ZEROPP_PLAIN = System("hpz")


def _cluster(name: str, nodes: int, gigabytes: float | None = None) -> Cluster:
    cluster = load_cluster(name).on(nodes)
    if gigabytes is None:
        return cluster
    hardware = cluster.hardware
    return replace(cluster, hardware=replace(hardware, inter=replace(hardware.inter, rate=gigabytes * 1e9)))


def _lins(params: Extent, optimizer: Extent) -> System:
    return System("lins", {"params": params, "grads": params, "optimizer": optimizer, "route": "flat"})


# Table III of Lins, and what it says of 1,024 GPUs: percent of the peak by Lins, MiCS and ZeRO++ without codecs.
LINS = {
    "llama-7b": (_lins(Extent(1), Extent(8)), Extent(8), (51, 35, 4)),
    "llama-13b": (_lins(Extent(4), Extent(8)), Extent(8), (52, 33, 6)),
    "llama-30b": (_lins(Extent(8), Extent(8)), Extent(8, 2), (42, 29, 5)),
}


def lins_rows() -> Iterator[Row]:
    for name, (ours, group, (lins, mics, zeropp)) in LINS.items():
        setting = Setting(name, 4096, _cluster("a800-4hdr", 128), checkpointing=name == "llama-30b")
        of = f"{name}, 1,024 A800"
        yield Row("Lins", f"Lins / MiCS, {of}", lins / mics, System("mics", {"group": group}), ours, setting)
        yield Row("Lins", f"Lins / ZeRO++ without codecs, {of}", lins / zeropp, ZEROPP_PLAIN, ours, setting)
    setting = Setting("llama-7b", 4096, _cluster("a800-4hdr", 128))
    yield Row("Lins", "ZeRO-1 / ZeRO-3, llama-7b, 1,024 A800", 36 / 4, ZERO3, ZERO1, setting)


def mics_rows() -> Iterator[Row]:
    def mics(nodes: int) -> System:
        return System("mics", {"group": Extent(8, nodes), "route": "hierarchical"})

    def row(what: str, printed: float, system: System, model: str, cluster: str, nodes: int) -> Row:
        steps = 8192 // (8 * 8 * nodes)
        setting = Setting(model, 512, _cluster(cluster, nodes), 8, steps, checkpointing=True)
        return Row("MiCS", what, printed, ZERO3, system, setting)

    yield row("MiCS / ZeRO-3, bert-10b, 128 V100, 100 Gbps", 3.23, mics(1), "bert-10b", "p3dn", 16)
    yield row("MiCS / ZeRO-3, bert-15b, 128 V100, 100 Gbps", 2.82, mics(2), "bert-15b", "p3dn", 16)
    yield row("groups of 8 / of 64, bert-10b, 64 V100", 1.6, mics(1), "bert-10b", "p3dn", 8)
    yield row("MiCS / ZeRO-3, bert-15b, 64 A100, 400 Gbps", 2.21, mics(1), "bert-15b", "p4d", 8)


def zeropp_rows() -> Iterator[Row]:
    gigabytes = {1: 10.6, 8: 85.0}  # by InfiniBand adapters of 100 Gbit/s
    all_three = System("zero++")

    def setting(model: str, tokens: int, adapters: int, nodes: int = 24) -> Setting:
        return Setting(model, tokens, _cluster("dgx-2", nodes, gigabytes[adapters]), checkpointing=True)

    for tokens, adapters, printed in ((1024, 1, 30 / 12.5), (2048, 1, 38.3 / 21.6), (1024, 8, 1.29)):
        what = f"ZeRO++ / ZeRO-3, gpt-18b, 384 V100, {adapters} IB, {tokens:,} tokens"
        yield Row("ZeRO++", what, printed, ZERO3, all_three, setting("gpt-18b", tokens, adapters))
    for tokens, adapters, printed in (
        (2048, 1, 31.5 / 16.6),
        (1024, 1, 18.1 / 9.3),
        (2048, 8, 44.7 / 31.5),
        (1024, 8, 31.5 / 26.0),
    ):
        what = f"ZeRO++ / ZeRO-3, gpt-138b, 384 V100, {adapters} IB, {tokens:,} tokens"
        yield Row("ZeRO++", what, printed, ZERO3, all_three, setting("gpt-138b", tokens, adapters))
    each = {"hpZ": System("hpz"), "qwZ": System("qwz"), "qgZ": System("qgz")}
    for adapters, printed, together in ((1, 1.35, 2.26), (8, 1.145, 1.3)):
        here = setting("gpt-18b", 2048, adapters, nodes=8)
        for name, system in each.items():
            yield Row("ZeRO++", f"{name} / ZeRO-3, gpt-18b, 128 V100, {adapters} IB", printed, ZERO3, system, here)
        yield Row("ZeRO++", f"all three / ZeRO-3, gpt-18b, 128 V100, {adapters} IB", together, ZERO3, all_three, here)


def paro_rows() -> Iterator[Row]:
    printed = {
        ("llama-7b", "zero3", "paro-igg"): (1.3, 1.4),
        ("llama-7b", "zero3", "paro-iig"): (1.9, 2.6),
        ("llama-7b", "zero2", "paro-nig"): (1.7, 2.2),
        ("llama-65b", "zero3", "paro-igg"): (1.2, 1.4),
        ("llama-65b", "zero3", "paro-iig"): (1.3, 1.8),
    }
    for (model, base, system), figures in printed.items():
        for nodes, figure in zip((4, 16), figures, strict=True):
            cluster = _cluster("dgx-a100-800g", nodes, 56.0)
            setting = Setting(model, 512, cluster, 4, 10, checkpointing=model == "llama-65b")
            what = f"{system} / {base}, {model}, {8 * nodes} A100"
            yield Row("PaRO", what, figure, System(base), System(system), setting)


def rows() -> Iterator[Row]:
    yield from lins_rows()
    yield from mics_rows()
    yield from zeropp_rows()
    yield from paro_rows()


# Pipelines -----------------------------------------------------------------------------------------------------------

# Optimus-CC, section 9: rank 16 between stages, rank 128 of the gradients of three quarters of the stages.
OPTIMUS = {
    "nothing": Compression(fused_embeddings=False),
    "CB": named_compression("optimus-cb"),
    "CB + FE": named_compression("optimus-cb+fe"),
    "CB + FE + SC": named_compression("optimus-cb+fe+sc"),
}
# Days of 230,000 steps.
OPTIMUS_DAYS = {
    "gpt-8.3b": {"nothing": 37.27, "CB": 34.83, "CB + FE": 32.84, "CB + FE + SC": 25.72},
    "gpt-2.5b": {"nothing": 14.72, "CB": 13.63, "CB + FE": 12.79, "CB + FE + SC": 12.55},
}
OPTIMUS_STEPS = 230_000
# A node's cable, in GB/s: as the data sheet has it (None), and as the printed seconds suggest.
OPTIMUS_CABLES = (None, 5.0)


@lru_cache(maxsize=64)
def optimus_seconds(model: str, compression: str, cable: float | None) -> tuple[float, float]:
    """Return the seconds of a step on 128 A100 with early gradients, and with late ones.

    Four ranks of an interleaved pipeline have four copies and eight tensor-parallel ranks. A step has 512 sequences,
    eight at once. Early gradients are sent as soon as they are ready. Late ones are sent after all of them are, as
    Megatron does it.
    """
    shape, length = MODELS[model]
    cluster = _cluster("dgx-a100-200g", 16, cable)
    pipelines = Pipelines(
        lambda count: shape.staged(model, length, count), cluster, Request(batch=512, memory=1 << 60), walks
    )
    layout = Layout(4, "Interleaved1F1B", "ddp", OPTIMUS[compression], 8)
    replayed = pipelines.replay(layout, Batching(8, 16))
    hidden = (
        rank.in_flight.get(TransferKind.GRAD_SYNC, 0.0) - rank.exposed.get(TransferKind.GRAD_SYNC, 0.0)
        for rank in replayed.ranks
    )
    seconds = replayed.combined().seconds
    return seconds, seconds + max(hidden)


def pipelines_table(chosen: Mapping[str, Mapping[str, float]] = OPTIMUS_DAYS) -> str:
    heads = ["what", "printed", "overlapped", "at the end", "5 GB/s, overlapped", "at the end"]
    heads += ["a step, printed", "at the end", "5 GB/s, at the end"]
    lines = [f"| {' | '.join(heads)} |", "|" + len(heads) * "---|"]
    for model, days in chosen.items():
        for name, printed in days.items():
            ratio = days["nothing"] / printed
            ratios: list[str] = []
            seconds = [f"{printed * 86400 / OPTIMUS_STEPS:.1f} s"]
            for cable in OPTIMUS_CABLES:
                base, found = (optimus_seconds(model, each, cable) for each in ("nothing", name))
                for before, after in zip(base, found, strict=True):
                    near = " ✓" if name != "nothing" and _is_near(before / after, ratio) else ""
                    ratios.append(f"{before / after:.2f}{near}")
                seconds.append(f"{found[1]:.1f} s")
            lines.append(f"| {model}, {name} | {ratio:.2f} | {' | '.join([*ratios, *seconds])} |")
    return "\n".join(lines)


# Collectives alone ---------------------------------------------------------------------------------------------------


def collective_seconds(route: str, cluster: Cluster, gigabytes: float) -> float:
    """An all-gather over all ranks, of so much on each at its end."""
    topology = cluster.topology
    move = MoveShape(Op.ALL_GATHER, 1, Grid(topology.nodes, topology.ranks_per_node), 1)
    return _alone(move, Transport(route), int(gigabytes * 5e8), cluster.hardware)


def _alone(move: MoveShape, transport: Transport, numel: int, hardware: Hardware) -> float:
    return seconds_alone(phase_costs(TransferShape.of_move(move, transport, numel, "bfloat16"), hardware), hardware)


# The placements of Lins ----------------------------------------------------------------------------------------------

# Of a GPU's memory, what communication and passing values take (D_tmp): the paper gives no figure.
TEMPORARY_GIB = 12


@dataclass(frozen=True)
class Placed:
    """`communication`: seconds a step, the sum that Lins minimises. `gib`: of a rank, states and activations."""

    placement: Placement
    communication: float
    gib: float

    def __str__(self) -> str:
        place = self.placement
        return f"{place.params}, {place.grads}, {place.optimizer}: {self.communication:.2f} s, {self.gib:.0f} GiB"


def lins_placements(name: str, checkpointing: bool) -> list[Placed]:
    """All that fit, the cheapest first, by the sum of what communication takes (equation 1), with one micro-step.

    With one micro-step gradients are whole at the end of the backward pass, wherever they are kept later: so G takes
    what P takes. An all-reduce is NCCL's: it waits for as many messages as a tree is deep, not one for each rank.
    """
    cluster = _cluster("a800-4hdr", 128)
    topology = cluster.topology
    blocks, matrices = model_of(name, 4096, BLOCKS), model_of(name, 4096, MATRICES)
    numel, kept = blocks.parameters, activation_bytes(blocks, BF16, 4096, checkpointing)
    found: list[Placed] = []
    for placement in legal_placements(topology):
        params, optimizer = placement.params, placement.optimizer
        held = numel * (4 / params.size + 12 / optimizer.size) + kept
        if placement.grads != params or held > cluster.memory - (TEMPORARY_GIB << 30):
            continue
        shapes = move_shapes(placement, topology)
        times = {TransferKind.GATHER: 2, TransferKind.REDUCE: 1, TransferKind.PARAM_SYNC: 1}
        seconds = sum(
            count * _alone(shape, Transport("flat"), unit.numel, cluster.hardware)
            for kind, count in times.items()
            for unit in (blocks if kind is TransferKind.PARAM_SYNC else matrices).units
            for shape in shapes[kind]
        )
        # What each rank has kept, over all that hold the same: of the sum it drops what it does not need.
        grid = Grid(topology.nodes // params.nodes, topology.ranks_per_node // params.local)
        alike = MoveShape(Op.ALL_REDUCE, params.size, grid, params.nodes)
        seconds += sum(_tree_all_reduce(alike, unit.numel, cluster.hardware) for unit in blocks.units)
        found.append(Placed(placement, seconds, held / (1 << 30)))
    return sorted(found, key=lambda placed: placed.communication)


def _tree_all_reduce(move: MoveShape, numel: int, hardware: Hardware) -> float:
    loads = phase_costs(TransferShape.of_move(move, Transport("flat"), numel, "bfloat16"), hardware)
    moved = sum(max(need / hardware.capacities[name] for name, need in load.needs.items()) for load in loads)
    latency = hardware.inter.latency if move.grid.nodes > 1 else hardware.intra.latency
    return moved + 2 * ceil(log2(move.members)) * latency


# Tables --------------------------------------------------------------------------------------------------------------


def ratios_table(chosen: Iterable[Row]) -> str:
    lines = ["| paper | what | printed | overlapped | one after the other | by blocks |", "|---|---|---|---|---|---|"]
    near = between = count = 0
    for row in chosen:
        overlapped, serial = row.simulated(MATRICES)
        blocks, _ = row.simulated(BLOCKS)
        low, high = sorted((overlapped, serial))
        count, near = count + 1, near + _is_near(overlapped, row.printed)
        between += low * (1 - NEAR) <= row.printed <= high * (1 + NEAR)
        figures = " | ".join(
            f"{found:.2f}{' ✓' if _is_near(found, row.printed) else ''}" for found in (overlapped, serial)
        )
        lines.append(f"| {row.paper} | {row.what} | {row.printed:.2f} | {figures} | {blocks:.2f} |")
    lines.append("")
    lines.append(f"Within 15 % where all overlaps: {near} of {count}; between the two ends, or so near: {between}.")
    return "\n".join(lines)


def _is_near(found: float, printed: float) -> bool:
    return abs(found / printed - 1) <= NEAR


def collectives_table() -> str:
    paro, p3dn = _cluster("dgx-a100-800g", 2, 56.0), _cluster("p3dn", 2)
    found = [
        ("PaRO", "HO-Ring / ring, 2 × 8 A100, 100 GB", 309 / 459, "ho-ring", paro, 100.0),
        ("MiCS", "hierarchical / vanilla, 2 × 8 V100, 128 MB", 0.721, "hierarchical", p3dn, 0.128),
    ]
    lines = ["| paper | time of an all-gather | printed | simulated |", "|---|---|---|---|"]
    for paper, what, printed, route, cluster, size in found:
        ratio = collective_seconds(route, cluster, size) / collective_seconds("ring", cluster, size)
        near = " ✓" if _is_near(ratio, printed) else ""
        lines.append(f"| {paper} | {what} | {printed:.2f} | {ratio:.2f}{near} |")
    return "\n".join(lines)


def placements_table() -> str:
    lines = ["| model | P, G, OS of Table III | place | the cheapest by the same sum |", "|---|---|---|---|"]
    for name, (system, _, _) in LINS.items():
        placed = lins_placements(name, checkpointing=name == "llama-30b")
        place = next(i for i, p in enumerate(placed) if _is(p.placement, system.options))
        lines.append(f"| {name} | {placed[place]} | {place + 1} of {len(placed)} | {placed[0]} |")
    return "\n".join(lines)


def _is(placement: Placement, options: Mapping[str, Any]) -> bool:
    return (placement.params, placement.optimizer) == (options["params"], options["optimizer"])


TABLES = {
    "papers-placements": placements_table,
    "papers-collectives": collectives_table,
    "papers-pipelines": pipelines_table,
    "papers-ratios": lambda: ratios_table(rows()),
}
SLOW = ("papers-placements", "papers-pipelines", "papers-ratios")
