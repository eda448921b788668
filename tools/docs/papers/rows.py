"""The rows of the reference table: what the papers print, and what the simulator predicts.

A row has two predictions. *As it ran*: both systems communicate in the order of the programs that the paper ran
(`peers.py`). *Overlapped*: both overlap everything, as in Towpath.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tools.docs.papers import pipelines, placements
from tools.docs.papers.lines import Line, ticked
from tools.docs.papers.peers import (
    LINS_ITSELF,
    LINS_PEERS,
    NO_TWO_HOPS,
    STAGE1,
    STAGE2,
    STAGE3,
    STAGE3_EARLY,
    STAGE3_MEGATRON,
    Program,
)
from tools.docs.papers.settings import (
    A100_PEAK,
    LINS,
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
    lins_setting,
    mics,
    mics_setting,
    paro_setting,
    zeropp_setting,
)
from tools.docs.papers.wide_resnet import wide_resnet_cells
from towpath.plan.hardware import GIB
from towpath.plan.pipelines import Layout, Pipelines
from towpath.plan.request import Request
from towpath.plan.solver import Batching


@dataclass(frozen=True)
class Run:
    """A system, and the program that ran it. Without one, it is taken to overlap everything.

    With `compared`, the program is what a row is about. It then has the same order in both columns.
    """

    system: System
    program: Program | None = None
    compared: bool = False

    def seconds(self, setting: Setting, as_it_ran: bool) -> float:
        return self.system.seconds(setting, self.program if as_it_ran or self.compared else None)


def _in_both(runs: Sequence[Run], cell: Callable[[bool], str]) -> Callable[[], list[str]]:
    """Return what simulates the cell of each column. They are equal where no program has an order of its own."""

    def cells() -> list[str]:
        overlapped = cell(False)
        return [cell(True) if any(run.program and not run.compared for run in runs) else overlapped, overlapped]

    return cells


def gain(paper: str, what: str, printed: float | str, base: Run, system: Run, setting: Setting) -> Line:
    """Return a speed-up of `system` over `base`. It counts if the paper prints one figure for this setting."""

    def cell(as_it_ran: bool) -> str:
        found = base.seconds(setting, as_it_ran) / system.seconds(setting, as_it_ran)
        return ticked(found, printed if isinstance(printed, float) else None)

    shown = printed if isinstance(printed, str) else f"{printed:.2f}"
    return Line((paper, what, shown), _in_both((base, system), cell))


def percent(paper: str, what: str, printed: str, run: Run, peak: float, settings: Sequence[Setting]) -> Line:
    """Return the percent of the peak that a system reaches in some settings."""

    def cell(as_it_ran: bool) -> str:
        shares = (100 * each.tflops(run.seconds(each, as_it_ran)) * 1e12 / peak for each in settings)
        return ", ".join(f"{share:.0f}" for share in shares)

    return Line((paper, what, printed), _in_both((run,), cell))


def fits(paper: str, what: str, printed: str, setting: Setting, systems: Sequence[System]) -> Line:
    """Return the GiB that a rank needs with each system, whatever the order of its transfers."""

    def cells() -> list[str]:
        needed, there = [each.gib(setting) for each in systems], setting.cluster.memory / GIB
        return ["–", ", ".join(f"{gib:.1f}{'' if gib <= there else ' ✗'}" for gib in needed)]

    return Line((paper, what, printed), cells)


def _lins() -> Iterator[Line]:
    z1, z3, zpp = Run(ZERO1, STAGE1), Run(ZERO3, LINS_PEERS), Run(ZEROPP_PLAIN, LINS_PEERS)
    ours = {name: Run(system, LINS_ITSELF) for name, (system, _) in LINS.items()}
    peer = {name: Run(system, LINS_PEERS) for name, (_, system) in LINS.items()}
    for name, own, mics_, zeropp in (("llama-7b", 51, 35, 4), ("llama-13b", 52, 33, 6)):
        for base, run, other in (("MiCS", peer[name], mics_), ("ZeRO++, no codecs", zpp, zeropp)):
            yield gain("Fig. 8", f"Lins / {base}, {name}", own / other, run, ours[name], lins_setting(name))
    yield gain("Fig. 8", "ZeRO-1 / ZeRO-3, llama-7b", 36 / 4, z3, z1, lins_setting("llama-7b"))
    for what, printed, run, model, nodes in (
        ("Lins", "64, 51", ours["llama-7b"], "llama-7b", (1, 128)),
        ("ZeRO-1", "63, 36", z1, "llama-7b", (1, 128)),
        ("MiCS", "50, 35", peer["llama-7b"], "llama-7b", (1, 128)),
        ("ZeRO-3", "47, –", z3, "llama-13b", (1, 128)),
        ("MiCS", "–, 33", peer["llama-13b"], "llama-13b", (1, 128)),
    ):
        settings = [lins_setting(model, count) for count in nodes]
        yield percent("Fig. 8", f"% of the peak, {what}, {model}, 8 and 1,024 A800", printed, run, A100_PEAK, settings)
    yield from placements.lines()
    setting = lins_setting("llama-7b")
    yield fits(
        "Fig. 10", "GiB, llama-7b, 1,024 A800: MiCS, ZeRO-3", "about 2 to 1", setting, [LINS["llama-7b"][1], ZERO3]
    )
    here = lins_setting("llama-30b", 4)
    yield fits("Fig. 10", "GiB, llama-30b, 32 A800: ZeRO++, no codecs", "out of memory", here, [ZEROPP_PLAIN])


def _mics() -> Iterator[Line]:
    z3 = Run(ZERO3, STAGE3_EARLY)
    for model, nodes, printed in (("10b", 1, "2.23 or 3.23 ¹"), ("15b", 2, 2.82), ("20b", 2, "below 15B")):
        setting = mics_setting(f"bert-{model}", 16)
        yield gain("Fig. 7", f"MiCS / ZeRO-3, bert-{model}, 128 V100", printed, z3, Run(mics(8, nodes)), setting)
    setting = mics_setting("bert-10b", 16)
    yield gain("Fig. 15", "ZeRO-3 of MiCS / of DeepSpeed, bert-10b, 128 V100", 1.541, z3, Run(ZERO3), setting)
    base = Run(mics(8), NO_TWO_HOPS, compared=True)
    yield gain("Fig. 14", "two hops / none, bert-10b, 128 V100", 1.249, base, Run(mics(8)), setting)
    here = mics_setting("bert-10b", 8)
    yield gain("Fig. 12", "groups of 8 / of 64, bert-10b, 64 V100", 1.6, Run(ZERO3), Run(mics(8)), here)
    flat = System("mics", {"group": mics(8, 2).options["group"], "route": "flat"})
    what = "hierarchical / flat gathers, bert-15b, 128 V100"
    yield gain("Fig. 13", what, "1.31 to 1.38", Run(flat), Run(mics(8, 2)), mics_setting("bert-15b", 16))
    setting, what = mics_setting("bert-15b", 8, "p4d"), "MiCS, groups of 16 / ZeRO-3, bert-15b, 64 A100, 400 Gbit/s"
    yield gain("Fig. 10", what, "up to 2.21", z3, Run(mics(8, 2)), setting)
    yield Line(("5.1.4", "MiCS, groups of 8 / ZeRO-3, WideResNet 3B, 128 V100", "up to 2.89"), wide_resnet_cells)
    setting = mics_setting("bert-10b", 16)
    yield percent("5.1.1", "% of the peak, MiCS, bert-10b, 128 V100", "about 42", Run(mics(8)), 125e12, [setting])
    weak = [Setting("bert-100b", 512, cluster("p4d", nodes), 16, 4, checkpointing=True) for nodes in (16, 64)]
    for name, printed, run in (("MiCS", "55, 54", Run(mics(8, 16))), ("ZeRO-3", "–, 20", z3)):
        yield percent("5.1.5", f"% of the peak, {name}, bert-100b, 128 and 512 A100", printed, run, A100_PEAK, weak)
    yield Line(("Fig. 11", "MiCS / best of Megatron-LM-3D, bert-10b of 128 layers, 128 V100", "up to 1.31"), _megatron)
    yield placements.gather_line(
        "Fig. 13", "hierarchical / flat gather, 2 × 8 V100, 128 MB: time", "0.72", "hierarchical"
    )


def _megatron() -> list[str]:
    """Return how many times as fast MiCS is as the fastest of three layouts, with 4,096 sequences a step."""
    here, name = cluster("p3dn", 16), "bert-10b-128"
    setting = Setting(name, 512, here, 8, 4096 // (8 * 128), checkpointing=True)
    pipelines_ = Pipelines(lambda count: SHAPES[name].staged(name, 512, count), here, Request(4096, memory=1 << 60))
    steps: list[float] = []
    for tensor, pipeline in ((8, 1), (4, 4), (2, 8)):
        batching = Batching(8, 4096 // 8 // (128 // tensor // pipeline), True)
        steps.append(pipelines_.predict(Layout(pipeline, "1F1B", "ddp", "none", tensor), batching).seconds)
    return ["–", f"{min(steps) / mics(8).seconds(setting):.2f}"]


def _zeropp() -> Iterator[Line]:
    z3, zpp = Run(ZERO3, STAGE3_MEGATRON), Run(ZEROPP, STAGE3)
    for tokens, printed in ((1024, 30 / 12.5), (2048, 38.3 / 21.6)):
        what = f"ZeRO++ / ZeRO-3, gpt-18b, 384 V100, 1 IB, {tokens:,} tokens"
        yield gain("Fig. 11", what, printed, z3, zpp, zeropp_setting("gpt-18b", tokens, 1, 24))
    for adapters, printed in ((1, 2.26), (8, 1.3)):
        what = f"ZeRO++ / ZeRO-3, gpt-18b, 128 V100, {adapters} IB, 1,024 tokens ²"
        yield gain("Fig. 13", what, printed, z3, zpp, zeropp_setting("gpt-18b", 1024, adapters, 8))
    for part, program in (("hpZ", STAGE3), ("qwZ", STAGE3_MEGATRON), ("qgZ", STAGE3)):
        setting = zeropp_setting("gpt-18b", 1024, 1, 8)
        what = f"{part} / ZeRO-3, gpt-18b, 128 V100, 1 IB, 1,024 tokens ²"
        yield gain("Fig. 13", what, "1.3 to 1.4", z3, Run(System(part.lower()), program), setting)
    settings = [zeropp_setting("gpt-18b", tokens, 1, 24) for tokens in (1024, 2048)]
    for name, printed, run in (("ZeRO-3", "12.5, 21.6", z3), ("ZeRO++", "30, 38.3", zpp)):
        what = f"% of the peak, {name}, gpt-18b, 384 V100, 1 IB, 1,024 and 2,048 tokens"
        yield percent("Fig. 11", what, printed, run, V100_PEAK, settings)
    for name, adapters, printed, run in (("ZeRO++", 2, "41.6, 40", zpp), ("ZeRO-3", 8, "39.1, 40", z3)):
        what = f"% of the peak, {name}, gpt-18b and gpt-138b, 384 V100, {adapters} IB, 2,048 tokens"
        settings = [zeropp_setting(model, 2048, adapters, 24) for model in ("gpt-18b", "gpt-138b")]
        yield percent("Fig. 12", what, printed, run, V100_PEAK, settings)
    what = "GiB, gpt-18b, 64 V100 of 32 GB: hpZ, MiCS in groups of 16"
    yield fits("Table 4", what, "fits, does not", zeropp_setting("gpt-18b", 2048, 8, 4), [ZEROPP_PLAIN, mics(16)])


_PARO = {
    ("llama-7b", "zero3", "paro-igg"): (1.3, 1.4),
    ("llama-7b", "zero3", "paro-iig"): (1.9, 2.6),
    ("llama-7b", "zero2", "paro-nig"): (1.7, 2.2),
    ("llama-65b", "zero3", "paro-igg"): (1.2, 1.4),
    ("llama-65b", "zero3", "paro-iig"): (1.3, 1.8),
}


def _paro() -> Iterator[Line]:
    programs = {"zero2": STAGE2, "zero3": STAGE3}
    for (model, base, system), figures in _PARO.items():
        slow, fast = (Run(System(name), programs[base]) for name in (base, system))
        for nodes, printed in zip((4, 16), figures, strict=True):
            what = f"{system} / {base}, {model}, {8 * nodes} A100"
            yield gain("Fig. 6", what, printed, slow, fast, paro_setting(model, nodes))
    here = paro_setting("llama-65b", 4)
    what = "GiB, llama-65b, 32 A100: ZeRO-3, ZeRO++ without codecs, PaRO-IGG, PaRO-IIG"
    yield fits("Fig. 6", what, "fit", here, [ZERO3, ZEROPP_PLAIN, System("paro-igg"), System("paro-iig")])
    what = "GiB, llama-65b, 32 A100: ZeRO-2, MiCS, PaRO-NIG"
    yield fits("Fig. 6", what, "do not fit", here, [ZERO2, System("mics"), System("paro-nig")])
    yield placements.gather_line("4.2", "HO-Ring / ring, 2 × 8 A100, 100 GB in all: time ³", "0.67", "ho-ring")


# By paper: its rows.
PAPERS = {"Lins": _lins, "MiCS": _mics, "ZeRO++": _zeropp, "PaRO": _paro, "Optimus-CC": pipelines.lines}


def rows() -> tuple[Line, ...]:
    """Return all rows. The first cell has the paper and the place in it."""
    return tuple(
        Line((f"{paper}, {line.known[0]}", *line.known[1:]), line.simulate)
        for paper, lines in PAPERS.items()
        for line in lines()
    )
