"""How much of what ranks send goes on while they compute, as a trace of whole steps tells it.

    python benchmarks/timeline.py [CASE …] [--device cuda] [--trace FILE]

Ranks of this machine, one on each GPU (two share the only one), or on CPUs; over the loopback where they share a GPU.
`--trace`: where rank 0 writes what all did, for https://ui.perfetto.dev. Every run is added to
benchmarks/results/timeline.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import towpath
from towpath.bench import gpt
from towpath.bench.harness.figures import Check
from towpath.bench.harness.suite import Settings, Suite
from towpath.observing import BETWEEN, COMPUTE, INSIDE, Interval, intervals_of_ranks
from towpath.train.trace import write_trace

WARM_UP, STEPS = 4, 4
SHAPES = {
    "cuda": {"width": 1024, "depth": 12, "heads": 16, "context": 512},
    "cpu": {"width": 64, "depth": 4, "heads": 2},
}
LENGTHS = {"cuda": 512, "cpu": 64}
# Of what is sent, by seconds, while something is computed. No promise: with less than half, nothing is prefetched.
AT_LEAST = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    strategy: str
    device: str

    def measure(self, settings: Settings) -> dict[str, Any]:
        world = max(2, torch.cuda.device_count()) if self.device == "cuda" else 2
        with tempfile.TemporaryDirectory(prefix="towpath-trace-") as folder:
            arguments = (world, folder, self, settings.options.trace)
            torch.multiprocessing.spawn(_rank, arguments, nprocs=world)  # pyright: ignore[reportPrivateImportUsage]
            found = json.loads(Path(folder, "found").read_text())
        asked = AT_LEAST if self.device == "cuda" else None
        return {
            "ranks": world,
            **found,
            "checks": [Check("sent while computing / sent", found["share"], at_least=asked)],
        }


def _rank(rank: int, world: int, folder: str, case: Case, trace: str | None) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if case.device == "cuda":
        devices = torch.cuda.device_count()
        if devices < world:  # NCCL refuses two ranks on one GPU of one host; as hosts of their own they may share it
            os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        device = torch.device("cuda", rank % devices)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if case.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    shape = {"context": LENGTHS[case.device], **SHAPES[case.device]}
    model: Any = gpt.GPT(**shape).to(device)
    towpath.shard(model, case.strategy, topology=towpath.Topology(world, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = gpt.batches(rank, batch=4, length=LENGTHS[case.device])

    def train(steps: int) -> None:
        for _ in range(steps):
            inputs, targets = next(data)
            model(inputs.to(device), targets.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(WARM_UP)
    before = towpath.stats(model)
    with towpath.tracing(model) as traced:
        train(STEPS)
    done = towpath.stats(model).since(before)
    everyones = intervals_of_ranks(model, traced)
    if rank == 0:
        if trace is not None:
            write_trace(Path(trace), everyones)
        found = {
            "share": share_hidden(everyones[0]),
            "seconds_in_flight": sum(t.seconds_in_flight for t in done.transfers),
            "seconds_exposed": done.seconds_exposed,
            "seconds_computing": sum(i.seconds for i in everyones[0] if i.track == COMPUTE),
        }
        Path(folder, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


def share_hidden(intervals: Iterable[Interval]) -> float:
    """Of the seconds in which something was sent, those in which something was computed as well."""
    intervals = list(intervals)
    sent = _union(i for i in intervals if i.track in (BETWEEN, INSIDE))
    computed = _union(i for i in intervals if i.track == COMPUTE)
    total = sum(end - start for start, end in sent)
    both = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in sent
        for other_start, other_end in computed
    )
    return both / total if total else 0.0


def _union(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """Without overlaps."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((i.start_seconds, i.end_seconds) for i in intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--trace", metavar="FILE", help="rank 0 writes what all did, for Perfetto")


STRATEGIES = ("zero3", "zero++", "paro-iig")
CASES = [Case(f"{name} {device}", name, device) for device in ("cuda", "cpu") for name in STRATEGIES]


def chosen(cases: Any, options: argparse.Namespace) -> list[Case]:
    return [case for case in cases if case.device == options.device]


SUITE = Suite("timeline", __doc__ or "", CASES, rounds=1, options=add_options, chosen=chosen)

if __name__ == "__main__":
    SUITE.main()
