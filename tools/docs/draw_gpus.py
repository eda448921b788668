"""The tables in docs/concepts/gpu-clusters.md: simulated steps on nodes of 8 GPUs, next to FSDP2, HSDP and DDP.

python -m tools.docs.draw_gpus              prints them
python -m tools.docs.draw_gpus --profile    prints where the time of each step on two nodes goes
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tools.docs import figures
from towpath import planning, strategy
from towpath.plan.hardware import GIB
from towpath.plan.model import compute_seconds
from towpath.plan.pytorch import WRAPPERS
from towpath.plan.request import Batching, Prediction, Request
from towpath.plan.solver import Solver

CLUSTER, TOKENS = "h100-400g", 8192
# Gbit/s of a node, and the share of it that collectives reach, as in the cluster's file.
LINKS = {"100 Gbit/s": 100, "200 Gbit/s": 200, "400 Gbit/s": 400, "8 × 400 Gbit/s": 3200}
REACHED = 0.85
# Seconds of a micro-step of Llama-7B: 3.3e14 operations at 45 % of the peak. It sets the rate of computation.
COMPUTING = 0.74


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: a preset of Towpath with its options, or a wrapper of PyTorch that the planner knows."""

    title: str
    preset: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def predict(self, solver: Solver, batching: Batching) -> Prediction:
        if self.preset:
            return solver.predict(strategy(self.preset, solver.cluster.topology, **self.options), batching)
        wrapper = next(each for each in WRAPPERS if each.name == self.title)
        found = solver.predict(
            wrapper.strategy(solver.cluster.topology), batching, partial(wrapper.steps, on_cpus=False)
        )
        return replace(found, memory=wrapper.memory(solver, batching))


PEERS = (Row("FSDP2"), Row("HSDP"))
EXACT = Row("`paro-iig exact=true`", "paro-iig", {"exact": True})
ROWS = (
    *PEERS,
    Row("FSDP2 with wires"),
    Row("`zero3`", "zero3"),
    Row("`mics`", "mics"),
    Row("`paro-iig`", "paro-iig"),
    EXACT,
    Row("`mics gradients=int8`", "mics", {"gradients": "int8"}),
    Row("`zero++`", "zero++"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """A model on a number of nodes. Each GPU computes one micro-batch of `TOKENS` tokens in a step."""

    model: str
    nodes: int
    checkpointing: bool = False
    memory: int = 80  # GB of a GPU

    def solver(self, gigabits: float) -> Solver:
        """Return the planner of the job, on nodes with this link."""
        cluster, known = planning.load_cluster(CLUSTER, nodes=self.nodes), planning.describe_model("llama-7b")
        computes = compute_seconds(known, cluster, "bfloat16", TOKENS, False).micro_step
        inter = replace(cluster.hardware.inter, rate=REACHED * gigabits * 1e9 / 8)
        hardware = replace(cluster.hardware, inter=inter)
        cluster = replace(
            cluster, reached=cluster.reached * computes / COMPUTING, hardware=hardware, memory=self.memory * 10**9
        )
        model = planning.describe_model(self.model)
        batch = TOKENS // model.length * cluster.topology.world
        return Solver(model, cluster, Request(batch, cluster.memory))

    def predict(self, row: Row, gigabits: float = 100) -> Prediction:
        """Predict a step of one micro-step."""
        solver = self.solver(gigabits)
        batching = Batching(TOKENS // solver.model.length, 1, self.checkpointing)
        return row.predict(solver, batching)

    def table(self) -> str:
        """Return the steps with each of the links. A row that does not fit into a GPU's memory has none."""
        body: list[tuple[str, ...]] = []
        for row in ROWS:
            found = [self.predict(row, gigabits) for gigabits in LINKS.values()]
            held = sum(found[0].memory.values())
            fits = held <= self.memory * 10**9
            seconds = [f"{each.seconds:.2f} s" if fits else "does not fit" for each in found]
            rate = tokens_per_gpu(found[0].seconds) if fits else "–"
            body.append((row.title, *seconds, rate, f"{held / GIB:.0f} GiB"))
        return figures.table(("", *LINKS, f"tokens/s per GPU, {next(iter(LINKS))}", "memory"), body)


# Blocks of the first two are recomputed: without, some rows would not fit.
TWO_NODES = Job("llama-3.1-8b", 2, checkpointing=True)
LARGE = Job("llama-3.1-70b", 2, checkpointing=True, memory=141)
EIGHT_NODES = Job("llama-7b", 8)


def tokens_per_gpu(seconds: float) -> str:
    """Return the tokens per second, to three digits."""
    return f"{round(TOKENS / seconds, -1):,.0f}" if seconds < 8 else f"{TOKENS / seconds:,.0f}"


def profile() -> Iterator[str]:
    """Yield where the time of each step goes: computation, and waits by their cause."""
    for job in (TWO_NODES, LARGE):
        for row in ROWS:
            for link, gigabits in LINKS.items():
                found = job.predict(row, gigabits)
                waits = ", ".join(f"{kind.value} {1e3 * seconds:.0f}" for kind, seconds in found.exposed.items())
                yield (
                    f"{job.model}, {row.title} at {link}: {1e3 * found.seconds:.0f} ms, {1e3 * found.computed:.0f} "
                    f"computed; waits: {waits}; launching {1e3 * found.launching:.0f}, of which "
                    f"{1e3 * found.unlaunched:.1f} exposed"
                )


TABLES = {"gpu-two-nodes": TWO_NODES.table, "gpu-70b": LARGE.table, "gpu-clusters": EIGHT_NODES.table}


def _lines(arguments: Sequence[str]) -> Iterator[str]:
    if "--profile" in arguments:
        yield from profile()
    else:
        yield from (table() for table in TABLES.values())


if __name__ == "__main__":
    print("\n".join(_lines(sys.argv)))
