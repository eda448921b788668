"""The engine measured on the lab: against PyTorch's own, against its own parts, and over many steps.

    python benchmarks/engine.py [CASE …] [--rounds 6] [--quick] [--resume]

A race (races.py) runs each contestant on ranks and cables of its own, and lets them take turns; a turn is one optimizer
step, between barriers, and the ratio is of the medians. Peers (peers.py) come plain, and as their experts tune them.
An overlap case (overlap.py) takes turns between a step, the same step with its transfers left out, and the same
transfers with nothing computed. A steady case (steady.py) makes 200 steps and watches memory. Every run is added to
benchmarks/results/engine.jsonl; `python benchmarks/report.py engine` shows them.
"""

from __future__ import annotations

import towpath
from overlap import Overlap
from races import Field, Race
from steady import Steady
from towpath.bench.harness.suite import Suite
from towpath.bench.workload import PLAIN, SHORT, TINY, Workload

# Communication over compute. The first cases had 200 mbit once, where FSDP2 communicated six times as long as the
# module computed; codecs are judged where it is eight.
NARROW, CODECS = 6.0, 8.0
WAIT_SECONDS = 0.0155  # of each block, so that with short sequences it "computes" about as long as two cores would

ACCUMULATED = Workload(micro_steps=4)
TEN_BF16 = Workload(micro_steps=10, dtype="bfloat16")
ONE_BF16 = Workload(dtype="bfloat16", batch=1)
ELSEWHERE = Workload(dtype="bfloat16", batch=1, length=SHORT, wait_seconds=WAIT_SECONDS)

QUANTIZED_MICS = "mics gradients=int4"
CODED = (
    *("zero3", "zero++", "qwz", "hpz", "qgz", "zero3 route=hierarchical", "fsdp2", "fsdp2 tuned"),
    *("hsdp", "hsdp tuned", "mics", QUANTIZED_MICS),
)
ALONE = tuple((technique, "zero3", 1 / 1.2) for technique in ("qwz", "hpz", "qgz"))
BALANCED = (
    ("zero++-zero3", "zero++", "zero3", 1 / 3),
    ("zero++-zero3-hierarchical", "zero++", "zero3 route=hierarchical", 1 / 2),
    ("zero++-hsdp", "zero++", "hsdp", 1 / 1.9),
    ("mics-quantized", QUANTIZED_MICS, "mics", 1 / 2),
)
PEERS = (
    *("zero3", "zero3 route=hierarchical", "hpz", "mics", "ddp"),
    *("fsdp2", "fsdp2 tuned", "fsdp2 tuned reshard=2", "fsdp2 tuned reshard=no"),
    *("hsdp", "hsdp tuned", "torch-ddp", "torch-ddp tuned"),
)

CASES: list[Race | Field | Overlap | Steady] = [
    Race("zero3-fsdp2", "zero3", "fsdp2", 0.75, PLAIN, regime=NARROW),
    Race("mics-hsdp", "mics", "hsdp", 0.85, PLAIN, regime=NARROW),
    Race("mics-hsdp-4", "mics", "hsdp", 0.90, ACCUMULATED, regime=NARROW),
    Race("zero3-fsdp2-unshaped", "zero3", "fsdp2", 1.0, PLAIN),
    Race("one-rank", "zero3", "bare", 1.03, Workload(towpath.Topology(1, 1))),
    Race("zero3-hierarchical-fsdp2", "zero3 route=hierarchical", "fsdp2", 0.55, PLAIN, regime=NARROW),
    Race("paro-nig-zero2", "paro-nig", "zero2", 1 / 2.2, TEN_BF16, regime=NARROW),
    Race("paro-iig-zero3", "paro-iig", "zero3", 1 / 2.6, TEN_BF16, regime=NARROW),
    Race("mics-zero3", "mics", "zero3", 1 / 2.89, Workload(micro_steps=4, dtype="bfloat16"), regime=NARROW),
    *(Race(name, ours, theirs, most, ONE_BF16, regime=CODECS) for name, ours, theirs, most in BALANCED),
    *(Race(f"{name}-elsewhere", ours, theirs, most, ELSEWHERE, regime=CODECS) for name, ours, theirs, most in BALANCED),
    Race("codecs-that-cannot-pay", "zero++", "hpz", 1.03, Workload(dtype="bfloat16")),
    Race("codecs-of-tiny-tensors", "zero++", "hpz", 1.03, Workload(dtype="bfloat16", width=TINY)),
    Field("codecs-50mbit", CODED, workload=ONE_BF16, inter="50mbit"),
    Field("codecs-200mbit", CODED, ALONE, workload=ONE_BF16, inter="200mbit"),
    Field("codecs-500mbit", CODED, workload=ONE_BF16, inter="500mbit"),
    Field("codecs-1gbit", CODED, workload=ONE_BF16, inter="1gbit"),
    Field("peers", PEERS, workload=PLAIN, regime=NARROW),
    Field("peers-4", (*PEERS, "fsdp2 tuned sync=last"), workload=ACCUMULATED, regime=NARROW),
    Overlap("overlap-zero3", "zero3", "200mbit", elsewhere=True),
    Overlap("overlap-zero3-shared-cores", "zero3", "200mbit"),
    Overlap("overlap-zero3-own-cores", "zero3", "200mbit", towpath.Topology(2, 1)),
    Steady("steady-zero3", "zero3"),
    Steady("steady-paro-iig", "paro-iig"),
]

SUITE = Suite("engine", __doc__ or "", CASES)

if __name__ == "__main__":
    SUITE.main()
