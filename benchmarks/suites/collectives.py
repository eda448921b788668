"""Measure one collective on each of our routes against the flat one, each route on ranks of its own.

    collectives [CASE …] [--rounds 6] [--quick] [--resume]

A sample is one collective between barriers, or many where it is short. Ratios are of medians.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

import towpath
from benchmarks.harness import figures
from benchmarks.harness.candidates import LabPlace, Launch, timed
from benchmarks.harness.comparison import compare, started
from benchmarks.harness.suite import Settings, Suite
from towpath.collectives.collective import GroupRank, WireBuffers, Workspace
from towpath.collectives.select import CoalescedAllGather, group_rank, select
from towpath.core import routes
from towpath.core.placement import GroupCollective
from towpath.core.routes import Form, Group, Op, Route
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Range
from towpath.topology.groups import Groups

SMALL_KILOBYTES, SMALL = 256, 16
QUICK_KILOBYTES = 256
WIDE, TALL, SQUARE = towpath.Topology(2, 4), towpath.Topology(4, 2), towpath.Topology(2, 2)
# On unshaped links a collective is short, so a sample has several.
REPEATED = 10


@dataclass(frozen=True, slots=True)
class CollectiveCase:
    """Candidates on regions of `kilobytes`, and the limits of some ratios: (ours, theirs, at most).

    A candidate is a route, or "4 parts": ho-ring or two-hop with slices in four parts, however short.
    `form`: How the routes are executed. A reduce-scatter of gloo sends the bytes of an all-reduce.
    """

    name: str
    op: Op
    topology: towpath.Topology = WIDE
    inter: str | None = "100mbit"
    intra: str | None = None
    candidates: tuple[str, ...] = ("flat", "hierarchical", "ho-ring")
    limits: tuple[tuple[str, str, float], ...] = ()
    kilobytes: int = 64 << 10
    form: Form = Form.MESSAGES

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the candidates."""
        kilobytes = QUICK_KILOBYTES if settings.quick else self.kilobytes
        times = REPEATED if self.inter is None else 1
        place = LabPlace(self.topology, self.inter, self.intra)
        launches = {
            kind: Launch(place, CollectiveWorker, (kind, self, kilobytes, times), warm_up=1) for kind in self.candidates
        }
        with started(launches, settings.say) as made:
            found = compare(made, settings.rounds, settings.say)
        pairs = self.limits or tuple((kind, self.candidates[0], None) for kind in self.candidates[1:])
        return {
            "checks": [figures.ratio(found.seconds, *pair) for pair in pairs],
            "times_a_sample": times,
            **found.recorded(),
        }


FAST = (("hierarchical", "flat", 0.66), ("ho-ring", "flat", 0.60))
SHAPED = (("ho-ring", "flat", 0.674), ("ho-ring", "hierarchical", 0.90))
IN_CALLS = (("ho-ring", "hierarchical", 0.80),)
IN_PARTS = ("1 part", "2 parts", "4 parts")
COALESCED = (("coalesced", "one after another", 0.40),)
CASES = [
    CollectiveCase("gather-2x4", Op.ALL_GATHER, limits=FAST),
    CollectiveCase("reduce-2x4", Op.REDUCE_SCATTER, limits=FAST),
    CollectiveCase("gather-2x4-shaped", Op.ALL_GATHER, intra="1600mbit", limits=SHAPED),
    CollectiveCase("reduce-2x4-shaped", Op.REDUCE_SCATTER, intra="1600mbit", limits=SHAPED),
    CollectiveCase("gather-4x2", Op.ALL_GATHER, TALL),
    CollectiveCase("reduce-4x2", Op.REDUCE_SCATTER, TALL),
    CollectiveCase("gather-4x2-shaped", Op.ALL_GATHER, TALL, intra="1600mbit"),
    CollectiveCase("reduce-4x2-shaped", Op.REDUCE_SCATTER, TALL, intra="1600mbit"),
    # As NCCL gets them. A node sends 4 slices out and 24 inside, or 6 and 8, which take as long on these links.
    *(
        CollectiveCase(
            f"{name}-{topology.nodes}x{topology.ranks_per_node}-in-calls",
            *(op, topology, "100mbit", intra),
            candidates=("hierarchical", "ho-ring"),
            limits=IN_CALLS,
            form=Form.COLLECTIVES,
        )
        for topology, intra in ((WIDE, "600mbit"), (TALL, "133mbit"))
        for name, op in (("gather", Op.ALL_GATHER), ("reduce", Op.REDUCE_SCATTER))
    ),
    *(
        CollectiveCase(f"{name}-{size}k-in-parts", op, SQUARE, inter, candidates=IN_PARTS, kilobytes=size)
        for size, inter in ((256, None), (1 << 10, None), (1 << 12, "1gbit"), (1 << 14, "1gbit"))
        for name, op in (("gather", Op.ALL_GATHER), ("reduce", Op.REDUCE_SCATTER))
    ),
    CollectiveCase(
        "coalesced", Op.ALL_GATHER, inter=None, candidates=("coalesced", "one after another"), limits=COALESCED
    ),
]


class CollectiveWorker:
    """A worker whose sample is the mean of `times` collectives."""

    def __init__(self, rank: int, world: int, kind: str, case: CollectiveCase, kilobytes: int, times: int) -> None:
        self._collective = work_of(kind, case, kilobytes, members_of(rank, case.topology))
        self._times = times

    def sample(self) -> float:
        """Return the seconds of one collective."""
        return timed(self._all) / self._times

    def _all(self) -> None:
        for _ in range(self._times):
            self._collective()


def members_of(rank: int, topology: towpath.Topology) -> GroupRank:
    """Return this rank as a member of the group of all ranks."""
    everyone = tuple(range(topology.world))
    assert dist.group.WORLD is not None
    nodes = tuple(map(topology.node_of, everyone))
    return GroupRank(dist.group.WORLD, Group(everyone, everyone), rank, nodes)


def transfer_of(
    op: Op,
    route: Route,
    kilobytes: int,
    topology: towpath.Topology,
    members: GroupRank,
    form: Form = Form.MESSAGES,
) -> Transfer:
    """Return the transfer of a float32 region over all ranks."""
    payload = Range("", "benchmark", kilobytes * 2**10 // 4, "float32")
    return Transfer(
        TransferKind.GRAD_SYNC, payload, GroupCollective(op, 1, (members.group,)), Transport(route), topology, form=form
    )


def work_of(kind: str, case: CollectiveCase, kilobytes: int, members: GroupRank) -> Callable[[], None]:
    """Return a function that runs the collective of a candidate once."""
    device = torch.device("cpu")
    workspace = Workspace(WireBuffers(device))
    if kind not in ("coalesced", "one after another"):
        route = kind
        if kind in IN_PARTS:
            route = "ho-ring" if case.op is Op.ALL_GATHER else "two-hop"
            routes.SMALLEST_PART_BYTES = kilobytes * 2**10 // case.topology.world // int(kind.split()[0])
        transfer = transfer_of(case.op, cast(Route, route), kilobytes, case.topology, members, case.form)
        if case.form is Form.COLLECTIVES:
            # Also in a quick run. In a full one, these are the parts of any transfer.
            routes.SMALLEST_PART_BYTES_IN_CALLS = kilobytes * 2**10 // case.topology.world // 4
            groups = Groups()
            members = group_rank(transfer, members.rank, lambda ranks, purpose: groups.of(ranks, f"benchmark{purpose}"))
        collective, region = select(transfer, members, device), torch.zeros(transfer.elements)
        mine = region[slice(*transfer.bounds(members.slot))]
        return lambda: collective.run(region, mine, workspace)
    transfer = transfer_of(case.op, "flat", SMALL_KILOBYTES, case.topology, members)
    regions = [torch.zeros(transfer.elements) for _ in range(SMALL)]
    shards = [region[slice(*transfer.bounds(members.slot))].clone() for region in regions]
    if kind == "coalesced":
        together = CoalescedAllGather([transfer] * SMALL, members, device)
        return lambda: together.run(regions, shards, workspace)
    single = select(transfer, members, device)

    def one_after_another() -> None:
        for region, shard in zip(regions, shards, strict=True):
            single.run(region, shard, workspace)

    return one_after_another


SUITES = (Suite("collectives", __doc__ or "", CASES),)
