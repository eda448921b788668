"""One part at a time: what each idea of the papers wins on the laboratory, with everything else as it is.

    python benchmarks/ablations.py [CASE …] [--rounds 6] [--quick] [--resume]

Blocks wait instead of computing, as for devices of their own, so that the cores are left to what is measured: messages
and codecs. In each case the contestants take turns on the same cables, and the figures are ratios of their steps:

    kernels          zero++ with the codecs' kernels against zero++ with codecs in plain PyTorch
    parts …          zero++ of 64 million parameters: slices cut in parts, so that the hop inside a node runs beside the
                     hop between nodes, against whole slices, and against other limits for the smallest part
    spanning gather  MiCS with a partition group of two nodes: by the hierarchical route, against the flat ring and the
                     HO-Ring
    group sizes      MiCS with partition groups of two, four and eight ranks
    all-reduce       DDP's sums by the HO-Ring against the flat ring
    placements       PaRO's IGG and NIG (placements that Lins has, too) against MiCS and ZeRO++

Every run is added to benchmarks/results/ablations.jsonl.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from towpath.bench.environment import waiting
from towpath.bench.harness import race
from towpath.bench.harness.contestants import Cluster, Entry
from towpath.bench.harness.figures import ratio
from towpath.bench.harness.pool import started
from towpath.bench.harness.suite import Settings, Suite
from towpath.bench.steps import Step
from towpath.bench.workload import Workload
from towpath.core import routes
from towpath.topology.cluster import Topology

WARM_TURNS = 2
SQUARE, FOUR_NODES = Topology(2, 2), Topology(4, 2)
SMALL = waiting(Workload(SQUARE, dtype="bfloat16"))
EIGHT_RANKS = waiting(Workload(FOUR_NODES, dtype="bfloat16"))
# 64 million parameters in nine blocks, which wait as much longer as they are larger.
LARGE = replace(SMALL, width=768, wait_seconds=4 * (SMALL.wait_seconds or 0))
# What a contestant can be told besides its strategy.
PLAIN_TORCH, SMALLEST_PART = "in plain torch", "smallest part"


@dataclass(frozen=True, slots=True)
class Contestant:
    """`told`: PLAIN_TORCH, or SMALLEST_PART and KiB; nothing: the engine as it is."""

    strategy: str
    told: str = ""

    @property
    def name(self) -> str:
        return f"{self.strategy}, {self.told}" if self.told else self.strategy


def part(kib: int) -> Contestant:
    return Contestant("zero++", f"{SMALLEST_PART} {kib} KiB")


@dataclass(frozen=True, slots=True)
class Ablation:
    """On cables of the rate `inter`; `intra`: of the links inside a node. The first contestant against the others."""

    name: str
    workload: Workload
    contestants: Sequence[Contestant]
    inter: str | None
    intra: str | None = None

    def measure(self, settings: Settings) -> dict[str, Any]:
        workload = self.workload.quick() if settings.quick else self.workload
        place = Cluster(workload.topology, self.inter, self.intra)
        entries = {
            each.name: Entry(place, AblatedStep, (each.strategy, each.told, workload), WARM_TURNS)
            for each in self.contestants
        }
        with started(entries, settings.say) as made:
            run = race.run(made, settings.rounds, settings.say)
            told = {name: one.ask("facts")[0] for name, one in made.items()}
        first, *others = run.seconds
        return {
            "checks": [ratio(run.seconds, first, other) for other in others],
            "strategies": {name: facts["strategy"] for name, facts in told.items()},
            "exposed_seconds": {name: facts["exposed_seconds"] for name, facts in told.items()},
            **run.recorded(),
        }


class AblatedStep(Step):
    """The worker: a turn is one optimizer step."""

    def __init__(self, rank: int, world: int, strategy: str, told: str, workload: Workload) -> None:
        if told == PLAIN_TORCH:
            modules: dict[str, Any] = sys.modules
            modules["towpath.codecs.kernels.native"] = None  # as where nothing compiles them
        elif told:
            routes.SMALLEST_PART_BYTES = int(told.split()[-2]) << 10
        super().__init__(rank, world, strategy, workload)


def _named(*strategies: str) -> list[Contestant]:
    return [Contestant(strategy) for strategy in strategies]


_PARTS = [part(256), part(64), part(1024), part(1 << 20)]  # the last one: whole slices
_SPANNING = "mics group=2x2 route=hierarchical", "mics group=2x2 route=flat", "mics group=2x2 route=ho-ring"

CASES = [
    Ablation("kernels", SMALL, [Contestant("zero++"), Contestant("zero++", PLAIN_TORCH)], "400mbit"),
    Ablation("parts, cables of 100mbit", LARGE, _PARTS, "100mbit"),
    Ablation("parts, cables of 1gbit", LARGE, _PARTS, "1gbit"),
    Ablation("parts, cables of 100mbit and 400mbit inside", LARGE, _PARTS, "100mbit", "400mbit"),
    Ablation("spanning gather", EIGHT_RANKS, _named(*_SPANNING), "200mbit"),
    Ablation(
        "group sizes",
        EIGHT_RANKS,
        _named("mics", "mics group=2x2", "mics group=2x4"),
        "200mbit",
    ),
    Ablation("all-reduce", SMALL, _named("ddp route=ho-ring", "ddp"), "400mbit"),
    Ablation("placements, one micro-step", SMALL, _named("paro-igg", "mics", "hpz", "zero++"), "400mbit"),
    Ablation(
        "placements, four micro-steps",
        replace(SMALL, micro_steps=4),
        _named("paro-nig", "mics", "hpz", "zero++"),
        "400mbit",
    ),
]

SUITE = Suite("ablations", __doc__ or "", CASES)

if __name__ == "__main__":
    import ablations as suite  # ranks find by this name what they are sent

    suite.SUITE.main()
