"""Figures of the papers that are no speed-up of one system over another: sizes, bandwidths, bytes and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from tools.docs.papers.lines import Line, Table, ticked
from tools.docs.papers.settings import (
    A100_PEAK,
    BLOCKS,
    HALF,
    SHAPES,
    V100_PEAK,
    ZERO1,
    ZERO2,
    ZERO3,
    ZEROPP,
    ZEROPP_PLAIN,
    Setting,
    System,
    cluster,
    mics,
    model_of,
)
from tools.docs.papers.speedups import LINS, lins_mics, lins_setting, mics_setting, paro_setting, zeropp_setting
from tools.docs.papers.wide_resnet import wide_resnet_cells
from towpath.core.schedule import schedule
from towpath.core.strategy import TransferKind
from towpath.plan.hardware import GIB
from towpath.plan.pipelines import Layout, Pipelines
from towpath.plan.request import Request
from towpath.plan.solver import Batching
from towpath.topology.cluster import Extent

# What identifies each line, and what simulates its other cells.
Lines = Iterator[tuple[tuple[str, ...], Callable[[], Iterable[str]]]]


def _percent(setting: Setting, system: System, peak: float) -> float:
    return 100 * setting.tflops(system.step(setting).seconds) * 1e12 / peak


def _table(heads: str, lines: Lines) -> Table:
    return Table(tuple(heads.split(", ")), tuple(Line(known, simulate) for known, simulate in lines))


# ZeRO++ --------------------------------------------------------------------------------------------------------------


def _zeropp_cells(setting: Setting, printed: float | None = None) -> list[str]:
    base, found = (_percent(setting, system, V100_PEAK) for system in (ZERO3, ZEROPP))
    return [f"{base:.1f}", f"{found:.1f}", ticked(found / base, printed)]


def zeropp_gpus() -> Lines:
    printed = {(1, 1024): (12.5, 30.0), (1, 2048): (21.6, 38.3)}
    for adapters in (1, 8):
        for tokens in (1024, 2048):
            for nodes in (4, 8, 16, 24):
                figures = printed.get((adapters, tokens)) if nodes == 24 else None
                known = (f"{adapters} IB, {tokens:,} tokens", str(16 * nodes))
                known += tuple(f"{figure}" for figure in figures) if figures else ("–", "–")
                ratio = figures[1] / figures[0] if figures else None
                known += (f"{ratio:.2f}" if ratio else "–",)
                setting = zeropp_setting("gpt-18b", tokens, adapters, nodes)
                yield known, partial(_zeropp_cells, setting, ratio)


def zeropp_sizes() -> Lines:
    printed = {(1, 2048): ("16.6", "31.5"), (1, 1024): ("9.3", "18.1")}
    printed |= {(8, 2048): ("31.5", "44.7"), (8, 1024): ("26.0", "31.5")}
    for (adapters, tokens), figures in printed.items():
        for model in ("gpt-18b", "gpt-138b"):
            known = (f"{adapters} IB, {tokens:,} tokens", *figures, model)
            yield known, partial(_zeropp_cells, zeropp_setting(model, tokens, adapters))


def zeropp_bandwidth() -> Lines:
    def cells(model: str) -> list[str]:
        runs = ((ZEROPP, 2), (ZERO3, 8), (ZERO3, 2))
        return [f"{_percent(zeropp_setting(model, 2048, adapters), run, V100_PEAK):.1f}" for run, adapters in runs]

    for model, figures in (("gpt-18b", ("41.6", "39.1")), ("gpt-138b", ("40", "40"))):
        yield (model, *figures), partial(cells, model)


def _fits(setting: Setting, system: System) -> str:
    gib, there = system.gib(setting), setting.cluster.memory / GIB
    return f"{gib:.1f}{'' if gib <= there else ' ✗'}"


def zeropp_fits() -> Lines:
    setting = zeropp_setting("gpt-18b", 2048, 8, 4)
    for name, system, printed in (("hpZ", ZEROPP_PLAIN, "runs"), ("MiCS, groups of 16", mics(16), "out of memory")):
        yield (name, printed), lambda system=system: [_fits(setting, system)]


# PaRO ----------------------------------------------------------------------------------------------------------------

_PARO = {
    "ZeRO-1": (ZERO1, 1, 1),
    "ZeRO-2": (ZERO2, 1, 64),
    "ZeRO-3": (ZERO3, 64, 64),
    "MiCS": (System("mics"), 8, 8),
    "ZeRO++, no codecs": (ZEROPP_PLAIN, 64, 64),
    "PaRO-IGG": (System("paro-igg"), 8, 64),
    "PaRO-IIG": (System("paro-iig"), 8, 8),
    "PaRO-NIG": (System("paro-nig"), 1, 8),
}


def paro_volumes() -> Lines:
    """Fig. 5: 7B on 8 nodes of 8, with 8 micro-steps, all ranks together, in 16 bits."""
    here = cluster("dgx-a100-800g", 8)
    model = model_of("llama-7b", 512, BLOCKS)

    def cells(name: str) -> list[str]:
        system, params, grads = _PARO[name]
        made = schedule(system.strategy(here), tuple(unit.spec for unit in model.units), 8, HALF)
        sent = [t for t in made.transfers if t.kind is not TransferKind.UNUSED_PARAMS]
        inside, between = (sum(getattr(t, f"{where}_bytes") for t in sent) / 1e9 for where in ("intra", "inter"))
        optimizer = 8 if name == "MiCS" else 64
        copy = 2 / 8 if system is ZEROPP_PLAIN else 0.0
        printed = model.parameters * (2 / params + copy + 2 / grads + 12 / optimizer) / 1e9
        kept = made.memory_bytes()
        shards = 0 if kept["params"] else 2 * model.parameters / params  # which Towpath does not keep
        held = sum(kept.values()) + shards + 8 * model.parameters / optimizer
        return [f"{inside:,.0f}", f"{between:,.0f}", f"{printed:.1f}", f"{held / 1e9:.1f}"]

    return (((name,), partial(cells, name)) for name in _PARO)


def paro_fits() -> Lines:
    """Fig. 6: what fits at all."""

    def cells(name: str) -> Iterator[str]:
        for model in ("llama-7b", "llama-65b"):
            for nodes in (4, 16):
                yield _fits(paro_setting(model, nodes), _PARO[name][0])

    for name in _PARO:
        ran = name in ("ZeRO-3", "ZeRO++, no codecs", "PaRO-IGG", "PaRO-IIG")
        if name != "ZeRO-1":
            yield (name, "fits" if ran else "out of memory"), partial(cells, name)


def paro_scaling() -> Lines:
    """Fig. 7: the throughput of each GPU, as a share of that on 16."""

    def cells(name: str) -> list[str]:
        steps = [_PARO[name][0].step(paro_setting("llama-7b", nodes)).seconds for nodes in (2, 4, 8, 16)]
        return [f"{100 * steps[0] / step:.1f} %" for step in steps[1:]]

    return (((name,), partial(cells, name)) for name in ("ZeRO-2", "ZeRO-3", "PaRO-IGG", "PaRO-IIG", "PaRO-NIG"))


# MiCS ----------------------------------------------------------------------------------------------------------------


def mics_weak() -> Lines:
    """Section 5.1.5: micro-batches of 16, four micro-steps, groups of 128 ranks."""
    for model, system, figures in (
        ("bert-52b", mics(8, 16), ("179", "–", "–")),
        ("bert-100b", mics(8, 16), ("171", "170", "99.4 %")),
        ("bert-100b", ZERO3, ("–", "62", "72 %")),
    ):

        def cells(model: str, system: System) -> Iterator[str]:
            found: list[float] = []
            for nodes in (16, 64):
                setting = Setting(model, 512, cluster("p4d", nodes), 16, 4, checkpointing=True)
                found.append(setting.tflops(system.step(setting).seconds))
                yield f"{found[-1]:.0f}"
            yield f"{100 * found[1] / found[0]:.1f} %"
            yield _fits(Setting(model, 512, cluster("p4d", 16), 16, 4, checkpointing=True), system)

        known = (f"{'ZeRO-3' if system is ZERO3 else 'MiCS'}, {model}", *figures)
        yield known, partial(cells, model, system)


def mics_strong() -> Lines:
    """Section 5.1.2: from 16 to 64 A100, 400 Gbit/s. Section 5.1.1: the share of the peak of a V100, 125 TFLOP/s."""

    def cells(system: System) -> list[str]:
        steps = [system.step(mics_setting("bert-15b", nodes, "p4d")).seconds for nodes in (2, 8)]
        return [f"{100 * steps[0] / steps[1] / 4:.1f} %"]

    for name, system, figure in (("MiCS, groups of 16", mics(8, 2), "96.7 %"), ("ZeRO-3", ZERO3, "85.3 %")):
        yield (f"efficiency of {name}, bert-15b, 16 to 64 A100", figure), partial(cells, system)
    known = ("percent of the peak by MiCS, groups of 8, bert-10b, 128 V100", "about 42")
    yield known, lambda: [f"{_percent(mics_setting('bert-10b', 16), mics(8), 125e12):.0f}"]


def mics_groups() -> Lines:
    """Fig. 12: BERT 10B on 64 V100."""

    def cells(nodes: int) -> list[str]:
        setting = mics_setting("bert-10b", 8)
        # The paper says that groups of all ranks are ZeRO-3.
        all_ranks, here = (system.step(setting).seconds for system in (ZERO3, mics(8, nodes)))
        return [ticked(all_ranks / here, 1.6 if nodes == 1 else None)]

    for nodes in (1, 2, 4):
        yield (str(8 * nodes), "1.60" if nodes == 1 else "–"), partial(cells, nodes)


def mics_megatron() -> Lines:
    """Fig. 11a and b: 128 layers, or 80 wider ones, and 4,096 sequences a step on 128 V100; sequences per second."""
    here = cluster("p3dn", 16)

    def cells(name: str, tensor: int, pipeline: int) -> list[str]:
        setting = Setting(name, 512, here, 8, 4096 // (8 * 128), checkpointing=True)
        pipelines = Pipelines(
            lambda count: SHAPES[name].staged(name, 512, count), here, Request(batch=4096, memory=1 << 60)
        )
        micro_steps = 4096 // 8 // (128 // tensor // pipeline)
        found = pipelines.predict(Layout(pipeline, "1F1B", "ddp", "none", tensor), Batching(8, micro_steps, True))
        ours = mics(8).step(setting).seconds
        return [f"{4096 / found.seconds:.0f}", f"{4096 / ours:.0f}", f"{found.seconds / ours:.2f}"]

    for number, (tensor, pipeline) in enumerate(((8, 1), (4, 4), (2, 8)), 1):
        known = (f"({number}): {tensor} tensor-parallel ranks, {pipeline} stage{'s' * (pipeline > 1)}",)
        yield known, partial(cells, "bert-10b-128", tensor, pipeline)
    yield ("(3), 80 wider layers",), partial(cells, "bert-10b-wide", 2, 8)


def mics_wide_resnet() -> Lines:
    """Section 5.1.4, the paper's maximum."""
    for nodes in (2, 8, 16):
        yield (f"{8 * nodes} V100", "up to 2.89"), partial(wide_resnet_cells, nodes)


# Lins ----------------------------------------------------------------------------------------------------------------

_LINS_NODES = (1, 4, 16, 64, 128)
_LINS_PRINTED = {  # by system and model: percent of the peak, by nodes
    ("Lins", "llama-7b"): {1: 64, 128: 51},
    ("ZeRO-1", "llama-7b"): {1: 63, 128: 36},
    ("MiCS", "llama-7b"): {1: 50, 128: 35},
    ("ZeRO-3", "llama-7b"): {128: 4},
    ("Lins", "llama-13b"): {128: 52},
    ("MiCS", "llama-13b"): {128: 33},
    ("ZeRO-3", "llama-13b"): {1: 47, 128: 4},
    ("Lins", "llama-30b"): {4: 40, 128: 42},
    ("MiCS", "llama-30b"): {4: 40, 128: 29},
    ("ZeRO-3", "llama-30b"): {4: 40},
}


def _lins_system(name: str, model: str) -> System:
    if name == "Lins":
        return LINS[model][0]
    return lins_mics(model) if name == "MiCS" else {"ZeRO-1": ZERO1, "ZeRO-3": ZERO3, "ZeRO++": ZEROPP_PLAIN}[name]


def lins_gpus() -> Lines:
    def cells(name: str, model: str) -> Iterator[str]:
        printed = _LINS_PRINTED[name, model]
        for nodes in _LINS_NODES:
            if _lins_system(name, model).options.get("group", Extent(1)).nodes > nodes:
                yield "–"
                continue
            setting = lins_setting(model, nodes)
            seconds = _lins_system(name, model).step(setting).seconds
            # A share of the peak by the FLOPs of the model: recomputed ones do not count.
            found = 100 * replace(setting, checkpointing=False).tflops(seconds) * 1e12 / A100_PEAK
            yield f"{found:.0f}" + (f" ({printed[nodes]})" if nodes in printed else "")

    for name, model in _LINS_PRINTED:
        yield (f"{name}, {model}",), partial(cells, name, model)


def lins_memory() -> Lines:
    def cells(name: str, model: str) -> Iterator[str]:
        system = _lins_system(name, model)
        for nodes in _LINS_NODES:
            spans = system.options.get("group", Extent(1)).nodes
            yield "–" if spans > nodes else _fits(lins_setting(model, nodes), system)

    for model in LINS:
        for name in ("Lins", "ZeRO-3", "ZeRO++", "MiCS", *(("ZeRO-1",) if model == "llama-7b" else ())):
            yield (f"{name}, {model}",), partial(cells, name, model)


def tables() -> dict[str, Table]:
    by_gpus = ", ".join(f"{8 * nodes:,} GPUs" for nodes in _LINS_NODES)
    return {
        "papers-zeropp-gpus": _table(
            "network, GPUs, ZeRO-3 printed, ZeRO++ printed, speed-up printed, ZeRO-3, ZeRO++, speed-up", zeropp_gpus()
        ),
        "papers-zeropp-sizes": _table(
            "network, ZeRO-3 printed, ZeRO++ printed, model, ZeRO-3, ZeRO++, speed-up", zeropp_sizes()
        ),
        "papers-zeropp-bandwidth": _table(
            "model, ZeRO++ 2 IB printed, ZeRO-3 8 IB printed, ZeRO++ 2 IB, ZeRO-3 8 IB, ZeRO-3 2 IB", zeropp_bandwidth()
        ),
        "papers-zeropp-fits": _table("system, printed, GiB of a rank", zeropp_fits()),
        "papers-paro-volumes": _table(
            "system, GB inside nodes, GB between nodes, GB of a rank by Table 1, GB of a rank here", paro_volumes()
        ),
        "papers-paro-fits": _table(
            "system, 65B printed, 7B 32 GPUs, 7B 128 GPUs, 65B 32 GPUs, 65B 128 GPUs", paro_fits()
        ),
        "papers-paro-scaling": _table("system, 32 GPUs, 64 GPUs, 128 GPUs", paro_scaling()),
        "papers-mics-weak": _table(
            "system, 128 GPUs printed, 512 GPUs printed, efficiency printed, 128 GPUs, 512 GPUs, efficiency, "
            "GiB of a rank",
            mics_weak(),
        ),
        "papers-mics-strong": _table("what, printed, simulated", mics_strong()),
        "papers-mics-groups": _table("ranks of a group, printed, simulated", mics_groups()),
        "papers-mics-megatron": _table(
            "Megatron-LM-3D, its sequences per second, those of MiCS, MiCS / it", mics_megatron()
        ),
        "papers-mics-wide-resnet": _table(
            "WideResNet 3B, printed, overlapped, one after the other, by blocks", mics_wide_resnet()
        ),
        "papers-lins-gpus": _table(f"system, {by_gpus}", lins_gpus()),
        "papers-lins-memory": _table(f"system, {by_gpus}", lins_memory()),
    }
