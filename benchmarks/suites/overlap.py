"""Measure how much communication overlaps with computation, and memory over many steps."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lab
import towpath
from benchmarks import gpt
from benchmarks.harness.candidates import LabPlace, Launch, RunningCandidate, timed
from benchmarks.harness.comparison import compare, started
from benchmarks.harness.figures import Check, medians
from benchmarks.harness.shared_gpu import share_gpu
from benchmarks.harness.suite import Settings, Suite
from benchmarks.peers import build, stepper
from benchmarks.workload import LENGTH, SHORT, SQUARE, Workload
from towpath.core.schedule import Compute, steady_step
from towpath.core.step_state import CheckRanks, InvalidateViews, SetGrads, SwapParameters
from towpath.engine.transfer_queues import RankTransfer
from towpath.observe.stats import intervals_of_ranks
from towpath.observe.trace import BETWEEN, COMPUTE, INSIDE, Interval, write_intervals

# A step against its parts ---------------------------------------------------------------------------------------------


def without_transfers(step: Callable[[], None]) -> None:
    """Take a step without communication, with whatever the buffers contain."""
    run, RankTransfer.run = RankTransfer.run, lambda self, region, shard, workspace: None
    try:
        step()
    finally:
        RankTransfer.run = run


def communicate(model: Any) -> None:
    """Run every transfer of a step except the step check, in the order of the engine, with nothing computed.

    This reaches into the engine, as nothing else in the benchmarks does.
    """
    engine = model.towpath_engine
    with torch.no_grad():
        for _, action in steady_step(engine.machine, [unit.plan for unit in engine.units], 1):
            # Nothing is computed. So weights need not be swapped in, and no gradient has to be waited for.
            if not isinstance(action, (Compute, SwapParameters, InvalidateViews, CheckRanks, SetGrads)):
                engine.execute([action])
        engine._abandon()  # discards the gradients, which have no meaning


PARTS = ("step", "compute", "communication")


@dataclass(frozen=True, slots=True)
class OverlapCase:
    """A step against its parts, with communication and computation about equally long.

    Computation alone is the same step of the same sharded model, with every transfer of the schedule left out.
    Communication alone is every transfer of the schedule, on the queues of the engine, with nothing computed. The
    amount of computation is chosen so that both take equally long at the rate `inter`. All three are parts of one
    model, so they share its processes, and are interleaved like candidates. A step takes at most 1.25 times the larger
    part.

    With `elsewhere`, blocks wait instead of computing, as for a GPU. Exposed time is then step − compute. Otherwise
    both parts share the cores, and no step can be shorter than the CPU seconds of all ranks over the cores. Where each
    rank has a core of its own, exposed time is the time in which the kernel did not run the training thread.
    """

    name: str
    strategy: str
    inter: str
    topology: towpath.Topology = SQUARE
    elsewhere: bool = False

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the parts."""
        workload = Workload(self.topology)
        if self.elsewhere:
            workload = replace(workload, batch=1, length=SHORT, wait_seconds=0.0)
        workload = workload.quick() if settings.quick else workload
        launch = Launch(LabPlace(self.topology, self.inter), StepParts, (self.strategy, workload))
        with started({self.name: launch}, settings.say) as made:
            [candidate] = made.values()
            found = compare({part: StepPart(candidate, part) for part in PARTS}, settings.rounds, settings.say)
            facts = candidate.ask("facts")
        return {"checks": self._checks(found.seconds, facts), **self._facts(found.seconds, facts), **found.recorded()}

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
        usual = medians(seconds)
        return {
            "amount": first["amount"],
            "communication / compute": round(usual["communication"] / usual["compute"], 4),
            "exposed_seconds": first["exposed_seconds"],
            "idle_seconds": first["idle_seconds"],
            "cpu_seconds_of_all_ranks": {
                part: round(sum(statistics.median(a["cpu_seconds"][part]) for a in facts), 3) for part in PARTS
            },
            "exposed_where": first["where"],
        }


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of a step, which a comparison measures like a candidate."""

    candidate: RunningCandidate
    part: str

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the worker for this part."""
        return self.candidate.ask(method, self.part, *arguments)

    def counters(self) -> tuple[Any, ...]:
        """Return the counters of the candidate."""
        return self.candidate.counters()


@dataclass(frozen=True, slots=True)
class Amount:
    """The computation of one step."""

    batch: int
    length: int
    wait_seconds: float = 0.0


class StepParts:
    """A worker that chooses the amount of computation, and then measures the parts of a step."""

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

    def sample(self, part: str) -> float:
        """Run a part and return its seconds."""
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
        """Return what this rank recorded."""
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
    """Return the amount whose computation takes as long as the communication. It is the same on every rank."""
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
    """Return exposed seconds by transfer."""
    return {f"{t.transfer.kind.value} of {t.transfer.unit or 'root'}": t.seconds_exposed for t in stats.transfers}


# Memory over many steps -----------------------------------------------------------------------------------------------

NO_THREAD_CACHES = "glibc.malloc.tcache_count=0"
SETTLED = 20  # steps after which resident memory must not grow
QUICK_STEPS = 24


@dataclass(frozen=True, slots=True)
class SteadyCase:
    """Memory over 200 steps: no buffer is made after the second step, and resident memory is constant after the 20th.

    Glibc's caches per thread are off. Before version 2.38 they pin the heap, which then grows (LOG.md).
    """

    name: str
    strategy: str
    steps: int = 200
    topology: towpath.Topology = SQUARE

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Train in the lab."""
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
    """Set a variable for processes that start inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def steady(rank: int, world: int, case: SteadyCase, steps: int) -> dict[str, Any]:
    """Train on one rank, and return its memory."""
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
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Traces ---------------------------------------------------------------------------------------------------------------

WARM_UP, STEPS = 4, 4
SHAPES = {
    "cuda": {"width": 1024, "depth": 12, "heads": 16, "context": 512},
    "cpu": {"width": 64, "depth": 4, "heads": 2},
}
LENGTHS = {"cuda": 512, "cpu": 64}
# The share of communication, by seconds, during which something is computed. With less than half, nothing is
# prefetched.
AT_LEAST = 0.5


@dataclass(frozen=True, slots=True)
class TimelineCase:
    """A strategy on a kind of device."""

    name: str
    strategy: str
    device: str

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Trace a few steps on the ranks of this machine."""
        world = max(2, torch.cuda.device_count()) if self.device == "cuda" else 2
        with tempfile.TemporaryDirectory(prefix="towpath-trace-") as folder:
            arguments = (world, folder, self, settings.options.trace)
            torch.multiprocessing.spawn(_rank, arguments, nprocs=world)  # pyright: ignore[reportPrivateImportUsage]
            found = json.loads(Path(folder, "found").read_text())
        limit = AT_LEAST if self.device == "cuda" else None
        return {
            "ranks": world,
            **found,
            "checks": [Check("sent while computing / sent", found["share"], at_least=limit)],
        }


def _rank(rank: int, world: int, folder: str, case: TimelineCase, trace: str | None) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if case.device == "cuda":
        devices = torch.cuda.device_count()
        if devices < world:
            share_gpu(rank)
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
    with towpath.tracing.trace(model) as traced:
        train(STEPS)
    done = towpath.stats(model).since(before)
    everyones = intervals_of_ranks(model, traced)
    if rank == 0:
        if trace is not None:
            write_intervals(Path(trace), everyones)
        found = {
            "share": share_hidden(everyones[0]),
            "seconds_in_flight": sum(t.seconds_in_flight for t in done.transfers),
            "seconds_exposed": done.seconds_exposed,
            "seconds_computing": sum(i.seconds for i in everyones[0] if i.track == COMPUTE),
        }
        Path(folder, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


def share_hidden(intervals: Iterable[Interval]) -> float:
    """Return the share of the seconds with communication in which something is computed as well."""
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
    """Return intervals that do not overlap."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((i.start_seconds, i.end_seconds) for i in intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def timeline_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suite `timeline`."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--trace", metavar="FILE", help="rank 0 writes a trace of all ranks, for Perfetto")


# Suites ---------------------------------------------------------------------------------------------------------------

ENGINE = """Compare a step with its parts, and watch memory over many steps.

    engine [CASE …] [--rounds 6] [--quick] [--resume]

The `overlap-…` cases compare a step to its computation and its communication. The `steady-…` cases take 200 steps and
watch memory. Earlier results of this suite also compared strategies with peers, as `strategies` does now.
"""
_ENGINE_CASES: list[OverlapCase | SteadyCase] = [
    OverlapCase("overlap-zero3", "zero3", "200mbit", elsewhere=True),
    OverlapCase("overlap-zero3-shared-cores", "zero3", "200mbit"),
    OverlapCase("overlap-zero3-own-cores", "zero3", "200mbit", towpath.Topology(2, 1)),
    SteadyCase("steady-zero3", "zero3"),
    SteadyCase("steady-paro-iig", "paro-iig"),
]

TIMELINE = """Measure the share of communication that runs while the device computes, from a trace of whole steps.

    timeline [CASE …] [--device cuda] [--trace FILE]

Each GPU has a rank, or two ranks share the only GPU, over the loopback. Without a GPU, two ranks use the CPU. With
--trace, rank 0 writes a trace of all ranks for https://ui.perfetto.dev.
"""
_STRATEGIES = ("zero3", "zero++", "paro-iig")

SUITES = (
    Suite("engine", ENGINE, _ENGINE_CASES),
    Suite(
        "timeline",
        TIMELINE,
        [TimelineCase(f"{name} {device}", name, device) for device in ("cuda", "cpu") for name in _STRATEGIES],
        rounds=1,
        options=timeline_options,
        chosen=lambda cases, options: [case for case in cases if case.device == options.device],
    ),
)
