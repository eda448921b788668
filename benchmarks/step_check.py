"""What the comparison of ranks at each boundary costs, measured inside the process that trains.

    python benchmarks/step_check.py [--steps 30] [--width 512] [--depth 5]

Two ranks of this machine train a GPT under `zero3` and under `ddp`. Timed is all that a rank does for the comparison on
the thread that trains: noting each optimizer step, its digests, checksums of parameters (every step here, not every
hundredth), packing and unpacking. Waiting for the other rank is not part of it. One line of JSON for each strategy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import towpath
from towpath.bench import gpt
from towpath.bench.harness import stamp
from towpath.core.strategy import Kind
from towpath.engine import program
from towpath.engine.usage import Usage
from towpath.observing import sums

STRATEGIES = ("zero3", "ddp")
WARM_UP = 5


def train(rank: int, meeting: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    spent = {"steps": 0.0, "boundary": 0.0}
    program._stepped = _timed(program._stepped, spent, "steps")
    Usage.compare = _timed(Usage.compare, spent, "boundary")
    for name in STRATEGIES:
        found = measure(name, rank, options, spent)
        if rank == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def measure(name: str, rank: int, options: argparse.Namespace, spent: dict[str, float]) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = gpt.GPT(options.width, options.depth, heads=8, context=128)
    parameters = sum(p.numel() for p in model.parameters())
    towpath.shard(model, name, topology=towpath.Topology(2, 1), check_every=options.check_every)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data, shares, steps = gpt.batches(rank, batch=4, length=128), list[float](), list[float]()
    for step in range(WARM_UP + options.steps):
        spent.update(dict.fromkeys(spent, 0.0))
        waited = _waited(model)
        began = time.perf_counter()
        model(*next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - began
        if step >= WARM_UP:
            own = spent["steps"] + spent["boundary"] - (_waited(model) - waited)
            steps.append(seconds)
            shares.append(own / seconds)
    return {
        **stamp.stamp(),
        "case": f"{name}, 2 ranks, {parameters / 1e6:.0f} M parameters",
        "check_every": options.check_every,
        "step_seconds": statistics.median(steps),
        "share_of_step": statistics.median(shares),
        "largest_share": max(shares),
    }


def _waited(model: Any) -> float:
    return sums(model).exposed_seconds.get(Kind.USAGE, 0.0)


def _timed(function: Callable[..., Any], spent: dict[str, float], what: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[what] += time.perf_counter() - began

    return timed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--check-every", type=int, default=1)
    chosen = parser.parse_args(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (str(Path(folder, "meeting")), chosen), nprocs=2)  # pyright: ignore
