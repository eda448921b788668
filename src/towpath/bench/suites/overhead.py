"""What the engine costs where nothing is to be sent: one rank beside the bare module, and its own time on the host.

    towpath bench overhead [CASE …] [--rounds 6] [--quick] [--resume]

A turn is one optimizer step. A strategy of one rank is to take at most 1.03 of the bare module's time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import towpath
from towpath.bench.harness import figures, race
from towpath.bench.harness.contestants import Cluster, Entry
from towpath.bench.harness.figures import Check
from towpath.bench.harness.pool import started
from towpath.bench.harness.suite import Settings, Suite
from towpath.bench.steps import Step
from towpath.bench.workload import Workload

BARE = "bare"
PEERS = ("fsdp2", "fsdp2 tuned", "torch-ddp")
AT_MOST = 1.03
WARM_TURNS = 2


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    strategy: str
    workload: Workload

    def measure(self, settings: Settings) -> dict[str, Any]:
        workload = self.workload.quick() if settings.quick else self.workload
        names = (self.strategy, BARE, *PEERS)
        place = Cluster(workload.topology)
        entries = {name: Entry(place, Step, (name, workload), WARM_TURNS) for name in names}
        with started(entries, settings.say) as made:
            run = race.run(made, settings.rounds, settings.say)
            [told] = made[self.strategy].ask("facts")
        return {
            "checks": [
                figures.ratio(run.seconds, self.strategy, BARE, AT_MOST),
                *(figures.ratio(run.seconds, peer, BARE) for peer in PEERS),
                Check("the engine's own time on the host / step", told["host_share"]),
            ],
            **run.recorded(),
            "stats": told["stats"],
        }


_ONE = towpath.Topology(1, 1)
CASES = [
    Case(f"{name}-micro{micro_steps}", name, Workload(_ONE, micro_steps))
    for name in ("zero3", "mics")
    for micro_steps in (1, 4)
]

SUITE = Suite("overhead", __doc__ or "", CASES)
