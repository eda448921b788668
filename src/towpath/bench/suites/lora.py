"""LoRA over slow links: what a step costs beside the computation alone, where most of the model does not train.

    towpath bench lora [CASE …] [--rounds 6] [--quick] [--resume]

Two nodes of two ranks train PEFT's adapters of a GPT. The cables are such that FSDP2's communication alone takes four
times what the module computes; that a whole step of FSDP2, plain and as its experts tune it, takes at least three times
as long as the computation is checked in the race. FSDP2 has the same parameters frozen, and reduces no gradients of
them. Ours keep them in the node: by default (`zero3`), with all else (`mics`), there in int8, or beside adapters that
every rank holds whole (`ddp frozen=2x1`); or whole on every rank (`frozen=1x1`), where there is memory for that, as DDP
has them. `bare` is the computation with clipping and AdamW, all that a step of one process does. With `barrier` the
ranks wait for each other once a step, as all must that sum gradients: no placement can take less.

In `lora` all ranks compute on the machine's own cores, where whatever sends and receives competes with it; in
`lora-elsewhere` blocks wait instead, as for a device of their own. Needs `pip install 'towpath[peft]'`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from towpath.bench.environment import COMMUNICATION, COMPUTE, Rates, regime_recorded, waiting
from towpath.bench.harness import figures
from towpath.bench.harness.suite import Settings, Suite
from towpath.bench.suites.strategies import Entrant, measured
from towpath.bench.venue import Venue
from towpath.bench.workload import Workload

RANK = 8
REGIME = 4.0  # so that a step that overlaps all it can still takes three times the computation
MOST = 1.15
OURS = ("zero3", "mics", "mics frozen_codec=int8", "ddp frozen=2x1", "mics frozen=1x1", "ddp frozen=1x1")
PEERS = ("fsdp2", "fsdp2 tuned")
WHOLE = "torch-ddp tuned"
BARE, IN_STEP = "bare", "bare barrier"
# All at once are more ranks than a machine of 24 GiB holds where each computes a model of its own.
FEWER = ("mics", "ddp frozen=2x1", "mics frozen=1x1", "ddp frozen=1x1")
_RATES = Rates()


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    workload: Workload
    ours: tuple[str, ...] = OURS
    beside: tuple[str, ...] = (BARE, IN_STEP, WHOLE)

    @property
    def pairs(self) -> Iterator[tuple[str, str, float | None]]:
        """What is asked; and what is not, and tells what is to be won."""
        yield from ((ours, COMPUTE, MOST) for ours in self.ours)
        yield from ((COMPUTE, peer, 1 / 3) for peer in PEERS)
        yield from ((other, COMPUTE, None) for other in self.beside)
        yield from ((ours, IN_STEP, None) for ours in self.ours)
        yield "ddp frozen=1x1", WHOLE, None

    def measure(self, settings: Settings) -> dict[str, Any]:
        workload = self.workload.quick() if settings.quick else self.workload
        derived = _RATES.of(REGIME, workload, settings.say, settings.pool)
        names = (*self.ours, *PEERS, *self.beside)
        entrants = [Entrant.of(name, workload.topology, workload.dtype) for name in names]
        found, failures = measured(entrants, Venue(None, derived.rate), workload, settings)
        seconds: dict[str, list[float]] = found.pop("run").seconds
        usual = figures.medians(seconds)
        regime, warnings = regime_recorded(derived, usual[COMMUNICATION] / usual[COMPUTE])
        return {
            "checks": [
                figures.ratio(seconds, ours, theirs, most)
                for ours, theirs, most in self.pairs
                if not failures.keys() & {ours, theirs}
            ],
            "warnings": warnings,
            "regime": regime,
            "skipped": failures,
            **found,
        }


CASES = [
    Case("lora", Workload(adapters=RANK), FEWER, (IN_STEP, WHOLE)),
    Case("lora-elsewhere", replace(waiting(Workload()), dtype="float32", adapters=RANK)),
]

SUITE = Suite("lora", __doc__ or "", CASES)
