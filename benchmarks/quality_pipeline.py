"""What Optimus-CC's compression costs in quality: a small GPT in four stages, trained with each part of it.

    python benchmarks/quality_pipeline.py [RUN …] [--steps 400] [--seeds 5] [--quick] [--resume]
    python benchmarks/draw_quality_pipeline.py

Eight ranks, four stages of two data-parallel ranks, read the bytes of the Python standard library's sources; the last
tenth is held out. A variant and a seed are one run; what is judged (draw_quality_pipeline.py) is its perplexity on what
is held out against that of `baseline` with the same seed, in the mean over the seeds. `control` differs from it only in
the order of a batch's micro-batches, and so in the order of sums: what it differs by is no one's fault. `naive`
encodes all gradients, of messages and of stages, and keeps nothing of what it misses. Every run is added to
benchmarks/results/quality_pipeline.jsonl.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import pipelines
from pipelines import COPIES, STAGES, TOPOLOGY, Sizes
from quality import Result, of_seeds, windows
from towpath import lab
from towpath.bench import gpt
from towpath.bench.harness.figures import Check
from towpath.bench.harness.suite import Settings, Suite
from towpath.core.transport import Transport
from towpath.pipeline import Compression, Pipeline

SIZES = Sizes(
    *(128, 8, 4, gpt.VOCABULARY),
    batch=1,
    length=64,
    micro_batches=16,  # as the paper: four times as many as stages, so that one message in eight is exposed
    wait_seconds=0.0,
    rank=16,
    gradient_rank=16,
)
PEAK = 4e-3
WARM_UP = 52  # steps before stages' gradients are encoded: 13 % of 400, the paper's 30 of 230 thousand
# Stands in every result: only runs of one setting are compared (draw_quality_pipeline.py).
SETTING = {"sizes": asdict(SIZES), "peak": PEAK, "warm_up": WARM_UP}
EVERY, BATCHES, BATCHES_AT_THE_END = 40, 4, 32  # steps between validations; batches of each copy
QUICK_STEPS = 2


def _naive() -> Compression:
    """No feedback anywhere."""
    message, gradient = (Transport(codec=f"low-rank:{rank}") for rank in (SIZES.rank, SIZES.gradient_rank))
    return Compression(message, gradients=gradient, every_gradient=True, share_of_stages=1.0)


def _selective() -> Compression:
    found = pipelines.compression_of("cb+fe+sc", SIZES)
    return replace(found, gradients=replace(found.gradients, after=WARM_UP))


COMPRESSIONS = {
    "baseline": pipelines.compression_of("uncompressed", SIZES),
    "control": pipelines.compression_of("uncompressed", SIZES),
    "cb": pipelines.compression_of("cb", SIZES),
    "cb+fe": pipelines.compression_of("cb+fe", SIZES),
    "cb+fe+sc": _selective(),
    "naive": _naive(),
}


@dataclass(frozen=True, slots=True)
class Run:
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        steps = QUICK_STEPS if settings.quick else settings.options.steps
        with lab.Lab(TOPOLOGY, inter=None) as cluster:
            found: Result = cluster.call(train, self.variant, self.seed, steps, timeout_seconds=3600)[0]
        checks = [Check("final loss, nats a byte", found.final)]
        return {"checks": checks, "steps": steps, "setting": SETTING, **asdict(found)}


RUNS = [Run(variant, seed) for seed in range(5) for variant in COMPRESSIONS]


def train(rank: int, world: int, variant: str, seed: int, steps: int) -> Result:
    torch.set_num_threads(1)
    text = gpt.corpus()
    split = len(text) // 10 * 9
    mesh = pipelines.mesh_of_nodes()
    copy = mesh["dp"].get_local_rank()
    pipeline = Pipeline(
        [partial(pipelines.Stage, SIZES, index, seed) for index in range(STAGES)],
        "ddp",
        mesh=mesh,
        micro_batches=SIZES.micro_batches,
        loss=pipelines.loss_of,
        example=torch.zeros(SIZES.batch, SIZES.length, dtype=torch.int64),
        compression=COMPRESSIONS[variant],
        tied=("tokens", "head"),
    )
    optimizer = torch.optim.AdamW(list(pipeline.parameters()), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data = batches(text[:split], 1000 * seed + copy, reverse=variant == "control")
    curve: list[tuple[int, float]] = []
    for step in range(steps):
        if step % EVERY == 0:
            curve.append((step, validation(pipeline, text[split:], copy, BATCHES)))
        warm = min((step + 1) / 40, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = PEAK * warm * (1 + math.cos(math.pi * step / steps)) / 2
        ids, targets = next(data)
        pipeline.step(ids, target=targets)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    curve.append((steps, validation(pipeline, text[split:], copy, BATCHES)))
    return Result(curve, validation(pipeline, text[split:], copy, BATCHES_AT_THE_END))


def batches(text: Tensor, seed: int, reverse: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """The same samples, micro-batch by micro-batch, in one order or the other."""
    generator = torch.Generator().manual_seed(seed)
    count = SIZES.batch * SIZES.micro_batches
    while True:
        starts = torch.randint(len(text) - SIZES.length - 1, (count,), generator=generator)
        yield windows(text, starts.flip(0) if reverse else starts, SIZES.length)


def validation(pipeline: Pipeline, text: Tensor, copy: int, count: int) -> float:
    """The mean loss on windows of the held-out text, `count` batches of each copy."""
    each = SIZES.batch * SIZES.micro_batches
    starts = torch.linspace(0, len(text) - SIZES.length - 2, count * each * COPIES).long()[copy::COPIES]
    total = torch.zeros(())
    for part in starts.split(each):
        ids, targets = windows(text, part, SIZES.length)
        total += pipeline.evaluate(ids, target=targets) / count
    torch.distributed.all_reduce(total)
    return total.item() / torch.distributed.get_world_size()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5, help="at most 5")


SUITE = Suite("quality_pipeline", __doc__ or "", RUNS, options=add_options, chosen=of_seeds)

if __name__ == "__main__":
    SUITE.main()
