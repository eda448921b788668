"""Memory over many steps."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import towpath
from towpath import lab
from towpath.bench import gpt
from towpath.bench.harness.figures import Check
from towpath.bench.harness.suite import Settings
from towpath.bench.steps import stepper
from towpath.bench.workload import SQUARE

NO_THREAD_CACHES = "glibc.malloc.tcache_count=0"
SETTLED = 20  # steps after which resident memory is to stay as it is
QUICK_STEPS = 24


@dataclass(frozen=True, slots=True)
class Steady:
    """Over 200 steps no buffer is made after the second, and resident memory stays what it is after the 20th.

    Glibc keeps no freed memory by thread here: before 2.38 that pins the heap, which then grows (benchmarks/LOG.md).
    """

    name: str
    strategy: str
    steps: int = 200
    topology: towpath.Topology = SQUARE

    def measure(self, settings: Settings) -> dict[str, Any]:
        steps = QUICK_STEPS if settings.quick else self.steps
        with environment_variable("GLIBC_TUNABLES", NO_THREAD_CACHES), lab.Lab(self.topology, inter=None) as cluster:
            answers = cluster.call(steady, self, steps, timeout_seconds=1200)
        return {
            "checks": [
                Check("resident memory at the end / after 20 steps", max(a["growth"] for a in answers), 1.01),
                Check("buffers made after step 2", max(a["made_later"] for a in answers), 0),
            ],
            "steps": steps,
            "GLIBC_TUNABLES": NO_THREAD_CACHES,
            "resident_bytes": [a["resident_bytes"] for a in answers],
            "host_share": round(max(a["host_share"] for a in answers), 5),
        }


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """For what is started inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def steady(rank: int, world: int, case: Steady, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    made: Any = towpath.shard(gpt.GPT(context=64), case.strategy, topology=case.topology)
    step = stepper(made, lambda model, last: nullcontext(), gpt.batches(rank, 1, 64), 1)
    resident: list[int] = []
    for number in range(1, steps + 1):
        step()
        resident.append(resident_bytes())
        if number == 2:
            before, began = towpath.stats(made), time.perf_counter()
    taken, after = time.perf_counter() - began, towpath.stats(made)
    return {
        "growth": max(resident[SETTLED:]) / resident[SETTLED - 1],
        "made_later": after.buffers_made - before.buffers_made,
        "host_share": (after.seconds_host - before.seconds_host) / taken,
        "resident_bytes": {"step 2": resident[1], "step 20": resident[SETTLED - 1], "last": resident[-1]},
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
