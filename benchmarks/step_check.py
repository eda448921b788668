"""What the comparison of ranks at each boundary costs, measured inside the process that trains.

    python benchmarks/step_check.py [CASE …]

Two ranks of this machine train a GPT. Timed is all that a rank does for the comparison on the thread that trains: it
notes each optimizer step, makes digests and checksums, packs and unpacks. Waiting for the other rank is not part of it.
"every step": parameters are compared in every step, and not in every hundredth.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import towpath
from towpath.bench import gpt
from towpath.bench.harness.figures import Check
from towpath.bench.harness.suite import Settings, Suite
from towpath.core.strategy import TransferKind
from towpath.engine.checks import program
from towpath.engine.parameters.unit import CHECK_EVERY, UnusedParams
from towpath.observing import sums

WARM_UP, STEPS = 5, 20
AT_MOST = 0.01


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    strategy: str
    check_every: int

    def measure(self, settings: Settings) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(train, (folder, self), nprocs=2)  # pyright: ignore
            found: dict[str, Any] = json.loads(Path(folder, "found").read_text())
        share = statistics.median(found["shares"])
        return {**found, "checks": [Check("time of the comparison / step", share, at_most=AT_MOST)]}


def train(rank: int, folder: str, case: Case) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    spent = {"steps": 0.0, "boundary": 0.0}
    program._stepped = _timed(program._stepped, spent, "steps")
    UnusedParams.compare = _timed(UnusedParams.compare, spent, "boundary")
    found = measure(case, rank, spent)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(case: Case, rank: int, spent: dict[str, float]) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = gpt.GPT(width=512, depth=5, heads=8, context=128)
    parameters = sum(p.numel() for p in model.parameters())
    towpath.shard(model, case.strategy, topology=towpath.Topology(2, 1), check_every=case.check_every)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data, shares, steps = gpt.batches(rank, batch=4, length=128), list[float](), list[float]()
    for step in range(WARM_UP + STEPS):
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
    return {"parameters": parameters, "seconds": steps, "shares": shares}


def _waited(model: Any) -> float:
    return sums(model).exposed_seconds.get(TransferKind.UNUSED_PARAMS, 0.0)


def _timed(function: Callable[..., Any], spent: dict[str, float], what: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[what] += time.perf_counter() - began

    return timed


CASES = [
    Case(f"{name}, every step" if every == 1 else name, name, every)
    for name in ("zero3", "ddp")
    for every in (CHECK_EVERY, 1)
]
SUITE = Suite("step_check", __doc__ or "", CASES)

if __name__ == "__main__":
    SUITE.main()
