"""The tables in docs/concepts/gpu-clusters.md: simulated steps on nodes of 8 GPUs, next to FSDP2.

python -m tools.docs.draw_gpus              prints them
python -m tools.docs.draw_gpus --profile    prints where the time of each step of the first one goes
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tools.docs import figures
from towpath import planning, strategy
from towpath.core.formats import item_bytes
from towpath.core.queues import CommunicatorSharing
from towpath.core.step_state import Action, Wait
from towpath.core.strategy import TransferKind
from towpath.core.unit_plan import plan_unit
from towpath.plan.bandwidth import Timeline
from towpath.plan.hardware import GIB, Cluster, Hardware
from towpath.plan.model import Model, compute_seconds, optimizer_seconds
from towpath.plan.replay import Replay, SimulatedStage
from towpath.plan.request import Request
from towpath.plan.simulated_engine import SimulatedEngine
from towpath.topology.cluster import Topology

MODEL, CLUSTER, NODES, TOKENS = "llama-7b", "h100-400g", 8, 8192
TWO_NODES_MODEL = "llama-3.1-8b"
# Gbit/s of a node, and the share of it that collectives reach, as in the cluster's file.
LINKS = {"100 Gbit/s": 100, "200 Gbit/s": 200, "400 Gbit/s": 400, "8 × 400 Gbit/s": 3200}
REACHED = 0.85
COMPUTING = 0.74  # seconds of a micro-step of MODEL: 3.3e14 operations at 45 % of the peak


class _OneLane(CommunicatorSharing):
    """Gathers and reductions of the same ranks share a communicator, as in FSDP2."""

    def lane(self, queue: str, ranks: Sequence[int], topology: Topology) -> str:
        return "all"


class _Fsdp2Engine(SimulatedEngine):
    """Copies each gathered unit out of the gathered buffer, on the stream that computes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lanes = _OneLane()

    def execute(self, action: Action, micro_step: int) -> Iterator[Any]:
        yield from super().execute(action, micro_step)
        if isinstance(action, Wait) and action.task.kind in (TransferKind.GATHER, TransferKind.BACKWARD_GATHER):
            copied = sum(b.numel * item_bytes(b.compute_dtype) for b in self.plans[action.task.unit].buckets)
            yield from self.compute(copied / self._hardware.memory_rate, "copies out")


class _Fsdp2(Replay):
    def __init__(self, stages: Sequence[SimulatedStage], hardware: Hardware) -> None:
        super().__init__(stages, hardware)
        (stage,) = stages
        self._engines = {0: _Fsdp2Engine(stage.strategy, stage.plans, hardware, self._bandwidth, self._timelines[0])}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: a strategy, and whether FSDP2 runs it."""

    title: str
    preset: str
    peer: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


ROWS = (
    Row("FSDP2, fully sharded", "zero3", peer=True, options={"route": "flat"}),
    Row("FSDP2, HSDP", "mics", peer=True),
    Row("`zero3`", "zero3"),
    Row("`mics`", "mics"),
    Row("`paro-iig`", "paro-iig"),
    Row("`mics gradients=int8`", "mics", options={"gradients": "int8"}),
    Row("`zero++`", "zero++"),
)


EXACT = Row("`paro-iig exact=true`", "paro-iig", options={"exact": True})


def clusters() -> Iterator[Cluster]:
    """Yield the cluster with each of the links, such that a micro-step of `MODEL` computes for `COMPUTING` seconds."""
    cluster, model = planning.load_cluster(CLUSTER, nodes=NODES), planning.describe_model(MODEL)
    computes = compute_seconds(model, cluster, "bfloat16", TOKENS, False).micro_step
    cluster = replace(cluster, reached=cluster.reached * computes / COMPUTING)
    for gigabits in LINKS.values():
        inter = replace(cluster.hardware.inter, rate=REACHED * gigabits * 1e9 / 8)
        yield replace(cluster, hardware=replace(cluster.hardware, inter=inter))


def step(row: Row, model: Model, cluster: Cluster, checkpointing: bool = False) -> Timeline:
    """Simulate a step of one micro-step."""
    made = strategy(row.preset, cluster.topology, **row.options)
    request = Request(cluster.topology.world, cluster.memory)
    plans = [plan_unit(made, unit.spec, request.precision, cluster.hardware.form) for unit in model.units]
    elements = model.trainable / made.placement.optimizer.size
    optimizer = optimizer_seconds(elements, request.own, request.optimizer, cluster.hardware)
    seconds = replace(compute_seconds(model, cluster, "bfloat16", TOKENS, checkpointing), optimizer=optimizer)
    replay = _Fsdp2 if row.peer else Replay
    return replay([SimulatedStage(made, plans, seconds)], cluster.hardware).run().ranks[0]


def table() -> str:
    model, every = planning.describe_model(MODEL), list(clusters())
    body: list[tuple[str, ...]] = []
    for row in ROWS:
        seconds = [step(row, model, cluster).seconds for cluster in every]
        body.append((row.title, *(f"{each:.2f} s" for each in seconds), tokens_per_gpu(seconds[0])))
    return figures.table(("", *LINKS, f"tokens/s per GPU, {next(iter(LINKS))}"), body)


def two_nodes() -> tuple[Model, Cluster]:
    """Return Llama-3-8B and two nodes with the slowest of the links. Blocks are recomputed, or not every row fits."""
    return planning.describe_model(TWO_NODES_MODEL), next(clusters()).on(2)


def two_nodes_table() -> str:
    """Return the steps on two nodes and on four, and what a GPU of two nodes holds."""
    model, cluster = two_nodes()
    solver = planning.Solver(model, cluster, Request(cluster.topology.world, cluster.memory))
    body: list[tuple[str, ...]] = []
    for row in (*ROWS[:5], EXACT, *ROWS[5:]):
        seconds, four = (step(row, model, each, checkpointing=True).seconds for each in (cluster, cluster.on(4)))
        made = strategy(row.preset, cluster.topology, **row.options)
        held = sum(solver.predict_memory(made, planning.Batching(1, 1, True)).values())
        # FSDP2's buffers are its own.
        memory = "–" if row.peer else f"{held / GIB:.0f} GiB"
        body.append((row.title, f"{seconds:.2f} s", f"{four:.2f} s", tokens_per_gpu(seconds), memory))
    head = ("", "step, 2 nodes", "step, 4 nodes", "tokens/s per GPU, 2 nodes", "memory, 2 nodes")
    return figures.table(head, body)


def tokens_per_gpu(seconds: float) -> str:
    """Return the tokens per second, to three digits."""
    return f"{round(TOKENS / seconds, -1):,.0f}"


def profile() -> Iterator[str]:
    """Yield where the time of each step goes: computation, and waits by their cause."""
    model = planning.describe_model(MODEL)
    for row in ROWS:
        for link, cluster in zip(LINKS, clusters(), strict=True):
            found = step(row, model, cluster)
            waits = ", ".join(f"{kind.value} {1e3 * seconds:.0f}" for kind, seconds in found.exposed.items())
            copied = sum(e.end - e.start for e in found.events if e.name.startswith("copies"))
            yield (
                f"{row.title} at {link}: {1e3 * found.seconds:.0f} ms, {1e3 * found.computed:.0f} computed, of which "
                f"{1e3 * copied:.0f} copies; waits: {waits}; launching {1e3 * found.launching:.0f}, of which "
                f"{1e3 * found.unlaunched:.1f} exposed"
            )


TABLES = {"gpu-clusters": table, "gpu-two-nodes": two_nodes_table}

if __name__ == "__main__":
    print("\n".join(profile()) if "--profile" in sys.argv else f"{table()}\n{two_nodes_table()}")
