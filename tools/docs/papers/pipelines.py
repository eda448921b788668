"""Optimus-CC: the simulated steps of its pipelines (section 9), with the settings of the authors' scripts.

The scripts (ASPLOS23/tbl2_fig9_tbl4 of github.com/AIS-SNU/Optimus-CC) train in fp32, which PyTorch of that time
computes in TF32, with full recomputation and 1F1B. Gradients are sent after the last backward pass (`--DDP-impl
local`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from tools.docs.papers.lines import Line, ticked
from tools.docs.papers.settings import SHAPES, cluster
from towpath.core.formats import Precision
from towpath.core.passes import Compression
from towpath.core.passes import compression as named_compression
from towpath.core.strategy import TransferKind
from towpath.core.transport import Transport
from towpath.pipeline.schedules import walks
from towpath.plan.pipelines import Layout, Pipelines
from towpath.plan.request import Request
from towpath.plan.solver import Batching

# Rank 16 between stages, with error propagation as in the paper. Rank 128 of the gradients of three of four stages.
_PROPAGATED = Transport(codec="low-rank:16", feedback="first")
OPTIMUS = {
    "nothing": Compression(fused_embeddings=False),
    "CB": named_compression("optimus-cb", activation_gradients=_PROPAGATED),
    "CB + FE": named_compression("optimus-cb+fe", activation_gradients=_PROPAGATED),
    "CB + FE + SC": named_compression("optimus-cc"),
}
# Table 2: days of 230,000 steps.
DAYS = {
    "gpt-8.3b": {"nothing": 37.27, "CB": 34.83, "CB + FE": 32.84, "CB + FE + SC": 25.72},
    "gpt-2.5b": {"nothing": 14.72, "CB": 13.63, "CB + FE": 12.79, "CB + FE + SC": 12.55},
}
STEPS = 230_000
TF32 = 156e12  # the data sheet's peak of an A100


def _seconds(model: str, compression: str, pipeline: int = 4, tensor: int = 8) -> tuple[float, float]:
    """Return the seconds of a step with gradients sent at the end, as Megatron-LM 2.5 did, and as soon as possible."""
    here = replace(cluster("dgx-a100-200g", 16), peak=(("float32", TF32),))
    pipelines = Pipelines(
        lambda count: SHAPES[model].staged(model, 1024, count), here, Request(512, 1 << 60, Precision()), walks
    )
    layout = Layout(pipeline, "1F1B", "ddp", OPTIMUS[compression], tensor)
    replayed = pipelines.replay(layout, Batching(8, 512 // 8 // pipelines.copies(layout), True))
    hidden = (
        rank.in_flight.get(TransferKind.GRAD_SYNC, 0.0) - rank.exposed.get(TransferKind.GRAD_SYNC, 0.0)
        for rank in replayed.ranks
    )
    step = replayed.combined().seconds
    return step + max(hidden), step


def _baseline(model: str) -> list[str]:
    return [f"{seconds:.1f}" for seconds in _seconds(model, "nothing")]


def _gain(model: str, compression: str, printed: float | None, *layout: int) -> list[str]:
    pairs = zip(_seconds(model, "nothing", *layout), _seconds(model, compression, *layout), strict=True)
    return [ticked(before / after, printed) for before, after in pairs]


def lines() -> Iterator[Line]:
    """Yield the rows of Table 2 and Fig. 14."""
    for model, days in DAYS.items():
        printed = f"{days['nothing'] * 86400 / STEPS:.1f}"
        yield Line(("Table 2", f"seconds of a step, {model}", printed), partial(_baseline, model))
        for name in list(days)[1:]:
            what, gain = f"{name} / nothing, {model}, 128 A100", days["nothing"] / days[name]
            yield Line(("Table 2", what, f"{gain:.2f}"), partial(_gain, model, name, gain))
    for pipeline, tensor in ((4, 8), (8, 4), (16, 2)):
        what = f"CB + FE + SC / nothing, gpt-9.2b, {pipeline} stages × {tensor} tensor-parallel"
        yield Line(
            ("Fig. 14", what, "at least 1.19"), partial(_gain, "gpt-9.2b", "CB + FE + SC", None, pipeline, tensor)
        )
