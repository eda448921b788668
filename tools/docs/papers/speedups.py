"""How many times as fast one system is as another: what the papers print, and what the simulator predicts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tools.docs.papers.lines import NEAR, TICK, Line, Table, cells_of, ticked
from tools.docs.papers.settings import (
    BLOCKS,
    MATRICES,
    ZERO1,
    ZERO2,
    ZERO3,
    ZEROPP,
    ZEROPP_PLAIN,
    Setting,
    System,
    cluster,
    mics,
)
from towpath.core.placement import Placement
from towpath.plan.hardware import Cluster
from towpath.plan.solver import Prediction
from towpath.topology.cluster import Extent

# The share of the peak that the A800's matrix products reach is a figure of Lins itself. This is what the files of the
# A100 assume.
REACHED_ELSEWHERE = 0.6
MEASURED_BY_PARO = 56.0  # GB/s between nodes. The paper states 100, and the other files assume 85 % of that.
ADAPTER = 10.625  # GB/s of one InfiniBand adapter: 85 % of 100 Gbit/s


@dataclass(frozen=True)
class Row:
    """A comparison.

    Args:
        what: What is compared.
        printed: How many times as fast as `base` the paper says that `system` is.
        base: The slower system.
        system: The faster one.
        setting: Where they run.
        shown: What the paper prints, if it is not one figure for this setting. The row is then no test of the
            simulator, and does not count.
        beside: The cluster without a figure that the paper itself measured, for one more column.
    """

    what: str
    printed: float
    base: System
    system: System
    setting: Setting
    shown: str = ""
    beside: Cluster | None = None

    def line(self) -> Line:
        return Line((self.what, self.shown or f"{self.printed:.2f}"), self._cells)

    def ratios(self, setting: Setting, units: str) -> tuple[float, float]:
        """Return the speed-up with full overlap, and without any."""
        base, system = self.base.step(setting, units), self.system.step(setting, units)
        return base.seconds / system.seconds, _one_after_the_other(base) / _one_after_the_other(system)

    def _cells(self) -> Iterator[str]:
        printed = None if self.shown else self.printed
        for ratio in self.ratios(self.setting, MATRICES):
            yield ticked(ratio, printed)
        blocks, _ = self.ratios(self.setting, BLOCKS)
        yield f"{blocks:.2f}"
        if self.beside is not None:
            yield ticked(self.ratios(replace(self.setting, cluster=self.beside), MATRICES)[0], printed)


def _one_after_the_other(priced: Prediction) -> float:
    return priced.computing + sum(priced.in_flight.values())


def _lins(params: Extent, optimizer: Extent) -> System:
    return System(Placement(params, params, optimizer), {"route": "flat"})


# Table III of Lins with its group of MiCS, and what the paper says of 1,024 GPUs: percent of the peak by Lins, MiCS and
# ZeRO++ without codecs.
LINS = {
    "llama-7b": (_lins(Extent(1), Extent(8)), Extent(8), (51, 35, 4)),
    "llama-13b": (_lins(Extent(4), Extent(8)), Extent(8), (52, 33, 6)),
    "llama-30b": (_lins(Extent(8), Extent(8)), Extent(8, 2), (42, 29, 5)),
}


def lins_setting(name: str, nodes: int = 128) -> Setting:
    """Return a run of Lins: a step has 1,024 sequences, one at a time."""
    return Setting(name, 4096, cluster("a800-4hdr", nodes), 1, 128 // nodes, checkpointing=name == "llama-30b")


def lins_mics(name: str) -> System:
    return System("mics", {"group": LINS[name][1]})


def lins_rows() -> Iterator[Row]:
    beside = cluster("a800-4hdr", 128, reached=REACHED_ELSEWHERE)
    for name, (ours, _, (lins, mics_, zeropp)) in LINS.items():
        setting = lins_setting(name)
        # In the text of the paper that we have, the last cell of Table III is cut off for 30B.
        for base, system, percent in (("MiCS", lins_mics(name), mics_), ("ZeRO++, no codecs", ZEROPP_PLAIN, zeropp)):
            shown = f"{lins / percent:.2f} ¹" if name == "llama-30b" else ""
            yield Row(f"Lins / {base}, {name}", lins / percent, system, ours, setting, shown, beside)
    yield Row("ZeRO-1 / ZeRO-3, llama-7b", 36 / 4, ZERO3, ZERO1, lins_setting("llama-7b"), beside=beside)


def mics_setting(model: str, nodes: int, name: str = "p3dn") -> Setting:
    """Return a run of MiCS: a step has 8,192 sequences of 512 tokens, eight at a time on each rank."""
    return Setting(model, 512, cluster(name, nodes), 8, 8192 // (8 * 8 * nodes), checkpointing=True)


def mics_rows() -> Iterator[Row]:
    for model, nodes, printed in (
        ("bert-10b", 1, "2.23 or 3.23 ¹"),
        ("bert-15b", 2, ""),
        ("bert-20b", 2, "below 15B ²"),
        ("bert-50b", 8, "– ²"),
    ):
        what = f"MiCS / ZeRO-3, {model}, 128 V100, 100 Gbit/s"
        yield Row(what, 2.82, ZERO3, mics(8, nodes), mics_setting(model, 16), printed)
    yield Row("groups of 8 / of 64, bert-10b, 64 V100", 1.6, ZERO3, mics(8), mics_setting("bert-10b", 8))
    flat = System("mics", {"group": Extent(8, 2), "route": "flat"})
    what = "hierarchical / flat gathers, bert-15b, 128 V100"
    yield Row(what, 1.38, flat, mics(8, 2), mics_setting("bert-15b", 16), "1.31 to 1.38 ⁴")
    for nodes in (1, 2):
        what = f"MiCS, groups of {8 * nodes} / ZeRO-3, bert-15b, 64 A100, 400 Gbit/s"
        setting = mics_setting("bert-15b", 8, "p4d")
        yield Row(what, 2.21, ZERO3, mics(8, nodes), setting, "up to 2.21 ³")


def zeropp_setting(model: str, tokens: int, adapters: int, nodes: int = 24) -> Setting:
    return Setting(model, tokens, cluster("dgx-2", nodes, ADAPTER * adapters), checkpointing=True)


def zeropp_rows() -> Iterator[Row]:
    for tokens, adapters, printed, shown in (
        (1024, 1, 30 / 12.5, ""),
        (2048, 1, 38.3 / 21.6, ""),
        (1024, 8, 1.29, "up to 1.29 ¹"),
        (2048, 8, 1.29, "up to 1.29 ¹"),
    ):
        what = f"ZeRO++ / ZeRO-3, gpt-18b, 384 V100, {adapters} IB, {tokens:,} tokens"
        yield Row(what, printed, ZERO3, ZEROPP, zeropp_setting("gpt-18b", tokens, adapters), shown)
    each = {"hpZ": System("hpz"), "qwZ": System("qwz"), "qgZ": System("qgz")}
    for adapters, shown, together in ((1, "1.3 to 1.4 ²", 2.26), (8, "1.13 to 1.16 ²", 1.3)):
        here = zeropp_setting("gpt-18b", 2048, adapters, nodes=8)
        for name, system in each.items():
            yield Row(f"{name} / ZeRO-3, gpt-18b, 128 V100, {adapters} IB", together, ZERO3, system, here, shown)
        yield Row(f"all three / ZeRO-3, gpt-18b, 128 V100, {adapters} IB", together, ZERO3, ZEROPP, here)


PARO: Mapping[tuple[str, str, str], tuple[float, float]] = {
    ("llama-7b", "zero3", "paro-igg"): (1.3, 1.4),
    ("llama-7b", "zero3", "paro-iig"): (1.9, 2.6),
    ("llama-7b", "zero2", "paro-nig"): (1.7, 2.2),
    ("llama-65b", "zero3", "paro-igg"): (1.2, 1.4),
    ("llama-65b", "zero3", "paro-iig"): (1.3, 1.8),
}


def paro_setting(model: str, nodes: int) -> Setting:
    """Return a run of PaRO: ten micro-steps of four sequences of 512 tokens."""
    return Setting(
        model, 512, cluster("dgx-a100-800g", nodes, MEASURED_BY_PARO), 4, 10, checkpointing=model == "llama-65b"
    )


def paro_rows() -> Iterator[Row]:
    for (model, base, system), figures in PARO.items():
        for nodes, figure in zip((4, 16), figures, strict=True):
            bases = {"zero2": ZERO2, "zero3": ZERO3}
            what = f"{system} / {base}, {model}, {8 * nodes} A100"
            setting, beside = paro_setting(model, nodes), cluster("dgx-a100-800g", nodes)
            yield Row(what, figure, bases[base], System(system), setting, beside=beside)


_HEADS = ("what", "printed", "overlapped", "one after the other", "by blocks")
ROWS = {"lins": lins_rows, "mics": mics_rows, "zeropp": zeropp_rows, "paro": paro_rows}
_NAMES = {"lins": "Lins", "mics": "MiCS", "zeropp": "ZeRO++", "paro": "PaRO"}


def tables() -> dict[str, Table]:
    beside = {"lins": ("overlapped, 60 % of the peak",), "paro": ("overlapped, 85 GB/s",)}
    return {
        f"papers-{name}": Table(_HEADS + beside.get(name, ()), tuple(row.line() for row in rows()))
        for name, rows in ROWS.items()
    }


COUNTS = "papers-counts"


def counts(page: str) -> str:
    """Return the table of how many rows of the tables of `page` agree with the papers."""
    lines = [
        "| paper | rows that count | overlapped | one after the other | between the two |",
        "|---|---|---|---|---|",
    ]
    totals = [0, 0, 0, 0]
    for name in ROWS:
        found = re.search(rf"<!-- figures: papers-{name} -->\n(.*?)<!-- end", page, re.DOTALL)
        assert found is not None, name
        numbers = _agreement([cells for cells in cells_of(found[1]) if re.fullmatch(r"[\d.]+", cells[1])])
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        lines.append(f"| {_NAMES[name]} | {' | '.join(map(str, numbers))} |")
    return "\n".join([*lines, f"| all | {' | '.join(map(str, totals))} |"])


def _agreement(rows: Sequence[Sequence[str]]) -> list[int]:
    """Count the rows, those with a tick in either column, and those whose printed gain is between the two, or near."""
    between = 0
    for _, printed, overlapped, serial, *_ in rows:
        low, high = sorted(float(cell.removesuffix(TICK)) for cell in (overlapped, serial))
        reach = NEAR * abs(float(printed) - 1)
        between += low - reach <= float(printed) <= high + reach
    return [len(rows), *(sum(cells[i].endswith(TICK) for cells in rows) for i in (2, 3)), between]
