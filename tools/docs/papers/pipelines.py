"""Optimus-CC: the simulated steps of its pipelines (section 9)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tools.docs.papers.lines import Line, Table
from tools.docs.papers.settings import SHAPES, cluster
from towpath.core.passes import Compression
from towpath.core.passes import compression as named_compression
from towpath.core.strategy import TransferKind
from towpath.pipeline.schedules import walks
from towpath.plan.pipelines import Layout, Pipelines
from towpath.plan.request import Request
from towpath.plan.solver import Batching

# Rank 16 between stages, rank 128 of the gradients of three quarters of the stages.
OPTIMUS = {
    "nothing": Compression(fused_embeddings=False),
    "CB": named_compression("optimus-cb"),
    "CB + FE": named_compression("optimus-cb+fe"),
    "CB + FE + SC": named_compression("optimus-cb+fe+sc"),
}
# Days of 230,000 steps.
DAYS = {
    "gpt-8.3b": {"nothing": 37.27, "CB": 34.83, "CB + FE": 32.84, "CB + FE + SC": 25.72},
    "gpt-2.5b": {"nothing": 14.72, "CB": 13.63, "CB + FE": 12.79, "CB + FE + SC": 12.55},
}
STEPS = 230_000
# A node's cable, in GB/s: as in the data sheet (None), and as the paper's seconds of a step suggest.
CABLES = (None, 5.0)
NO_LIMIT = 1e6


def _pipelines(model: str, cable: float | None, nodes: int) -> Pipelines:
    shape, length = SHAPES[model], 1024 if model != "gpt-175b" else 2048
    return Pipelines(
        lambda count: shape.staged(model, length, count),
        cluster("dgx-a100-200g", nodes, cable),
        Request(batch=512, memory=1 << 60),
        walks,
    )


def seconds(
    model: str, compression: str, cable: float | None, pipeline: int = 4, tensor: int = 8, nodes: int = 16
) -> tuple[float, float]:
    """Return the seconds of a step with early gradients, and with late ones.

    An interleaved pipeline has two stages on each rank. A step has 512 sequences, eight at once, and each stage has
    four copies. Early gradients are sent as soon as they are ready. Late ones are sent after all of them are, as in
    Megatron-LM 2.5.
    """
    pipelines = _pipelines(model, cable, nodes)
    layout = Layout(pipeline, "Interleaved1F1B", "ddp", OPTIMUS[compression], tensor)
    replayed = pipelines.replay(layout, Batching(8, 512 // 8 // pipelines.copies(layout)))
    hidden = (
        rank.in_flight.get(TransferKind.GRAD_SYNC, 0.0) - rank.exposed.get(TransferKind.GRAD_SYNC, 0.0)
        for rank in replayed.ranks
    )
    step = replayed.combined().seconds
    return step, step + max(hidden)


def _speedups() -> Iterator[Line]:
    # Without ticks: dtype, recomputation, schedule and the size of messages differ from those of the paper.
    def cells(model: str, name: str) -> Iterator[str]:
        late: list[str] = []
        for cable in CABLES:
            base, found = (seconds(model, each, cable) for each in ("nothing", name))
            yield from (f"{before / after:.2f}" for before, after in zip(base, found, strict=True))
            late.append(f"{found[1]:.1f} s")
        yield from late

    for model, days in DAYS.items():
        for name, printed in days.items():
            ratio = days["nothing"] / printed
            known = (f"{model}, {name}", f"{ratio:.2f}", f"{printed * 86400 / STEPS:.1f} s")
            yield Line(known, partial(cells, model, name))


def _layouts() -> Iterator[Line]:
    """Fig. 14: four copies of GPT-9.2B, and Fig. 16's largest model."""

    def cells(model: str, pipeline: int, tensor: int, nodes: int) -> Iterator[str]:
        for cable in CABLES:
            late = {name: seconds(model, name, cable, pipeline, tensor, nodes)[1] for name in OPTIMUS}
            yield from (f"{late['nothing'] / late[name]:.2f}" for name in ("CB", "CB + FE + SC"))

    for pipeline, tensor in ((4, 8), (8, 4), (16, 2)):
        known = (f"gpt-9.2b, {pipeline} ranks × {tensor} tensor-parallel", "at least 1.19")
        yield Line(known, partial(cells, "gpt-9.2b", pipeline, tensor, 16))
    known = ("gpt-175b, 16 ranks × 8 tensor-parallel, 512 A100", "–")
    yield Line(known, partial(cells, "gpt-175b", 16, 8, 64))


def _overheads() -> Iterator[Line]:
    """Fig. 10: what communication between nodes adds to a step, by switching it off. Fig. 12: memory."""

    def cells(model: str, name: str) -> Iterator[str]:
        for cable in CABLES:
            before, after = (seconds(model, each, cable)[1] for each in ("nothing", name))
            without = seconds(model, "nothing", NO_LIMIT)[1]
            yield f"{100 * (after - without) / (before - without) - 100:+.0f} %".replace("-", "−")
        held: list[int] = []
        for each in ("nothing", name):
            layout = Layout(4, "Interleaved1F1B", "ddp", OPTIMUS[each], 8)
            held.append(_pipelines(model, None, 16).predict(layout, Batching(8, 16)).peak_bytes)
        yield f"{100 * held[1] / held[0] - 100:+.1f} %"

    for model in DAYS:
        for name in list(OPTIMUS)[1:]:
            overhead = "−63.29 %" if (model, name) == ("gpt-8.3b", "CB + FE + SC") else "–"
            memory = "+5 to +10 %" if name == "CB" else "–"
            yield Line((f"{model}, {name}", overhead, memory), partial(cells, model, name))


def tables() -> dict[str, Table]:
    heads = ("what", "printed", "a step, printed", "overlapped", "at the end")
    heads += ("5 GB/s, overlapped", "5 GB/s, at the end", "a step, at the end", "5 GB/s, a step, at the end")
    overheads = ("what", "communication, printed", "memory, printed")
    overheads += ("communication", "5 GB/s, communication", "memory")
    layouts = ("layout", "printed, all three", "CB", "all three", "5 GB/s, CB", "5 GB/s, all three")
    return {
        "papers-pipelines": Table(heads, tuple(_speedups())),
        "papers-pipeline-overheads": Table(overheads, tuple(_overheads())),
        "papers-pipeline-layouts": Table(layouts, tuple(_layouts())),
    }
