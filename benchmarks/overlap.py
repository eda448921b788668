"""A step of ours against its own parts: nothing but computing, and nothing but transfers."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import towpath
from internals import communicate, without_transfers
from towpath.bench.harness import race
from towpath.bench.harness.contestants import Cluster, Contestant, Entry
from towpath.bench.harness.figures import Check
from towpath.bench.harness.pool import started
from towpath.bench.harness.suite import Settings
from towpath.bench.harness.worker import timed
from towpath.bench.peers import build
from towpath.bench.steps import stepper
from towpath.bench.workload import LENGTH, SHORT, SQUARE, Workload

PARTS = ("step", "compute", "communication")


@dataclass(frozen=True, slots=True)
class Overlap:
    """With communication about equal to compute, a step takes at most 1.25 × the larger of the two.

    Compute alone is the same step of the same sharded model on all ranks at once, with every transfer of the schedule
    left out. Communication alone is every transfer of the schedule, on the engine's own queues, with nothing computed.
    How much is computed is chosen so that both take equally long at the rate `inter`. All three are parts of one model,
    so they share its processes, and take turns like contestants.

    `elsewhere`: blocks wait instead of computing, as for a device whose work takes nothing from the cores that the
    network's work needs; then exposed is step − compute. Otherwise both share the machine's cores, each slows the other
    down, and no step can be shorter than the CPU seconds of all ranks / the cores. Then the kernel says how long the
    thread that trains did not run: where each rank has a core of its own, that is what stats calls exposed.
    """

    name: str
    strategy: str
    inter: str
    topology: towpath.Topology = SQUARE
    elsewhere: bool = False

    def measure(self, settings: Settings) -> dict[str, Any]:
        workload = Workload(self.topology, wait_seconds=0.0 if self.elsewhere else None)
        workload = workload.quick() if settings.quick else workload
        entry = Entry(Cluster(self.topology, self.inter), Parts, (self.strategy, workload))
        with started({self.name: entry}, settings.say) as made:
            [contestant] = made.values()
            run = race.run({part: Part(contestant, part) for part in PARTS}, settings.rounds, settings.say)
            facts = contestant.ask("facts")
        return {"checks": self._checks(run.seconds, facts), **self._facts(run.seconds, facts), **run.recorded()}

    def _checks(self, seconds: dict[str, list[float]], facts: list[dict[str, Any]]) -> list[Check]:
        step, compute, communication = (statistics.median(seconds[part]) for part in PARTS)
        exposed = statistics.median(facts[0]["exposed_seconds"])
        checks = [
            Check("step / the larger of compute and communication", step / max(compute, communication), 1.25),
            Check("host seconds / step", max(a["host_seconds"] for a in facts) / sum(seconds["step"]), 0.02),
        ]
        if self.elsewhere:
            checks.append(Check("|exposed − (step − compute)| / step", abs(exposed - (step - compute)) / step, 0.05))
        elif self.topology.world <= len(os.sched_getaffinity(0)):
            idle = statistics.median(facts[0]["idle_seconds"])
            what = "|exposed − time the training thread did not run| / step"
            checks.append(Check(what, abs(exposed - idle) / step, 0.05))
        return checks

    def _facts(self, seconds: dict[str, list[float]], facts: list[dict[str, Any]]) -> dict[str, Any]:
        first = facts[0]
        medians = {part: statistics.median(values) for part, values in seconds.items()}
        return {
            "amount": first["amount"],
            "communication / compute": round(medians["communication"] / medians["compute"], 4),
            "exposed_seconds": first["exposed_seconds"],
            "idle_seconds": first["idle_seconds"],
            "cpu_seconds_of_all_ranks": {
                part: round(sum(statistics.median(a["cpu_seconds"][part]) for a in facts), 3) for part in PARTS
            },
            "exposed_where": first["where"],
        }


@dataclass(frozen=True, slots=True)
class Part:
    """Takes turns like a contestant."""

    contestant: Contestant
    part: str

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        return self.contestant.ask(method, self.part, *arguments)

    def counters(self) -> tuple[Any, ...]:
        return self.contestant.counters()


@dataclass(frozen=True, slots=True)
class Amount:
    """How much one step computes."""

    batch: int
    length: int
    wait_seconds: float = 0.0


class Parts:
    """The worker: chooses the amount as it is made."""

    def __init__(self, rank: int, world: int, strategy: str, workload: Workload) -> None:
        self._rank, self._workload = rank, workload
        self._model, self._context = build(strategy, workload)
        if workload.wait_seconds is not None:
            little, more = Amount(1, SHORT), Amount(1, SHORT, 0.1)
        else:
            little, more = Amount(4, LENGTH), Amount(12, LENGTH)
        for _ in range(2):
            self._stepper(little)()
        alone = partial(communicate, self._model)
        self._amount = balanced(little, more, self._stepper, alone)
        step = self._stepper(self._amount)
        self._works = {"step": step, "compute": partial(without_transfers, step), "communication": alone}
        self._cpu_seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        self._exposed: list[float] = []
        self._idle: list[float] = []
        self._host_seconds = 0.0
        self._where: Counter[str] = Counter()

    def turn(self, part: str) -> float:
        work = self._works[part]
        before, cpu_before = towpath.stats(self._model), time.process_time()
        seconds = timed(partial(self._noting_idle, work) if part == "step" else work)
        self._cpu_seconds[part].append(time.process_time() - cpu_before)
        if part == "step":
            after = towpath.stats(self._model)
            self._host_seconds += after.seconds_host - before.seconds_host
            self._exposed.append(after.seconds_exposed - before.seconds_exposed)
            self._where.update(exposed_where(after))
            self._where.subtract(exposed_where(before))
        return seconds

    def facts(self) -> dict[str, Any]:
        rounds = len(self._exposed)
        return {
            "amount": asdict(self._amount),
            "cpu_seconds": self._cpu_seconds,
            "exposed_seconds": self._exposed,
            "idle_seconds": self._idle,
            "where": {name: round(s / rounds, 4) for name, s in self._where.most_common() if s > 0.001},
            "host_seconds": self._host_seconds,
        }

    def _stepper(self, amount: Amount) -> Callable[[], None]:
        data = replace(self._workload, batch=amount.batch, length=amount.length).data(self._rank)
        step = stepper(self._model, self._context, data, 1)

        def run() -> None:
            for block in self._model.blocks:
                block.wait_seconds = amount.wait_seconds
            step()

        return run

    def _noting_idle(self, work: Callable[[], None]) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        work()
        self._idle.append((time.perf_counter() - wall) - (time.thread_time() - cpu))


def balanced(
    little: Amount, more: Amount, stepper: Callable[[Amount], Callable[[], None]], communication: Callable[[], None]
) -> Amount:
    """The amount whose compute takes as long as the communication; the same on every rank."""
    wanted = min(timed(communication) for _ in range(3))
    short, long = (min(timed(partial(without_transfers, stepper(a))) for _ in range(3)) for a in (little, more))
    shares = torch.tensor([(wanted - short) / (long - short)])
    dist.broadcast(shares, 0)
    share = shares.item()
    return Amount(
        max(round(little.batch + share * (more.batch - little.batch)), 1),
        little.length,
        max(little.wait_seconds + share * (more.wait_seconds - little.wait_seconds), 0.0),
    )


def exposed_where(stats: towpath.Stats) -> dict[str, float]:
    return {f"{t.transfer.kind.value} of {t.transfer.unit or 'root'}": t.seconds_exposed for t in stats.transfers}
