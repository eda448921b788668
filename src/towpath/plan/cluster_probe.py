"""Measures on all ranks of a running job what the planner must know of its cluster.

Every rank must call `probe`. All ranks measure together, between barriers, and the slowest rank counts. Sizes and
repetitions depend only on earlier results that all ranks share, so all ranks choose them identically.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from towpath.codecs.exact import decode, encode, message_bound
from towpath.codecs.kernels import kernels_for
from towpath.collectives.backend import all_gather_single
from towpath.collectives.collective import GroupRank, WireBuffers, Workspace
from towpath.collectives.select import form_for, group_rank, select
from towpath.core.formats import DIFFERENCES, VALUES, Codec, dtype_name, registered_formats
from towpath.core.placement import GroupCollective, legal_placements, transitions
from towpath.core.routes import ROUTES, Form, Op, Route
from towpath.core.strategy import WITH_TRANSPORT, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Range
from towpath.errors import ConfigError
from towpath.plan.hardware import GroupMesh
from towpath.plan.profile import (
    LAUNCHED_CALL,
    LAUNCHED_KERNEL,
    SEVERAL,
    TOGETHER,
    Point,
    Profile,
    collective_name,
)
from towpath.plan.transfer_costs import move_shapes
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups

Work = Callable[[], object]

SMALLEST, LARGEST = 1 << 12, 1 << 26  # bytes of a message
_GROWTH = 8
# Each collective is repeated for at most so many seconds, this many times, and leaves time for larger sizes.
_SUSTAINED_SECONDS, _COLLECTIVE_REPEATS, _ROUNDS = 0.05, 2, 3
# Everything else is repeated so often. Short work is repeated between two barriers, for so many seconds at least.
_REPEATS, _SHORT_SECONDS = 5, 0.01
# The same for products on all ranks. A rank that leaves the barrier late must count little.
_TOGETHER_SECONDS = 0.15
_MOST_AT_ONCE = 200
_LAUNCHES = 20  # at a time, so few that the device's queue has room for all
_ELEMENTS = 1 << 20  # that a codec encodes
_SHORT = 1024  # elements of what is launched to measure the launch
_SIDE = {"cpu": 768, "cuda": 8192}
SIZES = tuple(1 << exponent for exponent in (16, 19, 22, 25, 26))  # bytes of a group's region
_PURPOSE = "probe"  # of the process groups
# The parts of the budget. All else takes a few seconds, whatever the budget is.
_SHARES = {"inter": 0.32, "intra": 0.1, "collectives": 0.4}
# A stored profile is measured anew if one message now takes this many times as long, or as short. The message is the
# largest that took at most so many seconds.
_CHECK_SECONDS, _MOST_CHANGED = 0.1, 1.6


def probe(
    topology: Topology | None = None,
    budget_seconds: float = 60.0,
) -> Profile:
    """Measure the cluster of the running job. Every rank must call it.

    Args:
        topology: The nodes, and the ranks of each node. Default: as the launcher placed them.
        budget_seconds: About how long it may take.

    Returns:
        The profile, identical on all ranks.

    Raises:
        ConfigError: If there is no process group, or the topology does not fit the job.
    """
    if not dist.is_initialized():
        raise ConfigError("probe: there is no process group. Call towpath.init() first.")
    if device_of_job().type == "cpu" and not Path("/proc/stat").exists():
        raise ConfigError("probe: on CPUs it needs Linux, which tells what moving bytes takes of the processors.")
    groups = Groups()
    topology = topology or Topology.detect()
    if topology.world != groups.world:
        raise ConfigError(f"probe: the job has {groups.world} ranks, and {topology} are {topology.world}.")
    return _Prober(groups, topology, budget_seconds).run()


def device_of_job() -> torch.device:
    """Return the device that this rank computes on, according to its process group."""
    nccl = dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def still_holds(profile: Profile, groups: Groups) -> bool:
    """Return whether a message still takes about as long as in the profile. Every rank must call it."""
    if groups.world == 1:
        return True
    return _Prober(groups, profile.topology, 0.0).repeats(profile)


class _Prober:
    def __init__(self, groups: Groups, topology: Topology, budget: float) -> None:
        topology.check_equal("probe")
        self._groups, self._topology, self._budget = groups, topology, budget
        self._device = device_of_job()
        self._rank = groups.rank
        groups.connect()  # the first messages are sent by some of the ranks only
        # All processes on one kernel have the same boot id. Containers and network namespaces share its processors.
        boot_id = Path("/proc/sys/kernel/random/boot_id")
        host = boot_id.read_text().strip() if boot_id.exists() else socket.gethostname()
        homes = groups.all_gather_objects((host, socket.gethostname()))
        self._ranks_on_host = sum(home[0] == homes[self._rank][0] for home in homes)
        self._first_on_host = [home[0] for home in homes].index(homes[self._rank][0]) == self._rank
        self._points: list[Point] = []
        self._spent = 0.0  # seconds that the last measurement took
        self._host = homes[0][1]

    def run(self) -> Profile:
        for which in ("inter", "intra"):
            self._links(which, self._budget * _SHARES[which])
        self._collectives(self._budget * _SHARES["collectives"])
        self._codecs()
        self._memory()
        self._compute()
        if self._device.type == "cuda":
            self._launches()
        return Profile(
            self._topology,
            self._device.type,
            self._host,
            datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            os.cpu_count() or 1,
            self._ranks_on_host,
            self._memory_of_a_rank(),
            tuple(self._points),
            self._budget,
        )

    def repeats(self, profile: Profile) -> bool:
        """Return whether the largest message that takes little time still takes as long, on the slowest link."""
        which = "inter" if profile.has("inter, all") else "intra"
        points = profile.of(f"{which}, all")
        then = max((p for p in points if p.usual <= _CHECK_SECONDS), default=points[0], key=lambda p: p.size)
        self._measure(then.what, then.size, self._exchange(which, then.size, 1))
        now = self._points[-1].usual
        return 1 / _MOST_CHANGED <= now / then.usual <= _MOST_CHANGED

    # Links ----------------------------------------------------------------------------------------------------------

    def _links(self, which: str, seconds: float) -> None:
        """Exchange messages with a neighbor: from one rank alone, from all ranks, and several at once."""
        topology = self._topology
        if (topology.nodes if which == "inter" else topology.ranks_per_node) == 1:
            return
        alone = (topology.local_of if which == "inter" else topology.node_of)(self._rank) == 0
        for name, takes_part in (("one", alone), ("all", True)):
            for size in self._sizes(seconds / 3):
                work = self._exchange(which, size, 1) if takes_part else _nothing
                self._measure(f"{which}, {name}", size, work)
        work = self._exchange(which, SMALLEST, SEVERAL) if alone else _nothing
        self._measure(f"{which}, several", SMALLEST, work)

    def _neighbors(self, which: str) -> tuple[int, int]:
        """Return the rank to which this rank sends, and the rank from which it receives."""
        node, local = self._topology.node_of(self._rank), self._topology.local_of(self._rank)
        nodes, ranks = self._topology.nodes, self._topology.ranks_per_node
        if which == "inter":
            return (node + 1) % nodes * ranks + local, (node - 1) % nodes * ranks + local
        return node * ranks + (local + 1) % ranks, node * ranks + (local - 1) % ranks

    def _exchange(self, which: str, size: int, count: int) -> Work:
        to, origin = self._neighbors(which)
        sent = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(count)]
        received = [torch.empty_like(tensor) for tensor in sent]

        def work() -> None:
            operations = [dist.P2POp(dist.irecv, tensor, origin) for tensor in received]
            operations += [dist.P2POp(dist.isend, tensor, to) for tensor in sent]
            for handle in dist.batch_isend_irecv(operations):
                handle.wait()

        return work

    def _sizes(self, seconds: float) -> Iterator[int]:
        """Yield larger and larger sizes, while the next one probably fits into what is left of `seconds`."""
        size, left = SMALLEST, seconds
        while size <= LARGEST:
            yield size
            left -= self._spent
            if (_REPEATS + 2) * self._points[-1].usual * _GROWTH > left:
                return
            size *= _GROWTH

    def _collectives(self, seconds: float) -> None:
        """Measure all collectives of a mesh with the two smallest sizes, the largest that fits, and those in between.

        So all routes of a mesh are known for the same sizes, and the planner prefers none for how it was measured.
        """
        for share, works in collectives_to_measure(self._groups, self._topology, self._device):
            # A shaped link lets the first bytes of a message pass at once. Collectives of a step follow one another, so
            # each is repeated until these bytes count little.
            sustained = min(_SUSTAINED_SECONDS, share * seconds / (_ROUNDS * (_COLLECTIVE_REPEATS + 1) * len(works)))
            before, spent = 0, 0.0
            for size in (*SIZES[:2], *reversed(SIZES[2:])):
                expected = [size / before * point.usual for point in self._points[-len(works) :]] if before else []
                rounds = (_COLLECTIVE_REPEATS + 1) * sum(max(sustained, each) for each in expected)
                if before and spent + rounds > share * seconds:
                    continue
                for name, work in works:  # the first round makes connections
                    self._measure(name, size, work(size), False, sustained, _COLLECTIVE_REPEATS, warm=not before)
                    spent += self._spent
                before = size
            seconds = max(0.0, seconds - spent)

    # Work of single ranks --------------------------------------------------------------------------------------------

    def _codecs(self) -> None:
        works = {name: self._coding(name) for name in ("int8", "int4", "bf16", *registered_formats())}
        for name, (encodes, decodes) in (works | exact_coding(self._device, _ELEMENTS)).items():
            self._measure(f"encode {name}", _ELEMENTS, encodes, alone=True)
            self._measure(f"decode {name}", _ELEMENTS, decodes, alone=True)

    def _coding(self, name: str) -> tuple[Work, Work]:
        kernels, codec = kernels_for(self._device), Codec.parse(name)
        x = torch.randn(_ELEMENTS, device=self._device)
        message = torch.empty(codec.encoded_bytes(_ELEMENTS), dtype=torch.uint8, device=self._device)
        return lambda: kernels.encode(codec, x, message), lambda: kernels.decode(codec, message, x)

    def _memory(self) -> None:
        for size in (1 << 16, 1 << 20, 1 << 24):
            x, y = (torch.ones(size // 4, device=self._device) for _ in range(2))
            self._measure("copy", size, partial(x.copy_, y), alone=True)
            self._measure("add", size, partial(x.add_, y), alone=True)

    def _compute(self) -> None:
        side = _SIDE[self._device.type]
        for dtype in (torch.float32, torch.bfloat16):
            a, b, out = (torch.ones(side, side, dtype=dtype, device=self._device) for _ in range(3))
            product = partial(torch.mm, a, b, out=out)
            self._measure(f"matmul {dtype_name(dtype)}", side, product, alone=True)
            if dtype == torch.float32:
                self._measure(TOGETHER, side, product, least_seconds=_TOGETHER_SECONDS)

    def _launches(self) -> None:
        """Measure how long this thread is busy with launches. The device has nothing to do when they begin."""
        region, shard = (torch.zeros(n, device=self._device) for n in (_SHORT * self._groups.world, _SHORT))
        works: dict[str, Any] = {LAUNCHED_KERNEL: partial(shard.add_, 1)}
        if self._groups.world > 1:
            which = "inter" if self._topology.nodes > 1 else "intra"
            everyone = (tuple(range(self._groups.world)),)
            group = self._groups.of(everyone, which, self._groups.backend(self._device))
            works[LAUNCHED_CALL] = lambda: all_gather_single(region, shard, group)
        for what, work in works.items():
            work()  # makes connections
            taken: list[float] = []
            for _ in range(_REPEATS):
                torch.cuda.synchronize(self._device)
                self._groups.barrier()
                began = time.perf_counter()
                for _ in range(_LAUNCHES):
                    work()
                taken.append((time.perf_counter() - began) / _LAUNCHES)
            torch.cuda.synchronize(self._device)
            slowest = tuple(map(max, zip(*self._groups.all_gather_objects(taken), strict=True)))
            self._points.append(Point(what, 1, slowest))

    # Measuring ------------------------------------------------------------------------------------------------------

    def _measure(
        self,
        what: str,
        size: int,
        work: Work,
        alone: bool = False,
        least_seconds: float = _SHORT_SECONDS,
        repeats: int = _REPEATS,
        warm: bool = True,
    ) -> None:
        """Record each repetition's seconds on the slowest rank. With `alone`, only rank 0 works."""
        if alone and self._rank:
            work = _nothing
        if warm:
            work()  # makes connections and fills caches
        # Ranks do not leave a barrier at the same time. Short work is therefore repeated between two barriers.
        once = max(self._groups.all_gather_objects(self._timed(work, 1)))
        count = max(1, min(_MOST_AT_ONCE, round(least_seconds / once)))
        taken: list[float] = []
        self._groups.barrier()
        busy = self._busy()
        for _ in range(repeats):
            self._groups.barrier()
            taken.append(self._timed(work, count))
        self._groups.barrier()
        busy = (self._busy() - busy) / (repeats * count) if self._first_on_host else 0.0
        rows = self._groups.all_gather_objects((taken, busy))
        slowest = tuple(max(row[0][i] for row in rows) for i in range(repeats))
        self._points.append(Point(what, size, slowest, max(row[1] for row in rows)))
        self._spent = once + count * sum(slowest)

    def _timed(self, work: Work, count: int) -> float:
        """Return the mean seconds of `count` repetitions."""
        began = time.perf_counter()
        for _ in range(count):
            work()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return (time.perf_counter() - began) / count

    def _busy(self) -> float:
        """Return the busy seconds of all processors of this host, with the kernel's work for the network."""
        if self._device.type != "cpu":
            return 0.0  # processors do not move the bytes
        fields = Path("/proc/stat").read_text().split(maxsplit=8)[1:8]
        user, nice, system, _idle, _iowait, irq, softirq = map(int, fields)
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")

    def _memory_of_a_rank(self) -> int:
        if self._device.type == "cuda":
            return min(self._groups.all_gather_objects(torch.cuda.get_device_properties(self._device).total_memory))
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(self._groups.all_gather_objects(total // self._ranks_on_host))


def _nothing() -> None:
    pass


# Exact codecs --------------------------------------------------------------------------------------------------------


def exact_coding(device: torch.device, elements: int) -> dict[str, tuple[Work, Work]]:
    """Return functions that encode and decode with each exact codec, by its name.

    The values are bfloat16: normally distributed gradients, and weights that a step of the optimizer has changed by
    about a hundredth of their size.
    """
    old, step = 0.02 * torch.randn(2, elements, generator=torch.Generator().manual_seed(0)).to(device)
    weights = [old.bfloat16(), (old + 0.01 * step).bfloat16()]
    values, held, received = step.bfloat16(), weights[0].clone(), torch.empty_like(weights[0])
    messages = [torch.empty(message_bound(elements, held.dtype), dtype=torch.uint8, device=device) for _ in range(3)]
    # Decoding changes the values that the receiver holds. So there and back take turns.
    for at in (0, 1):
        encode(weights[at], weights[1 - at], messages[at])
    encode(None, values, messages[2])
    turns = cycle(messages[:2])
    return {
        DIFFERENCES: (partial(encode, *weights, messages[0]), lambda: decode(next(turns), held, difference=True)),
        VALUES: (partial(encode, None, values, messages[2]), partial(decode, messages[2], received, difference=False)),
    }


# Collectives ---------------------------------------------------------------------------------------------------------


def planned_collectives(topology: Topology, form: Form) -> dict[tuple[Op, GroupMesh, str], GroupCollective]:
    """Return every collective that a plan can use, by operation, mesh and route: one with the groups of a placement."""
    found: dict[tuple[Op, GroupMesh, str], GroupCollective] = {}
    for placement in legal_placements(topology):
        shapes_by_kind, moves = move_shapes(placement, topology), transitions(placement, topology)
        for kind in WITH_TRANSPORT:
            shapes = shapes_by_kind[kind]
            # The planner tries routes for all collectives of a kind together.
            routes = ROUTES if any(not shape.grid.plain for shape in shapes) else ("flat",)
            for shape, move in zip(shapes, getattr(moves, kind.value), strict=True):
                for route in routes:
                    used = Transport(route).route_on(shape.op, shape.grid, form)
                    found.setdefault((shape.op, GroupMesh(shape.grid, shape.stride), used), move)
    return found


def collectives_to_measure(
    groups: Groups, topology: Topology, device: torch.device
) -> Iterator[tuple[float, list[tuple[str, Callable[[int], Work]]]]]:
    """Yield the collectives of each mesh, and their share of those that are still to come.

    Each has a name, and a function that returns its work for some number of bytes. Meshes inside a node come first,
    because they are fast. Every rank must iterate in the same order, because that creates process groups. They are
    closed before those of the next mesh are made, since each communicator of NCCL holds memory of the device.
    """
    form = form_for(groups.backend(device))
    by_mesh: dict[GroupMesh, list[tuple[Op, str, GroupCollective]]] = defaultdict(list)
    for (op, mesh, route), move in planned_collectives(topology, form).items():
        by_mesh[mesh].append((op, route, move))
    left = sum(map(len, by_mesh.values()))
    for mesh, planned in sorted(by_mesh.items(), key=lambda item: item[0].grid.nodes > 1):
        works: list[tuple[str, Callable[[int], Work]]] = []
        for op, route, move in planned:
            payload, transport = Range("", "probe", move.members, "float32"), Transport(cast(Route, route))
            transfer = Transfer(TransferKind.GRAD_SYNC, payload, move, transport, topology, form=form)
            members = group_rank(transfer, groups.rank, lambda ranks, purpose="": groups.of(ranks, _PURPOSE))
            works.append((collective_name(op.value, mesh, route), _collective(transfer, members, device)))
        yield len(planned) / left, works
        left -= len(planned)
        groups.close(_PURPOSE)


def _collective(transfer: Transfer, members: GroupRank, device: torch.device) -> Callable[[int], Work]:
    """Return a function that returns the work of `transfer` with a region of some number of bytes."""

    def of_size(size: int) -> Work:
        count = len(members.group.ranks)
        numel = max(1, size // 4 // count) * count
        region = torch.zeros(numel, device=device)
        sized = replace(transfer, payload=Range("", "probe", numel, "float32"))
        collective = select(sized, members, device)
        shard, workspace = region[slice(*sized.bounds(members.slot))], Workspace(WireBuffers(device))
        return lambda: collective.run(region, shard, workspace)

    return of_size
