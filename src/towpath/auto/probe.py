"""Measures, on every rank of a running job, what the planner has to know of its cluster.

Every rank must call `probe`: all measure together, between barriers, and what counts is the slowest of them. How often
and how large is decided by what was measured before, alike on all ranks.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from towpath.auto import host_work
from towpath.auto.probe_routes import route_probes
from towpath.auto.probe_together import Doing, beside
from towpath.codecs.kernels import kernels_for
from towpath.core.formats import Codec, dtype_name, registered_formats
from towpath.errors import TopologyError
from towpath.planner.profile import (
    INTER,
    INTRA,
    NOTHING,
    PAIRS,
    PRODUCT,
    SEVERAL,
    TOGETHER,
    Point,
    Profile,
    beside_name,
)
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups

SMALLEST, LARGEST = 1 << 12, 1 << 26  # bytes of a message
_SMALLEST_REGION = 1 << 17  # of a route's collective
_GROWTH = 8
_MOST_AT_ONCE = 200
_LARGE_SECONDS = 0.02  # that a message takes which is sent beside something else, at most
_ELEMENTS = 1 << 20  # that a codec encodes
_SIDE = {"cpu": 768, "cuda": 8192}
# What links may take of the whole; the rest takes as long as it does, a few seconds.
_SHARES = {"inter": 0.45, "intra": 0.15, "routes": 0.12, "pairs": 0.12}
_SLOWED = 5  # times as long as alone, what is done beside something else: about, where processors are shared
# A profile is taken again where a message that took at most so long takes more than so many times as long, or as short.
_CHECK_SECONDS, _MOST_CHANGED = 0.1, 1.6


@dataclass(frozen=True, slots=True)
class _Effort:
    """How much is done of what takes as long as it does. `short_seconds`: of work between two barriers, at least;
    `all_at_once_seconds`: of products on all ranks, where who comes late from the barrier is to count little;
    `small_messages`: that are sent one after the other beside a product; `warm_steps`: of models, before those that
    count; `checks`: whether that is measured, too, to which nothing is fitted."""

    repeats: int
    short_seconds: float
    all_at_once_seconds: float
    small_messages: int
    warm_steps: int
    checks: bool


_THOROUGH = _Effort(5, 0.01, 0.15, 100, 2, checks=True)
_QUICK = _Effort(3, 0.003, 0.05, 30, 1, checks=False)
_QUICK_BUDGET = 3.0  # seconds: with less, the quick effort

Work = Callable[[], None]
Say = Callable[[int, int], None]


def probe(
    topology: Topology | None = None, budget_seconds: float = 60.0, say: Say = lambda done, total: None
) -> Profile:
    """On every rank the same."""
    if not dist.is_initialized():
        raise TopologyError("probe: there is no process group. Call towpath.init() first.")
    if device_of_job().type == "cpu" and not Path("/proc/stat").exists():
        raise TopologyError("probe: on CPUs it needs Linux, which tells what moving bytes takes of the processors.")
    groups = Groups()
    topology = topology or Topology.detect()
    if topology.world != groups.world:
        raise TopologyError(f"probe: the job has {groups.world} ranks, and {topology} are {topology.world}.")
    return _Prober(groups, topology, budget_seconds, say).run()


def device_of_job() -> torch.device:
    """What this rank computes on, as its process group says."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in _backends() else torch.device("cpu")


def _backends() -> str:
    return str(dist.get_backend_config()) if dist.is_initialized() else ""


def still_holds(profile: Profile, groups: Groups) -> bool:
    """Whether one message, sent by all ranks at once, takes about what it took then. Every rank must call it."""
    if groups.world == 1:
        return True
    return _Prober(groups, profile.topology, 0.0, lambda done, total: None).repeats(profile)


class _Prober:
    def __init__(self, groups: Groups, topology: Topology, budget: float, say: Say) -> None:
        self._groups, self._topology, self._budget, self._say = groups, topology, budget, say
        self._effort = _THOROUGH if budget >= _QUICK_BUDGET else _QUICK
        self._device = device_of_job()
        self._rank = groups.rank
        groups.connect()  # the first messages go between some of the ranks only
        homes = groups.gather_objects((_boot_id(), socket.gethostname()))
        self._ranks_on_host = sum(home[0] == homes[self._rank][0] for home in homes)
        self._first_on_host = [home[0] for home in homes].index(homes[self._rank][0]) == self._rank
        self._points: list[Point] = []
        self._spent = 0.0  # seconds, by the last measurement
        self._host = homes[0][1]
        self._everyone = (tuple(range(groups.world)),)

    def run(self) -> Profile:
        parts = [
            partial(self._links, "inter", self._budget * _SHARES["inter"]),
            partial(self._links, "intra", self._budget * _SHARES["intra"]),
            *([partial(self._routes, self._budget * _SHARES["routes"])] if self._effort.checks else []),
            self._codecs,
            self._memory,
            self._compute,
            self._host_work,
            partial(self._pairs, self._budget * _SHARES["pairs"]),
        ]
        for done, part in enumerate(parts, 1):
            part()
            self._say(done, len(parts))
        memory = self._memory_of_a_rank()
        return Profile(
            self._topology,
            self._device.type,
            self._host,
            datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            os.cpu_count() or 1,
            self._ranks_on_host,
            memory,
            tuple(self._points),
            self._budget,
        )

    def repeats(self, profile: Profile) -> bool:
        """Of the slowest link, the largest message that does not take long."""
        which = "inter" if profile.has("inter, all") else "intra"
        points = profile.of(f"{which}, all")
        then = max((p for p in points if p.usual <= _CHECK_SECONDS), default=points[0], key=lambda p: p.size)
        self._measure(then.what, then.size, self._exchange(*self._neighbours(which), then.size, 1))
        now = self._points[-1].usual
        return 1 / _MOST_CHANGED <= now / then.usual <= _MOST_CHANGED

    # Links ----------------------------------------------------------------------------------------------------------

    def _links(self, which: str, seconds: float) -> None:
        """Messages to a neighbour, which sends as many back: from one rank alone, several at once, from all ranks."""
        topology = self._topology
        if (topology.nodes if which == "inter" else topology.ranks_per_node) == 1:
            return
        to, origin = self._neighbours(which)
        alone = (topology.local_of if which == "inter" else topology.node_of)(self._rank) == 0
        ways = {"one": alone, "all": True}
        for way, takes_part in ways.items():
            for size in self._sizes(seconds / 3):
                work = self._exchange(to, origin, size, 1) if takes_part else _nothing
                self._measure(f"{which}, {way}", size, work)
        work = self._exchange(to, origin, SMALLEST, SEVERAL) if alone else _nothing
        self._measure(f"{which}, several", SMALLEST, work)

    def _neighbours(self, which: str) -> tuple[int, int]:
        """To whom this rank sends, and from whom it receives."""
        node, local = self._topology.node_of(self._rank), self._topology.local_of(self._rank)
        nodes, ranks = self._topology.nodes, self._topology.ranks_per_node
        if which == "inter":
            return (node + 1) % nodes * ranks + local, (node - 1) % nodes * ranks + local
        return node * ranks + (local + 1) % ranks, node * ranks + (local - 1) % ranks

    def _exchange(self, to: int, origin: int, size: int, count: int, group: dist.ProcessGroup | None = None) -> Work:
        sent = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(count)]
        received = [torch.empty_like(tensor) for tensor in sent]

        def work() -> None:
            operations = [dist.P2POp(dist.irecv, tensor, origin, group) for tensor in received]
            operations += [dist.P2POp(dist.isend, tensor, to, group) for tensor in sent]
            for handle in dist.batch_isend_irecv(operations):
                handle.wait()

        return work

    def _routes(self, seconds: float) -> None:
        probes = list(route_probes(self._groups, self._topology, self._device))
        for probe_of in probes:
            for size in self._sizes(seconds / len(probes), _SMALLEST_REGION):
                self._measure(probe_of.name, size, probe_of.work(size))

    def _sizes(self, seconds: float, smallest: int = SMALLEST) -> Iterator[int]:
        """Larger ones, as long as the next is likely to fit into what is left of `seconds`."""
        size, left = smallest, seconds
        while size <= LARGEST:
            yield size
            left -= self._spent
            if (self._effort.repeats + 2) * self._points[-1].usual * _GROWTH > left:
                return
            size *= _GROWTH

    # What ranks do alone ---------------------------------------------------------------------------------------------

    def _codecs(self) -> None:
        for name in ("int8", "int4", "bf16", *registered_formats()):
            encode, decode = self._coding(name)
            self._measure(f"encode {name}", _ELEMENTS, encode, alone=True)
            self._measure(f"decode {name}", _ELEMENTS, decode, alone=True)

    def _coding(self, name: str) -> tuple[Work, Work]:
        kernels, codec = kernels_for(self._device), Codec.parse(name)
        x = torch.randn(_ELEMENTS, device=self._device)
        message = torch.empty(codec.encoded_bytes(_ELEMENTS), dtype=torch.uint8, device=self._device)
        return lambda: kernels.encode(codec, x, message), lambda: kernels.decode(codec, message, x)

    def _memory(self) -> None:
        for size in (1 << 16, 1 << 20, 1 << 24):
            x, y = (torch.ones(size // 4, device=self._device) for _ in range(2))
            self._measure("copy", size, lambda a=x, b=y: _ignore(a.copy_(b)), alone=True)
            self._measure("add", size, lambda a=x, b=y: _ignore(a.add_(b)), alone=True)

    def _compute(self) -> None:
        side = _SIDE[self._device.type]
        for dtype in (torch.float32, torch.bfloat16):
            product = self._product(dtype)
            self._measure(f"matmul {dtype_name(dtype)}", side, product, alone=True)
            if dtype == torch.float32:
                self._measure(TOGETHER, side, product, least_seconds=self._effort.all_at_once_seconds)

    def _product(self, dtype: torch.dtype) -> Work:
        side = _SIDE[self._device.type]
        a, b = (torch.ones(side, side, dtype=dtype, device=self._device) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: _ignore(torch.mm(a, b, out=out))

    def _pairs(self, seconds: float) -> None:
        """What a step does at once, each beside the other, on all ranks. Small messages beside a product tell how long
        one waits for a processor that computes."""
        wanted = PAIRS if self._effort.checks else ((PRODUCT, INTER), (PRODUCT, INTRA))
        names = dict.fromkeys(name for pair in wanted for name in pair)
        done = {name: self._doing(name) for name in names if any(point.what == name for point in self._points)}
        for link in (INTER, INTRA):
            if link in done:
                message = self._message(link, small=True)
                self._beside(done[PRODUCT], message, self._effort.small_messages * message.seconds)
        pairs = [
            (done[first], done[second])
            for first, second in (PAIRS if self._effort.checks else ())
            if first in done and second in done
        ]
        for first, second in pairs:
            self._beside(first, second, seconds / len(pairs) / _SLOWED)

    def _beside(self, first: Doing, second: Doing, seconds_alone: float) -> None:
        self._groups.barrier()
        rows = self._groups.gather_objects(beside(first, second, self._device, seconds_alone))
        for mine, other, seconds in zip((first, second), (second, first), zip(*rows, strict=True), strict=True):
            self._points.append(Point(beside_name(mine.name, other.name), mine.size, (max(seconds),)))

    def _doing(self, name: str) -> Doing:
        if name in (INTER, INTRA):
            return self._message(name, small=False)
        point = next(p for p in self._points if p.what == name)
        work = self._product(torch.float32) if name == PRODUCT else self._coding("int8")[0]
        return self._alone(name, point, work, True)

    def _message(self, name: str, small: bool) -> Doing:
        points = sorted((p for p in self._points if p.what == name), key=lambda p: p.size)
        quick = [p for p in points if p.usual <= _LARGE_SECONDS]
        point = points[0] if small or not quick else quick[-1]
        which = name.removesuffix(", all")
        work = self._exchange(*self._neighbours(which), point.size, 1, self._groups.of(self._everyone, which))
        work()
        return self._alone(name, point, work, False)

    def _alone(self, name: str, point: Point, work: Work, local: bool) -> Doing:
        """As it is on all ranks at once, while nothing else goes on."""
        self._measure(beside_name(name, NOTHING), point.size, work)
        return Doing(name, point.size, self._points[-1].usual, work, alone=local)

    def _host_work(self) -> None:
        if self._device.type == "cpu":
            points = self._groups.gather_objects(
                host_work.measured(self._groups, self._effort.warm_steps, self._effort.repeats)
            )
            # As rank 0 has it: what others take at the same time is theirs.
            self._points += points[0]

    # Measuring ------------------------------------------------------------------------------------------------------

    def _measure(
        self, what: str, size: int, work: Work, alone: bool = False, least_seconds: float | None = None
    ) -> None:
        """Of the slowest rank, and each repetition. `alone`: rank 0 does it while the others wait."""
        if alone and self._rank:
            work = _nothing
        work()  # connections are made, caches filled
        # Ranks do not leave a barrier together: what is short is done many times between two of them.
        once = max(self._groups.gather_objects(self._timed(work, 1)))
        count = max(1, min(_MOST_AT_ONCE, round((least_seconds or self._effort.short_seconds) / once)))
        taken: list[float] = []
        self._groups.barrier()
        busy = self._busy()
        for _ in range(self._effort.repeats):
            self._groups.barrier()
            taken.append(self._timed(work, count))
        self._groups.barrier()
        busy = (self._busy() - busy) / (self._effort.repeats * count) if self._first_on_host else 0.0
        rows = self._groups.gather_objects((taken, busy))
        slowest = tuple(max(row[0][i] for row in rows) for i in range(self._effort.repeats))
        self._points.append(Point(what, size, slowest, max(row[1] for row in rows)))
        self._spent = once + count * sum(slowest)

    def _timed(self, work: Work, count: int) -> float:
        """Seconds of each."""
        began = time.perf_counter()
        for _ in range(count):
            work()
        self._settle()
        return (time.perf_counter() - began) / count

    def _busy(self) -> float:
        """Of interest only where processors move the bytes."""
        return _busy_seconds() if self._device.type == "cpu" else 0.0

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _memory_of_a_rank(self) -> int:
        if self._device.type == "cuda":
            return min(self._groups.gather_objects(torch.cuda.get_device_properties(self._device).total_memory))
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(self._groups.gather_objects(total // self._ranks_on_host))


def _nothing() -> None:
    pass


def _ignore(_: torch.Tensor) -> None:
    pass


def _boot_id() -> str:
    """The same for all that run on one kernel: containers and network namespaces share its processors."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else socket.gethostname()


def _busy_seconds() -> float:
    """Of all processors of this host, the kernel's own work for the network too. Linux tells it."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
