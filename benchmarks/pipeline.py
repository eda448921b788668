"""Pipelines measured on the lab: against PyTorch's own with DDP stages, and with what Optimus-CC compresses.

    python benchmarks/pipeline.py [CASE …] [--rounds 6] [--quick] [--resume]

Four stages of a GPT, each on two ranks, and each rank on a node of its own, as where tensor parallelism fills a node:
both the messages between stages and the sums of gradients cross cables. A turn is one optimizer step, 1F1B, in fp32.

Cases `…mbit`: the same pipeline without compression, with compressed backpropagation (cb), fused embedding
synchronisation (fe), selective stage compression (sc), and with all stages compressed (sc-all); and without any on
cables of no limit, which shows the share of the step that its communication takes. Blocks wait, as for a device of
their own, and compute nothing: eight ranks on two cores would wait for one another. Cases `peer-…`: against
torch.distributed.pipelining with DDP stages, which compute and wait. Cases `coder…`: what making and undoing the
factors of a message takes, beside the transfer that they save. Every run is added to benchmarks/results/pipeline.jsonl.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from pipelines import TOPOLOGY, Piped, Sizes
from towpath.bench.harness import figures, race
from towpath.bench.harness.contestants import Cluster, Entry
from towpath.bench.harness.figures import Check
from towpath.bench.harness.pool import started
from towpath.bench.harness.suite import Settings, Suite
from towpath.core.transport import LowRank, Transport
from towpath.pipeline.stage import Encoding, Sender

BASELINE, UNSHAPED, PEER = "uncompressed", "uncompressed, unshaped", "torch, DDP stages"
PARTS = ("cb", "cb+fe", "cb+fe+sc", "cb+fe+sc-all")
# What the paper's headline says of its model of 8.3 billion parameters, as multiples of the baseline's speed.
HEADLINES = {"cb+fe": 1.135, "cb+fe+sc": 1.449}
WARM_TURNS = 3
AS_PAPER = "100mbit"
UNTIED = Sizes(tied=False)
SIZES = Sizes(vocabulary=1024, batch=8, length=128, micro_batches=4, wait_seconds=0.02, computes=False)


@dataclass(frozen=True, slots=True)
class Compressed:
    inter: str
    sizes: Sizes = SIZES

    @property
    def name(self) -> str:
        return self.inter

    def measure(self, settings: Settings) -> dict[str, Any]:
        sizes = self.sizes.quick() if settings.quick else self.sizes
        cluster = Cluster(TOPOLOGY, self.inter)
        entries = {name: Entry(cluster, Piped, (name, sizes), WARM_TURNS) for name in (BASELINE, *PARTS)}
        entries[UNSHAPED] = Entry(Cluster(TOPOLOGY), Piped, (BASELINE, sizes), WARM_TURNS)
        with started(entries, settings.say) as made:
            run = race.run(made, settings.rounds, settings.say)
            facts = {name: one.ask("facts")[0] for name, one in made.items()}
        headlines = HEADLINES if self.inter == AS_PAPER else {}
        return {
            "checks": [_times_as_fast(run.seconds, part, headlines.get(part)) for part in PARTS],
            "share of communication": round(1 - figures.ratio(run.seconds, UNSHAPED, BASELINE).found, 4),
            "facts": facts,
            **run.recorded(),
        }


def _times_as_fast(seconds: dict[str, list[float]], part: str, at_least: float | None) -> Check:
    found = figures.ratio(seconds, BASELINE, part)
    return Check(f"{part}: times as fast", found.found, at_least=at_least, interval=found.interval)


@dataclass(frozen=True, slots=True)
class Peer:
    """Untied, since PyTorch's stages know nothing of tied embeddings."""

    inter: str | None
    sizes: Sizes = UNTIED
    most: float = 1.03

    @property
    def name(self) -> str:
        return f"peer-{self.inter or 'unshaped'}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        sizes = self.sizes.quick() if settings.quick else self.sizes
        cluster = Cluster(TOPOLOGY, self.inter)
        entries = {name: Entry(cluster, Piped, (name, sizes), WARM_TURNS) for name in (BASELINE, PEER)}
        with started(entries, settings.say) as made:
            run = race.run(made, settings.rounds, settings.say)
        return {"checks": [figures.ratio(run.seconds, BASELINE, PEER, self.most)], **run.recorded()}


@dataclass(frozen=True, slots=True)
class Coder:
    """What making and undoing the factors of a message takes of the transfer that they save, in one thread."""

    rank: int
    sizes: Sizes = SIZES
    bits: float = 200e6  # a second, of the cable
    most: float = 0.1

    @property
    def name(self) -> str:
        return f"coder, rank {self.rank}"

    def measure(self, settings: Settings) -> dict[str, Any]:
        sizes = self.sizes.quick() if settings.quick else self.sizes
        shape = (sizes.batch, sizes.length, sizes.width)
        transport = Transport(codec=f"low-rank:{self.rank}", feedback="first")
        encoding = Encoding(shape, torch.float32, transport)
        torch.set_num_threads(1)
        sender, x = Sender(encoding, torch.device("cpu"), "a message"), torch.randn(shape)
        taken: list[float] = []
        for _ in range(5 * settings.rounds):
            began = time.perf_counter()
            encoding.decoded(sender.encoded(x))
            taken.append(time.perf_counter() - began)
        codec = LowRank(self.rank)
        saved = 32 * (prod(shape) - codec.encoded_elements(shape)) / self.bits
        share = statistics.median(taken) / saved
        return {
            "checks": [Check("compress and decompress: share of the transfer saved", share, self.most)],
            "seconds": [round(s, 7) for s in taken],
            "saved_seconds": round(saved, 6),
            "kept bytes": 4 * codec.kept_elements(shape, feedback=True),
            "message bytes": 4 * prod(shape),
        }


CASES: list[Compressed | Peer | Coder] = [
    *(Coder(rank) for rank in (4, 8, 16)),
    *(Compressed(inter) for inter in ("50mbit", AS_PAPER, "200mbit", "500mbit")),
    *(Peer(inter) for inter in (None, "200mbit", "50mbit")),
]

SUITE = Suite("pipeline", __doc__ or "", CASES)

if __name__ == "__main__":
    SUITE.main()
