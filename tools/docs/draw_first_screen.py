"""README's first screen: one row for each kind of network, and the picture of the loss over the minutes of training.

The first row is simulated (`tools.docs.draw_gpus`), the second measured (`python -m benchmarks exact`), and the third
computed from measured steps (`python -m benchmarks outer_time`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.suites import exact, outer_time
from tools.docs import draw_gpus, figures
from towpath.cli.plots import axes_of, color, standalone_svg

RATE, OUTER = "10mbit", "outer steps, int4"
# What the picture shows at `RATE`, and in which words.
CURVES = {
    OUTER: "Towpath,\nouter steps, int4",
    "torchft": "torchft,\nDiLoCo",
    "ddp gradients=int4:64": "Towpath,\nevery step, int4",
    outer_time.LOSSLESS: "Towpath,\nevery step, lossless",
}


def table() -> str:
    head = ("your network", "FSDP2", "HSDP", "Towpath", "gain over the faster", "how we know")
    return figures.table(head, [_simulated(), _measured(), _computed()])


def _simulated() -> figures.Row:
    """Return the step of a large model on two nodes of GPUs, with 100 Gbit/s between them."""
    found = [draw_gpus.TWO_NODES.predict(row).seconds for row in (*draw_gpus.PEERS, draw_gpus.EXACT)]
    steps = [f"{seconds:.2f} s, {draw_gpus.tokens_per_gpu(seconds)} tokens/s/GPU" for seconds in found]
    return (
        "100 Gbit/s, Llama-3-8B on 2 × 8 H100, gradients in bf16",
        *steps[:-1],
        f"**{steps[-1]}** ({draw_gpus.EXACT.title})",
        f"{min(found[:-1]) / found[-1]:.1f}×",
        "[simulated](docs/concepts/gpu-clusters.md#two-nodes)",
    )


def _measured() -> figures.Row:
    """Return the step of a small model with 200 Mbit/s: of the tuned peers, and ours with exact transport."""
    run = next(run for run in figures.runs("exact") if run["case"]["name"].startswith(exact.RATE))
    seconds: Mapping[str, float] = run["median_seconds"]
    ours = min((name for name in seconds if name.endswith(exact.EXACT)), key=seconds.__getitem__)
    peers = [seconds[exact.FSDP2], seconds[exact.HSDP]]
    return (
        "200 Mbit/s, GPT of 17 million on 2 × 2 CPU ranks",
        *(f"{each:.2f} s" for each in peers),
        f"**{seconds[ours]:.2f} s** (`{ours}`)",
        f"{min(peers) / seconds[ours]:.1f}×",
        "[measured](benchmarks/comparisons/exact.md), emulated links",
    )


def _computed() -> figures.Row:
    """Return the minutes to a loss at 10 Mbit/s: of lossless steps, and of outer steps."""
    here = {each.candidate: each for each in outer_time.times(outer_time.runs_of()) if each.inter == RATE}
    synchronous, outer, torchft = here[outer_time.LOSSLESS], here[OUTER], here["torchft"]
    minutes = [each.minutes(each.mean) for each in (synchronous, outer)]
    gains = [f"{each.mean / outer.mean:.1f}×" for each in (synchronous, torchft)]
    return (
        "10 Mbit/s, GPT of 10 million on 2 × 2 CPU ranks",
        "–",
        "–",
        f"**{minutes[1]} minutes** to a loss, {minutes[0]} without [outer steps](docs/guides/outer-steps.md)",
        f"{gains[0]} over lossless steps; {gains[1]} over torchft's DiLoCo",
        "[computed](benchmarks/comparisons/outer_time.md) from measured steps",
    )


def picture() -> str:
    return standalone_svg(draw, outer_time.runs_of(), (8.4, 3.2))


def draw(figure: Any, lines: Iterable[Mapping[str, Any]]) -> None:
    """Draw the mean curve of each candidate at 10 Mbit/s, until it reaches the loss."""
    lines = list(lines)
    axes = axes_of(figure, "minutes of training, links of 10 Mbit/s", "validation loss (nats a byte)")
    times = {each.candidate: each for each in outer_time.times(lines) if each.inter == RATE}
    losses: list[float] = []
    for number, (candidate, title) in enumerate(CURVES.items()):
        curves = [
            line["curve"] for line in lines if line["case"].get("candidate") == candidate and "seed" in line["case"]
        ]
        points = [
            (p[0][0] * times[candidate].step / 60, statistics.fmean(loss for _, loss in p))
            for p in zip(*curves, strict=True)
        ]
        end = times[candidate].mean / 60
        drawn = [point for point in points if 0 < point[0] <= end * 1.02]
        axes.plot(*zip(*drawn, strict=True), color=color(number), linewidth=1.8)
        axes.plot(*drawn[-1], "o", color=color(number), markersize=5)
        axes.annotate(
            f"{title}\n{end:.0f} minutes",
            drawn[-1],
            xytext=(0, -9),
            textcoords="offset points",
            ha="center",
            va="top",
            color=color(number),
        )
        losses.append(drawn[-1][1])
    axes.axhline(statistics.fmean(losses), color="#868e96", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, max(each.mean for each in times.values() if each.candidate in CURVES) / 60 * 1.12)
    axes.set_ylim(min(losses) - 0.5, 3.05)


TABLES = {"first-screen": table}
PICTURES = {figures.PICTURES_FOLDER / "loss-over-minutes.svg": picture}
