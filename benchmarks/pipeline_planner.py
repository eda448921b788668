"""Predicted against measured steps of pipelines: twelve settings on the lab, by the planner and run.

    python benchmarks/pipeline_planner.py [CASE …] [--rounds 6] [--quick] [--resume]

Four stages (or eight, where a schedule has two on each rank) of a GPT on eight ranks, each on a node of its own. On
ranks of their own `towpath probe` measures the cluster, and then each rank the units of its stages; nothing else enters
the predictions. Then every setting runs, in processes of its own, in turns. What comes out: the error of each predicted
step, and whether as many bytes were planned as the job's schedule has, which the kernel's counters confirm
(tests/lab/test_pipeline_bytes.py). The last case runs zero-bubble schedules twice: with the weights' gradients later,
and all at once. Every run is added to benchmarks/results/pipeline_planner.jsonl.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline_prediction import COMPUTING, WAITING, Predicted, Setting
from towpath.bench.harness.suite import Suite

CASES = [
    Predicted("100mbit", (Setting(), Setting(compression="cb"), Setting("GPipe", "zero1"), Setting("Interleaved1F1B"))),
    Predicted(
        "200mbit",
        (
            Setting(compression="cb+fe", tied=True),
            Setting("InterleavedZeroBubble", "zero1"),
            Setting("ZBVZeroBubble"),
            Setting(strategy="zero3"),
        ),
        COMPUTING,
    ),
    Predicted(
        "50mbit",
        (
            Setting(compression="cb+fe+sc", tied=True),
            Setting("LoopedBFS"),
            Setting(strategy="zero2"),
            Setting("GPipe", "ddp", "cb"),
        ),
    ),
    Predicted(
        None,
        tuple(
            Setting(schedule, "zero1", at_once=at_once)
            for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble")
            for at_once in (False, True)
        ),
        replace(WAITING, batch=1, length=32, micro_batches=8, halves=True),
        "zero bubble",
    ),
]

SUITE = Suite("pipeline_planner", __doc__ or "", CASES)

if __name__ == "__main__":
    SUITE.main()
