"""Measure what outer steps cost in validation loss at equal tokens: the small GPT of `quality`, trained on four ranks.

    outer_quality [RUN …] [--steps 1200] [--seeds 3] [--quick] [--resume]

In the center, two islands of two ranks exchange their weights every 32 steps, in int4 with error feedback, without a
delay, and with AdamW inside. Most variants differ from it in one setting, and none is tuned. A blend needs a delay. A
variant is judged by its final loss against synchronous training with the same optimizer and seed. The control reads the
data in another order of ranks. Its difference is due to chance. At the end of a run, `towpath.average_islands` gives
all islands the mean of their weights.

A run takes three minutes on two cores, and longer with Muon. All runs take three hours.

`python -m benchmarks report outer_quality` judges the variants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import lab
import towpath
from benchmarks.harness.suite import Settings, Suite
from benchmarks.islands import AVERAGED, PRESET, OuterSpec
from benchmarks.suites.quality import (
    PEAK,
    Judged,
    Result,
    VariantRun,
    adamw,
    add_options,
    curves,
    judged,
    of_seeds,
    recorded,
    runs_of,
    spread_of,
    train_under,
)
from towpath import Topology
from towpath.optim import chain, owner_stepped

STEPS, QUICK_STEPS = 1200, 4
SEEDS = 3
EVERY = 64  # steps between validations, a multiple of all periods
TWO, FOUR = Topology(2, 2), Topology(4, 1)
BASELINE, CONTROL, MUON = "synchronous", "control", "synchronous, Muon"
CENTER = "center"


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to train. Without `spec` it is synchronous. With `shift`, each rank reads the data of another."""

    spec: OuterSpec | None = field(default_factory=OuterSpec)
    topology: Topology = TWO
    muon: bool = False
    shift: int = 0

    @property
    def strategy(self) -> towpath.Strategy:
        """The strategy."""
        return towpath.strategy(PRESET, self.topology) if self.spec is None else self.spec.strategy(self.topology)


VARIANTS = {
    BASELINE: Variant(None),
    CONTROL: Variant(None, shift=1),
    CENTER: Variant(),
    "every 8": Variant(OuterSpec(every=8)),
    "every 64": Variant(OuterSpec(every=64)),
    "4 islands": Variant(topology=FOUR),
    "averaged": Variant(OuterSpec(optimizer=AVERAGED)),
    "fp32": Variant(OuterSpec("fp32")),
    "delay 8": Variant(OuterSpec(delay=8)),
    "delay 8, blend 0.5": Variant(OuterSpec(delay=8, blend=0.5)),
    MUON: Variant(None, muon=True),
    "Muon": Variant(muon=True),
}


def muon(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Muon for the matrices of the blocks, scaled so that AdamW's rate suits it, and AdamW for the others."""
    matrices = [p for p in parameters if p.dim() == 2 and isinstance(p, towpath.ShardTensor) and p.shard_spec.unit]
    chosen = set(map(id, matrices))
    inner = torch.optim.Muon(matrices, lr=PEAK, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return chain(owner_stepped(inner), adamw([p for p in parameters if id(p) not in chosen]))


class OuterQualityRun(VariantRun):
    """A variant with a seed, trained on ranks of the lab."""

    __slots__ = ()

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Train in the lab."""
        steps, variant = QUICK_STEPS if settings.quick else settings.options.steps, VARIANTS[self.variant]
        with lab.Lab(variant.topology, inter=None) as cluster:
            found: Result = cluster.call(train, self.variant, self.seed, steps, timeout_seconds=7200)[0]
        return recorded(found, steps, variant.strategy)


def train(rank: int, world: int, name: str, seed: int, steps: int) -> Result:
    """Train a variant on one rank."""
    variant = VARIANTS[name]
    optimizer_of = muon if variant.muon else adamw
    return train_under(variant.strategy, seed, steps, variant.shift, optimizer_of, EVERY)


RUNS = [OuterQualityRun(variant, seed) for seed in range(SEEDS) for variant in VARIANTS]


# Judgment -------------------------------------------------------------------------------------------------------------


def rows_of(runs: Iterable[Mapping[str, Any]]) -> list[Judged]:
    """Return the variants, each judged against synchronous training with the same optimizer."""
    found = list(map(dict, runs))
    with_adamw = [name for name, variant in VARIANTS.items() if not variant.muon]
    with_muon = [name for name, variant in VARIANTS.items() if variant.muon]
    return [*judged(found, [*with_adamw, MUON], BASELINE, float), *judged(found, with_muon, MUON, float)]


def measured_runs() -> list[dict[str, Any]]:
    """Return the last run of each variant and seed in the setting that the suite has now."""
    return runs_of("outer_quality", STEPS)


def picture() -> str:
    """Return the picture of the suite: losses by step, and their differences from those of the baselines."""
    runs = measured_runs()
    baselines = {name: MUON if variant.muon else BASELINE for name, variant in VARIANTS.items()}
    return curves(runs, list(VARIANTS), spread_of(rows_of(runs)), baselines)


def summary() -> str:
    """Return each variant's final loss over that of its baseline, with the 95 % interval of the mean."""
    runs = measured_runs()
    rows = [
        f"{row} of the loss of {MUON if VARIANTS[row.variant].muon and row.variant != MUON else BASELINE} training"
        for row in rows_of(runs)
    ]
    return "\n".join([f"{len(runs)} of {len(RUNS)} runs of the current setting", *rows])


SUITES = (
    Suite(
        "outer_quality",
        __doc__ or "",
        RUNS,
        options=partial(add_options, steps=STEPS, seeds=SEEDS),
        chosen=of_seeds,
        summary=summary,
    ),
)
