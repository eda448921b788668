"""The engine measured on the lab: against FSDP2 and the bare module, against its own parts, and over many steps.

    python benchmarks/engine.py [CASE …] [--rounds 5] [-o benchmarks/results/engine.json]

A race builds two contestants on the same ranks and lets them take turns; a round is one optimizer step of each, between
barriers, and the ratio is of the medians. An overlap case takes turns between a step, the same step with its transfers
left out, and the same transfers with nothing computed. A steady case makes 200 steps and watches memory. Absolute
seconds mean nothing on a shared machine. Results go into the file case by case: those not run stay.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gpt
import towpath
from results_file import keep, selected
from towpath import lab
from towpath.engine.record import Line
from towpath.spec.strategy import Kind

BATCH, SHORT, LENGTH, LONGEST = 4, 16, 128, 256
WIDTH, TINY = 384, 48
# Codecs are judged where FSDP2 spends so many times its compute on communication, at the rate of the first cases.
COMMUNICATION_PER_COMPUTE = 8


SHAPE = towpath.Topology(2, 2)


@dataclass(frozen=True, slots=True)
class Race:
    """`ours` against `theirs`: the ratio of their step times is at most `target`.

    A contestant is fsdp2, hsdp, bare, or a strategy of ours with its options ('zero3 route=hierarchical'). `dtype`:
    what travels and computes; the masters are fp32. `balanced`: sequences are so long that FSDP2 spends on
    communication the multiple asked for of its compute (forward and backward of the bare module, on all ranks at once);
    both take turns with the others, to show it. `elsewhere`: instead, sequences are short, and blocks wait, as
    for a device that computes and takes nothing from the cores that the network's work and the codecs need.
    """

    name: str
    ours: str
    theirs: str
    target: float
    topology: towpath.Topology = SHAPE
    inter: str | None = "200mbit"
    micro_steps: int = 1
    dtype: str = "float32"
    batch: int = BATCH
    balanced: bool = False
    elsewhere: bool = False
    width: int = WIDTH

    def measure(self, rounds: int) -> dict[str, Any]:
        contestants = dict.fromkeys((self.ours, self.theirs, *(BALANCE if self.balanced else ())))
        with lab.Lab(self.topology, inter=self.inter) as cluster:
            answers = cluster.call(race, self, tuple(contestants), rounds, timeout_seconds=1200)
        seconds = answers[0]["seconds"]
        medians = {kind: statistics.median(seconds[kind]) for kind in contestants}
        return {
            "checks": [Check("step, ours / theirs", medians[self.ours] / medians[self.theirs], self.target)],
            **balance_of(answers[0]["amounts"], seconds),
            "median_seconds": {kind: round(m, 4) for kind, m in medians.items()},
            "seconds": rounded(seconds),
            "host_share": round(max(a["host_share"] for a in answers), 5),
            "stats": answers[0]["stats"],
        }


@dataclass(frozen=True, slots=True)
class Field:
    """Many contestants in turns: `asked` has the ratios (ours, theirs) → at most."""

    name: str
    inter: str | None
    contestants: tuple[str, ...]
    asked: tuple[tuple[str, str, float], ...] = ()
    topology: towpath.Topology = SHAPE
    micro_steps: int = 1
    dtype: str = "bfloat16"
    batch: int = 1
    width: int = WIDTH
    elsewhere: bool = False

    def measure(self, rounds: int) -> dict[str, Any]:
        with lab.Lab(self.topology, inter=self.inter) as cluster:
            answers = cluster.call(race, self, self.contestants, rounds, timeout_seconds=2400)
        seconds = answers[0]["seconds"]
        medians = {kind: statistics.median(values) for kind, values in seconds.items()}
        return {
            "checks": [Check(f"{a} / {b}", medians[a] / medians[b], most) for a, b, most in self.asked],
            "times as fast as the first": {
                kind: round(medians[self.contestants[0]] / m, 3) for kind, m in medians.items()
            },
            "median_seconds": {kind: round(m, 4) for kind, m in medians.items()},
            "seconds": rounded(seconds),
            "stats": answers[0]["stats"],
        }


@dataclass(frozen=True, slots=True)
class Overlap:
    """With communication about equal to compute, a step takes at most 1.25 × the larger of the two.

    Compute alone is the same step of the same sharded model on all ranks at once, with every transfer of the schedule
    left out. Communication alone is every transfer of the schedule, on the engine's own lanes, with nothing computed.
    How much is computed is chosen so that both take equally long at the rate `inter`.

    `elsewhere`: blocks wait instead of computing, as for a device whose work takes nothing from the cores that the
    network's work needs; then exposed is step − compute. Otherwise both share the machine's cores, each slows the other
    down, and no step can be shorter than the CPU seconds of all ranks / the cores. Then the kernel says how long the
    thread that trains did not run: where each rank has a core of its own, that is what stats calls exposed.
    """

    name: str
    strategy: str
    inter: str
    topology: towpath.Topology = SHAPE
    elsewhere: bool = False

    def measure(self, rounds: int) -> dict[str, Any]:
        with lab.Lab(self.topology, inter=self.inter) as cluster:
            answers = cluster.call(overlap, self, rounds, timeout_seconds=1200)
        first = answers[0]
        step, compute, communication = (statistics.median(first["seconds"][k]) for k in PARTS)
        exposed = statistics.median(first["exposed_seconds"])
        checks = [
            Check("step / the larger of compute and communication", step / max(compute, communication), 1.25),
            Check("host seconds / step", max(a["host_share"] for a in answers), 0.02),
        ]
        if self.elsewhere:
            checks.append(Check("|exposed − (step − compute)| / step", abs(exposed - (step - compute)) / step, 0.05))
        elif self.topology.world <= len(os.sched_getaffinity(0)):
            idle = statistics.median(first["idle_seconds"])
            checks.append(
                Check("|exposed − time the training thread did not run| / step", abs(exposed - idle) / step, 0.05)
            )
        return {
            "checks": checks,
            "amount": first["amount"],
            "communication / compute": round(communication / compute, 4),
            "median_seconds": {"step": step, "compute": compute, "communication": communication, "exposed": exposed},
            "idle_seconds": rounded({"training thread": first["idle_seconds"], "exposed": first["exposed_seconds"]}),
            "seconds": rounded(first["seconds"]),
            "cpu_seconds_of_all_ranks": {k: round(sum(a["cpu_seconds"][k] for a in answers), 3) for k in PARTS},
            "exposed_where": first["where"],
        }


@dataclass(frozen=True, slots=True)
class Steady:
    """Over 200 steps no buffer is made after the second, and resident memory stays what it is after the 20th.

    With glibc told to keep no freed memory by thread: before 2.38 that pins the heap, which then grows (docs/log.md).
    """

    name: str
    strategy: str
    steps: int = 200
    topology: towpath.Topology = SHAPE

    def measure(self, rounds: int) -> dict[str, Any]:
        with environment_variable("GLIBC_TUNABLES", NO_THREAD_CACHES), lab.Lab(self.topology, inter=None) as cluster:
            answers = cluster.call(steady, self, timeout_seconds=1200)
        return {
            "checks": [
                Check("resident memory at the end / after 20 steps", max(a["growth"] for a in answers), 1.01),
                Check("buffers made after step 2", max(a["made_later"] for a in answers), 0),
            ],
            "GLIBC_TUNABLES": NO_THREAD_CACHES,
            "resident_bytes": [a["resident_bytes"] for a in answers],
            "host_share": round(max(a["host_share"] for a in answers), 5),
        }


@dataclass(frozen=True, slots=True)
class Check:
    what: str
    found: float
    at_most: float

    def __str__(self) -> str:
        return f"{self.what}: {self.found:.4f} (asked ≤ {self.at_most:.4g}: {'met' if self.met else 'MISSED'})"

    @property
    def met(self) -> bool:
        return self.found <= self.at_most


NO_THREAD_CACHES = "glibc.malloc.tcache_count=0"


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """For what is started inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


PARTS = ("step", "compute", "communication")
QUANTIZED_MICS = "mics gradients=int4"
CODED = ("zero3", "zero++", "qwz", "hpz", "qgz", "zero3 route=hierarchical", "hsdp", "mics", QUANTIZED_MICS)
ALONE = tuple((technique, "zero3", 1 / 1.2) for technique in ("qwz", "hpz", "qgz"))
BALANCED = (
    ("zero++-zero3", "zero++", "zero3", 1 / 3),
    ("zero++-zero3-hierarchical", "zero++", "zero3 route=hierarchical", 1 / 2),
    ("zero++-hsdp", "zero++", "hsdp", 1 / 1.9),
    ("mics-quantized", QUANTIZED_MICS, "mics", 1 / 2),
)


def balanced_races(elsewhere: bool) -> list[Race]:
    return [
        Race(
            name + "-elsewhere" * elsewhere,
            ours,
            theirs,
            target,
            dtype="bfloat16",
            batch=1,
            balanced=True,
            elsewhere=elsewhere,
        )
        for name, ours, theirs, target in BALANCED
    ]


CASES: list[Race | Field | Overlap | Steady] = [
    Race("zero3-fsdp2", "zero3", "fsdp2", 0.75),
    Race("mics-hsdp", "mics", "hsdp", 0.85),
    Race("mics-hsdp-4", "mics", "hsdp", 0.90, micro_steps=4),
    Race("zero3-fsdp2-unshaped", "zero3", "fsdp2", 1.0, inter=None),
    Race("one-rank", "zero3", "bare", 1.03, topology=towpath.Topology(1, 1), inter=None),
    Race("zero3-hierarchical-fsdp2", "zero3 route=hierarchical", "fsdp2", 0.55),
    Race("paro-nig-zero2", "paro-nig", "zero2", 1 / 2.2, inter="100mbit", micro_steps=10, dtype="bfloat16"),
    Race("paro-iig-zero3", "paro-iig", "zero3", 1 / 2.6, inter="100mbit", micro_steps=10, dtype="bfloat16"),
    Race("mics-zero3", "mics", "zero3", 1 / 2.89, inter="100mbit", micro_steps=4, dtype="bfloat16"),
    *balanced_races(elsewhere=False),
    *balanced_races(elsewhere=True),
    Race("codecs-that-cannot-pay", "zero++", "hpz", 1.03, inter=None, dtype="bfloat16"),
    Race("codecs-of-tiny-tensors", "zero++", "hpz", 1.03, inter=None, dtype="bfloat16", width=TINY),
    Field("codecs-50mbit", "50mbit", CODED),
    Field("codecs-200mbit", "200mbit", CODED, ALONE),
    Field("codecs-500mbit", "500mbit", CODED),
    Field("codecs-1gbit", "1gbit", CODED),
    Overlap("overlap-zero3", "zero3", "200mbit", elsewhere=True),
    Overlap("overlap-zero3-shared-cores", "zero3", "200mbit"),
    Overlap("overlap-zero3-own-cores", "zero3", "200mbit", towpath.Topology(2, 1)),
    Steady("steady-zero3", "zero3"),
    Steady("steady-paro-iig", "paro-iig"),
]


def rounded(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    return {kind: [round(s, 4) for s in values] for kind, values in seconds.items()}


def model(width: int = WIDTH, elsewhere: bool = False) -> nn.Module:
    """About 17 million parameters, or fewer. `elsewhere`: its blocks wait besides."""
    torch.manual_seed(0)
    made = gpt.GPT(width=width, depth=9, heads=6, context=LONGEST, vocabulary=2048)
    if elsewhere:
        for block in made.blocks:
            block.__class__ = Waiting
    return made


FOREIGN = ("fsdp2", "hsdp", "bare", "compute")


def contestant(kind: str, case: Race | Field) -> tuple[Any, Callable[[Any, bool], Any]]:
    """A model by one engine, and the context of one of its micro-steps (told whether it is the last)."""
    made: Any = model(case.width, case.elsewhere)
    if kind == "compute":
        return made.to(getattr(torch, case.dtype)), lambda model, last: nullcontext()
    if kind == "bare":
        return made, lambda model, last: nullcontext()
    if kind in ("fsdp2", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        chosen = getattr(torch, case.dtype)
        policy = MixedPrecisionPolicy(chosen, chosen) if case.dtype != "float32" else MixedPrecisionPolicy()
        nodes, ranks_per_node = case.topology.nodes, case.topology.ranks_per_node
        shape = (case.topology.world,) if kind == "fsdp2" else (nodes, ranks_per_node)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for block in made.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(made, mesh=mesh, mp_policy=policy)

        def fsdp(model: Any, last: bool) -> Any:
            if kind == "hsdp":
                model.set_requires_all_reduce(last)
            return nullcontext()

        return made, fsdp
    name, *options = kind.split()
    strategy = towpath.strategy(name, case.topology, **dict(option.split("=") for option in options))
    precision = None if case.dtype == "float32" else towpath.Precision(params=case.dtype, reduce=case.dtype)
    return towpath.shard(
        made, strategy, precision=precision
    ), lambda model, last: nullcontext() if last else model.no_sync()


def race(rank: int, world: int, case: Race | Field, contestants: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """What every rank does. Seconds of each step, and what the engine says of its own."""
    torch.set_num_threads(1)
    made = {kind: contestant(kind, case) for kind in contestants}
    data = Feed(rank, case.batch, SHORT if case.elsewhere else LENGTH)
    runners = {
        kind: _computing(model, data) if kind == "compute" else _stepper(model, context, data, case.micro_steps)
        for kind, (model, context) in made.items()
    }
    tokens = Knob(data.take_length, one=LENGTH // 2, other=LENGTH, least=LENGTH // 4, most=LONGEST)
    knob = WAIT if case.elsewhere else tokens
    balance = Balance(runners, knob) if "compute" in contestants else None
    amounts: list[float] = []
    seconds: dict[str, list[float]] = {kind: [] for kind in runners}
    first = next(kind for kind in contestants if kind not in FOREIGN)
    ours = made[first][0]
    for turn in range(rounds + 2):
        if turn == 2:  # two steps of each warm up
            host = towpath.stats(ours).seconds_host
        taken = {kind: timed(step) for kind, step in runners.items()}
        if turn >= 2:
            amounts.append(0 if balance is None else balance.amount)
            for kind, value in taken.items():
                seconds[kind].append(value)
        if balance is not None:
            balance.keep(taken)
    stats = towpath.stats(ours)
    share = (stats.seconds_host - host) / sum(seconds[first])
    return {"seconds": seconds, "amounts": amounts, "host_share": share, "stats": str(stats)}


class Feed:
    """Endless (inputs, targets) of a rank, as long as is asked for at the time."""

    def __init__(self, rank: int, batch: int, length: int) -> None:
        self.length = length
        self._of = cache(partial(gpt.batches, rank, batch))

    def take_length(self, length: float) -> None:
        self.length = round(length)

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return next(self._of(self.length))


BALANCE = ("fsdp2", "compute")


@dataclass(frozen=True, slots=True)
class Knob:
    """What decides how much is computed; measured at two settings."""

    turn: Callable[[float], None]
    one: float
    other: float
    least: float
    most: float


class Balance:
    """So much computed that FSDP2 spends on communication the multiple asked for of its compute.

    A shared machine computes at another speed each minute: the amount follows it from round to round.
    """

    def __init__(self, works: dict[str, Callable[[], None]], knob: Knob) -> None:
        self._knob = knob
        compute: list[float] = []
        for amount in (knob.one, knob.other):
            knob.turn(amount)
            compute.append(statistics.median(timed(works["compute"]) for _ in range(7)))
        self._each = (compute[1] - compute[0]) / (knob.other - knob.one)
        self._none = compute[0] - self._each * knob.one
        self.amount = knob.other
        self._slower: list[float] = []  # by round, than then
        timed(works["fsdp2"])
        self.keep({kind: timed(works[kind]) for kind in BALANCE})

    def keep(self, taken: dict[str, float]) -> None:
        """After a round: choose the amount of the next."""
        self._slower.append(taken["compute"] / (self._none + self._each * self.amount))
        wanted = taken["fsdp2"] / (1 + COMMUNICATION_PER_COMPUTE) / statistics.median(self._slower[-3:])
        amount = torch.tensor([(wanted - self._none) / self._each])
        dist.broadcast(amount, 0)
        self.amount = float(amount.clamp(self._knob.least, self._knob.most))
        self._knob.turn(self.amount)


def balance_of(amounts: list[float], seconds: dict[str, list[float]]) -> dict[str, Any]:
    if "compute" not in seconds:
        return {}
    shares = [step / compute - 1 for step, compute in zip(seconds["fsdp2"], seconds["compute"], strict=True)]
    return {
        "tokens, or seconds that a block waits": [round(a, 4) for a in amounts],
        "communication / compute of fsdp2": round(statistics.median(shares), 2),
    }


def timed(work: Callable[[], None]) -> float:
    """Seconds until the last rank is through, from when all are there."""
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def _stepper(model: Any, context: Callable[[Any, bool], Any], data: Any, micro_steps: int) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        for micro in range(micro_steps):
            with context(model, micro == micro_steps - 1):
                (model(*next(data)) / micro_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _computing(model: Any, data: Any) -> Callable[[], None]:
    def step() -> None:
        model(*next(data)).backward()
        model.zero_grad()

    return step


class Waiting(gpt.Block):
    """Waits twice as long before its gradients as after its result."""

    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Wait.apply(super().forward(x))

    @classmethod
    def take_seconds(cls, seconds: float) -> None:
        cls.seconds = seconds


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(Waiting.seconds)
        return x.clone()  # of a view FSDP2 would warn

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * Waiting.seconds)
        return grad


WAIT = Knob(Waiting.take_seconds, one=0.01, other=0.02, least=0.0, most=1.0)


@dataclass(frozen=True, slots=True)
class Amount:
    """How much one step computes."""

    batch: int
    length: int
    wait_seconds: float = 0.0

    def stepper(self, made: Any, rank: int) -> Callable[[], None]:
        step = _stepper(made, _once, gpt.batches(rank, self.batch, self.length), 1)

        def run() -> None:
            Waiting.seconds = self.wait_seconds
            step()

        return run


def overlap(rank: int, world: int, case: Overlap, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    made: Any = towpath.shard(model(elsewhere=case.elsewhere), case.strategy, topology=case.topology)
    alone = partial(communicate, made.towpath_engine)
    little, more = (
        (Amount(1, SHORT), Amount(1, SHORT, 0.1)) if case.elsewhere else (Amount(4, LENGTH), Amount(12, LENGTH))
    )
    for _ in range(2):
        little.stepper(made, rank)()
    amount = _balanced(little, more, lambda a: a.stepper(made, rank), alone)
    step = amount.stepper(made, rank)
    works = {"step": step, "compute": partial(without_transfers, step), "communication": alone}
    seconds, cpu = ({part: [] for part in PARTS} for _ in range(2))
    exposed: list[float] = []
    idle: list[float] = []
    works["step"] = partial(noting_idle, works["step"], idle)
    host = 0.0
    where: Counter[str] = Counter()
    for _ in range(rounds):
        for part, work in works.items():
            before, cpu_before = towpath.stats(made), time.process_time()
            seconds[part].append(timed(work))
            cpu[part].append(time.process_time() - cpu_before)
            if part == "step":
                after = towpath.stats(made)
                host += after.seconds_host - before.seconds_host
                exposed.append(after.seconds_exposed - before.seconds_exposed)
                where.update(_exposed_where(after))
                where.subtract(_exposed_where(before))
    return {
        "amount": asdict(amount),
        "seconds": seconds,
        "cpu_seconds": {part: statistics.median(values) for part, values in cpu.items()},
        "exposed_seconds": exposed,
        "idle_seconds": idle,
        "where": {name: round(value / rounds, 4) for name, value in where.most_common() if value > 0.001},
        "host_share": host / sum(seconds["step"]),
    }


def noting_idle(work: Callable[[], None], idle: list[float]) -> None:
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    idle.append((time.perf_counter() - wall) - (time.thread_time() - cpu))


def _once(model: Any, last: bool) -> Any:
    return nullcontext()


def _balanced(
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
        little.wait_seconds + share * (more.wait_seconds - little.wait_seconds),
    )


def _exposed_where(stats: towpath.Stats) -> dict[str, float]:
    return {f"{t.transfer.kind.value} of {t.transfer.unit or 'root'}": t.seconds_exposed for t in stats.transfers}


def without_transfers(step: Callable[[], None]) -> None:
    """A step that computes with whatever the buffers hold."""
    run, Line.run = Line.run, lambda self, region, shard: None
    try:
        step()
    finally:
        Line.run = run


def communicate(engine: Any) -> None:
    """Every transfer of a step in the engine's order, each as soon as its lane and its buffers are free."""
    backward = [u for u in reversed(engine.units) if not u.kept] + [u for u in engine.units if u.kept]
    with torch.no_grad():
        for unit in engine.units:
            gathered(unit, Kind.GATHER, engine)
        ready = {unit: gathered(unit, Kind.BACKWARD_GATHER, engine) for unit in backward if not unit.kept}
        for unit in backward:
            if unit in ready and ready[unit] is not None:
                ready[unit].wait()
            unit.begin_gradients(engine.gradients)
            engine._synced.append(unit.sync(unit.reduce(), engine._world))
        engine._abandon()  # waits for the reductions, and forgets the gradients, which were nobody's


def gathered(unit: Any, kind: Kind, engine: Any) -> Any:
    unit.gather(kind, engine.weights, keep_copy=True)
    unit.release()  # nobody computes with it: the next unit in the same slot may follow
    return unit.ready


def steady(rank: int, world: int, case: Steady) -> dict[str, Any]:
    torch.set_num_threads(1)
    made: Any = towpath.shard(gpt.GPT(context=64), case.strategy, topology=case.topology)
    step = _stepper(made, _once, gpt.batches(rank, 1, 64), 1)
    resident: list[int] = []
    for number in range(1, case.steps + 1):
        step()
        resident.append(resident_bytes())
        if number == 2:
            before, began = towpath.stats(made), time.perf_counter()
    taken, after = time.perf_counter() - began, towpath.stats(made)
    return {
        "growth": max(resident[20:]) / resident[19],
        "made_later": after.buffers_made - before.buffers_made,
        "host_share": (after.seconds_host - before.seconds_host) / taken,
        "resident_bytes": {"step 2": resident[1], "step 20": resident[19], "last": resident[-1]},
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"which of {', '.join(c.name for c in CASES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    for case in selected(CASES, options.cases):
        found = case.measure(options.rounds)
        print(case.name)
        for name, value in found.items():
            for line in value if name == "checks" else [f"{name}: {value}"]:
                print(f"  {line}", flush=True)
        if options.output:
            found["checks"] = [{**asdict(check), "met": check.met} for check in found["checks"]]
            keep(options.output, {"case": asdict(case), **found}, [c.name for c in CASES])


if __name__ == "__main__":
    main()
