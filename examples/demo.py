"""Train a small GPT on a shaped cluster of this machine, once under each of several strategies, and compare them.

    python examples/demo.py [--inter 200mbit] [--steps 6]

Two nodes of two ranks, joined by cables of the given rate: Linux network namespaces and `tc`, raised and taken down
here. Where this machine allows no namespaces, the ranks run on its plain loopback, and the demo says so.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import gpt
import towpath
from towpath import lab

TOPOLOGY = towpath.Topology(nodes=2, ranks_per_node=2)
MICRO_STEPS, BATCH, LENGTH = 2, 4, 128
STRATEGIES = ("zero3", "hpz", "zero1", "mics", "paro-iig", "paro-nig")

# What runs a function on every rank, and returns what each rank returned.
Launcher = Callable[..., list[Any]]


@dataclass(frozen=True, slots=True)
class Outcome:
    losses: list[float]
    step_seconds: float
    memory_bytes: int
    cable_bytes: float  # sent over this rank's node's cable in one step, counted by the kernel
    scheduled_bytes: int


def train(rank: int, world: int, strategy: str, steps: int, counted: bool) -> Outcome:
    """What every rank does: the ten lines that a training script needs, and a clock around them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = towpath.shard(gpt.GPT(), strategy, topology=TOPOLOGY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = gpt.batches(rank, BATCH, LENGTH)
    losses: list[float] = []
    began, before = 0.0, 0
    for step in range(steps + 1):
        if step == 1:  # the first step warms up
            dist.barrier()
            before = sent_over_the_cable() if counted else 0
            dist.barrier()  # nobody goes on before all have read
            began = time.perf_counter()
        total = torch.zeros(())
        for micro in range(MICRO_STEPS):
            with nullcontext() if micro == MICRO_STEPS - 1 else model.no_sync():
                loss = model(*next(data)) / MICRO_STEPS
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    seconds = (time.perf_counter() - began) / steps
    dist.barrier()
    sent = (sent_over_the_cable() - before) / steps if counted else 0.0
    schedule = towpath.schedule(towpath.strategy(strategy, TOPOLOGY), model, MICRO_STEPS)
    memory = sum(towpath.stats(model).memory_bytes.values())
    return Outcome(losses, seconds, memory, sent, schedule.cable_bytes(TOPOLOGY.node_of(rank)))


def sent_over_the_cable() -> int:
    return lab.link_counters().sent_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inter", default="200mbit", help="rate of each node's cable (default: 200mbit)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps to time (default: 6)")
    options = parser.parse_args()
    console = Console(width=100)
    parameters = sum(p.numel() for p in gpt.GPT().parameters())
    with ExitStack() as stack:
        why_not = lab.available()
        cluster = None if why_not else stack.enter_context(lab.Lab(TOPOLOGY, inter=options.inter))
        if cluster is None:
            console.print(f"No shaped cluster here ({why_not}); the ranks share the loopback, at its full speed.")
            launch: Launcher = on_loopback
        else:
            console.print(f"A cluster of 2 nodes × 2 ranks is up, its nodes joined by cables of {options.inter}.")
            launch = lambda fn, *args: cluster.call(fn, *args, timeout_seconds=300)  # noqa: E731
        console.print(
            f"A GPT of {parameters / 1e6:.1f} million parameters trains {options.steps} steps on each strategy."
        )
        table = Table(title=f"{MICRO_STEPS} micro-steps of {BATCH} × {LENGTH} bytes on each rank")
        table.add_column("strategy")
        for column in ("step time", "MB between nodes", "as scheduled", "MB of memory a rank", "final loss"):
            table.add_column(column, justify="right")
        counted = cluster is not None
        for strategy in STRATEGIES:
            console.print(f"  {strategy} …")
            table.add_row(strategy, *cells(launch(train, strategy, options.steps, counted), counted))
    console.print(table)
    console.print(
        "Time and bytes of one optimizer step. Bytes: what left a node over its cable, as the kernel counted them, and "
        "as towpath.schedule() foretold. The losses agree: a strategy changes what travels, not what is learned."
    )


def cells(outcomes: list[Outcome], counted: bool) -> list[str]:
    """One row of the table, of all ranks' outcomes."""
    first = outcomes[0]
    return [
        f"{max(o.step_seconds for o in outcomes):.2f} s",
        f"{first.cable_bytes / 1e6:.2f}" if counted else "not counted",
        f"{first.scheduled_bytes / 1e6:.2f}",
        f"{max(o.memory_bytes for o in outcomes) / 1e6:.1f}",
        f"{first.losses[-1]:.4f}",
    ]


def on_loopback(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Every rank as a process on this machine, without a lab."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder, fn, args), nprocs=TOPOLOGY.world)
        return [torch.load(Path(folder, str(r)), weights_only=False) for r in range(TOPOLOGY.world)]


def _rank(rank: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TOPOLOGY.world)
    torch.save(fn(rank, TOPOLOGY.world, *args), Path(folder, str(rank)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
