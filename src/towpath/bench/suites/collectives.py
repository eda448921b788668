"""Our routes against the flat one: the times of one collective, each route on ranks of its own, in turns.

    towpath bench collectives [CASE …] [--rounds 6] [--quick] [--resume]

A turn is one collective (many, where it is short), between barriers; ratios are of the medians. Every run is added to
benchmarks/results/collectives.jsonl; `towpath bench report` shows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

import towpath
from towpath.bench.harness import figures, race
from towpath.bench.harness.contestants import Cluster, Entry
from towpath.bench.harness.pool import started
from towpath.bench.harness.suite import Settings, Suite
from towpath.bench.harness.worker import timed
from towpath.collectives.collective import GroupRank, WireBuffers, Workspace
from towpath.collectives.rank_transfer import CoalescedAllGather, select
from towpath.core import routes
from towpath.core.placement import GroupCollective
from towpath.core.routes import Group, Op, Route
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Range, Transfer
from towpath.core.transport import Transport

SMALL_KILOBYTES, SMALL = 256, 16
QUICK_KILOBYTES = 256
WIDE, TALL, SQUARE = towpath.Topology(2, 4), towpath.Topology(4, 2), towpath.Topology(2, 2)
# Where nothing is shaped a collective is over in no time: so many make a turn.
REPEATED = 10


@dataclass(frozen=True, slots=True)
class Case:
    """The contestants, and the ratios asked of some of them: (ours, theirs, at most). `intra`: of the loopbacks.

    Routes run on regions of `kilobytes`. "4 parts": ho-ring or two-hop cutting slices into so many, however short.
    """

    name: str
    op: Op
    topology: towpath.Topology = WIDE
    inter: str | None = "100mbit"
    intra: str | None = None
    contestants: tuple[str, ...] = ("flat", "hierarchical", "ho-ring")
    asked: tuple[tuple[str, str, float], ...] = ()
    kilobytes: int = 64 << 10

    def measure(self, settings: Settings) -> dict[str, Any]:
        kilobytes = QUICK_KILOBYTES if settings.quick else self.kilobytes
        times = REPEATED if self.inter is None else 1
        place = Cluster(self.topology, self.inter, self.intra)
        entries = {kind: Entry(place, Turn, (kind, self, kilobytes, times), warm_turns=1) for kind in self.contestants}
        with started(entries, settings.say) as made:
            run = race.run(made, settings.rounds, settings.say)
        pairs = self.asked or tuple((kind, self.contestants[0], None) for kind in self.contestants[1:])
        return {
            "checks": [figures.ratio(run.seconds, *pair) for pair in pairs],
            "times_a_turn": times,
            **run.recorded(),
        }


FAST = (("hierarchical", "flat", 0.66), ("ho-ring", "flat", 0.60))
SHAPED = (("ho-ring", "flat", 0.674), ("ho-ring", "hierarchical", 0.90))
IN_PARTS = ("1 part", "2 parts", "4 parts")
COALESCED = (("coalesced", "one after another", 0.40),)
CASES = [
    Case("gather-2x4", Op.ALL_GATHER, asked=FAST),
    Case("reduce-2x4", Op.REDUCE_SCATTER, asked=FAST),
    Case("gather-2x4-shaped", Op.ALL_GATHER, intra="1600mbit", asked=SHAPED),
    Case("reduce-2x4-shaped", Op.REDUCE_SCATTER, intra="1600mbit", asked=SHAPED),
    Case("gather-4x2", Op.ALL_GATHER, TALL),
    Case("reduce-4x2", Op.REDUCE_SCATTER, TALL),
    Case("gather-4x2-shaped", Op.ALL_GATHER, TALL, intra="1600mbit"),
    Case("reduce-4x2-shaped", Op.REDUCE_SCATTER, TALL, intra="1600mbit"),
    *(
        Case(f"{name}-{size}k-in-parts", op, SQUARE, inter, contestants=IN_PARTS, kilobytes=size)
        for size, inter in ((256, None), (1 << 10, None), (1 << 12, "1gbit"), (1 << 14, "1gbit"))
        for name, op in (("gather", Op.ALL_GATHER), ("reduce", Op.REDUCE_SCATTER))
    ),
    Case("coalesced", Op.ALL_GATHER, inter=None, contestants=("coalesced", "one after another"), asked=COALESCED),
]


class Turn:
    """The worker: a turn is the collective, `times` times."""

    def __init__(self, rank: int, world: int, kind: str, case: Case, kilobytes: int, times: int) -> None:
        self._collective = contestant(kind, case, kilobytes, members_of(rank, case.topology))
        self._times = times

    def turn(self) -> float:
        return timed(self._all) / self._times

    def _all(self) -> None:
        for _ in range(self._times):
            self._collective()


def members_of(rank: int, topology: towpath.Topology) -> GroupRank:
    everyone = tuple(range(topology.world))
    assert dist.group.WORLD is not None
    nodes = tuple(map(topology.node_of, everyone))
    return GroupRank(dist.group.WORLD, dist.group.WORLD, Group(everyone, everyone), rank, nodes)


def transfer_of(op: Op, route: Route, kilobytes: int, topology: towpath.Topology, members: GroupRank) -> Transfer:
    """Return the transfer of a float32 region over all ranks."""
    payload = Range("", "benchmark", kilobytes * 2**10 // 4, "float32")
    return Transfer(
        TransferKind.GRAD_SYNC, payload, GroupCollective(op, 1, (members.group,)), Transport(route), topology
    )


def contestant(kind: str, case: Case, kilobytes: int, members: GroupRank) -> Callable[[], None]:
    device = torch.device("cpu")
    workspace = Workspace(WireBuffers(device))
    if kind not in ("coalesced", "one after another"):
        route = kind
        if kind in IN_PARTS:
            route = "ho-ring" if case.op is Op.ALL_GATHER else "two-hop"
            routes.SMALLEST_PART_BYTES = kilobytes * 2**10 // case.topology.world // int(kind.split()[0])
        transfer = transfer_of(case.op, cast(Route, route), kilobytes, case.topology, members)
        collective, region = select(transfer, members, "gloo", device), torch.zeros(transfer.elements)
        mine = region[slice(*transfer.bounds(members.slot))]
        return lambda: collective.run(region, mine, workspace)
    transfer = transfer_of(case.op, "flat", SMALL_KILOBYTES, case.topology, members)
    regions = [torch.zeros(transfer.elements) for _ in range(SMALL)]
    shards = [region[slice(*transfer.bounds(members.slot))].clone() for region in regions]
    if kind == "coalesced":
        together = CoalescedAllGather([transfer] * SMALL, members, "gloo", device)
        return lambda: together.run(regions, shards, workspace)
    single = select(transfer, members, "gloo", device)

    def one_after_another() -> None:
        for region, shard in zip(regions, shards, strict=True):
            single.run(region, shard, workspace)

    return one_after_another


SUITE = Suite("collectives", __doc__ or "", CASES)
