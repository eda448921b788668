"""The engine against FSDP2 and against the bare module: ratios of step times, measured A B A B in one run.

    python benchmarks/engine.py [CASE …] [--rounds 3] [-o benchmarks/results/engine.json]

Every case raises a lab, builds both contestants on the same ranks, and lets them take turns; a round is one optimizer
step of each, between barriers. The ratio is of the medians. Absolute seconds mean nothing on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import gpt
import towpath
from towpath import lab

BATCH, LENGTH = 4, 128


@dataclass(frozen=True, slots=True)
class Case:
    """`ours` against `theirs`, and the ratio that is asked of it."""

    name: str
    ours: str
    theirs: str
    target: float
    topology: towpath.Topology
    inter: str | None = "200mbit"
    micro_steps: int = 1


SHAPE = towpath.Topology(2, 2)
CASES = [
    Case("zero3-fsdp2", "zero3", "fsdp2", 0.75, SHAPE),
    Case("mics-hsdp", "mics", "hsdp", 0.85, SHAPE),
    Case("mics-hsdp-4", "mics", "hsdp", 0.90, SHAPE, micro_steps=4),
    Case("zero3-fsdp2-unshaped", "zero3", "fsdp2", 1.0, SHAPE, inter=None),
    Case("one-rank", "zero3", "bare", 1.03, towpath.Topology(1, 1), inter=None),
]


def model() -> nn.Module:
    """About 17 million parameters."""
    torch.manual_seed(0)
    return gpt.GPT(width=384, depth=9, heads=6, context=LENGTH, vocabulary=2048)


def contestant(kind: str, topology: towpath.Topology) -> tuple[Any, Callable[[Any, bool], Any]]:
    """A model by one engine, and the context of one of its micro-steps (told whether it is the last)."""
    made: Any = model()
    if kind == "bare":
        return made, lambda model, last: nullcontext()
    if kind in ("fsdp2", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shape = (topology.world,) if kind == "fsdp2" else (topology.nodes, topology.ranks_per_node)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for block in made.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(made, mesh=mesh)

        def fsdp(model: Any, last: bool) -> Any:
            if kind == "hsdp":
                model.set_requires_all_reduce(last)
            return nullcontext()

        return made, fsdp
    return towpath.shard(made, kind, topology=topology), lambda model, last: nullcontext() if last else model.no_sync()


def race(rank: int, world: int, case: Case, rounds: int) -> dict[str, Any]:
    """What every rank does. Seconds of each step, and what the engine says of its own."""
    torch.set_num_threads(1)
    data = gpt.batches(rank, BATCH, LENGTH)
    runners: dict[str, Callable[[], None]] = {}
    models: dict[str, Any] = {}
    for kind in (case.ours, case.theirs):
        models[kind], context = contestant(kind, case.topology)
        runners[kind] = _stepper(models[kind], context, data, case.micro_steps)
    seconds: dict[str, list[float]] = {kind: [] for kind in runners}
    for turn in range(rounds + 2):
        for kind, step in runners.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            if turn >= 2:  # two steps of each warm up
                seconds[kind].append(time.perf_counter() - began)
    return {"seconds": seconds, "stats": str(towpath.stats(models[case.ours]))}


def _stepper(model: Any, context: Callable[[Any, bool], Any], data: Any, micro_steps: int) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        for micro in range(micro_steps):
            with context(model, micro == micro_steps - 1):
                (model(*next(data)) / micro_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def run(case: Case, rounds: int) -> dict[str, Any]:
    with lab.Lab(case.topology, inter=case.inter) as cluster:
        answers = cluster.call(race, case, rounds, timeout_seconds=1200)
    seconds = answers[0]["seconds"]
    ours, theirs = (statistics.median(seconds[kind]) for kind in (case.ours, case.theirs))
    return {
        "case": asdict(case),
        "ratio": round(ours / theirs, 4),
        "median_seconds": {case.ours: round(ours, 4), case.theirs: round(theirs, 4)},
        "seconds": {kind: [round(s, 4) for s in values] for kind, values in seconds.items()},
        "stats": answers[0]["stats"],
    }


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"which of {', '.join(c.name for c in CASES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    results = []
    for case in CASES:
        if options.cases and case.name not in options.cases:
            continue
        result = run(case, options.rounds)
        results.append(result)
        verdict = "met" if result["ratio"] <= case.target else "MISSED"
        print(f"{case.name:<22} {result['ratio']:.3f} (asked ≤ {case.target}: {verdict})  {result['median_seconds']}")
        print(result["stats"], flush=True)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
