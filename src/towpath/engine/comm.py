"""The communication of one model on one rank: `CommContext` makes its process groups, and turns plans into collectives.

A *lane* is a set of queues that share communicators (`core/queues.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from towpath.collectives.collective import GroupRank
from towpath.collectives.owners import OwnersExchange
from towpath.collectives.rank_transfer import (
    CoalescedAllGather,
    CoalescedReduceScatter,
    CoalescedTransfers,
    RankMatrices,
    RankTransfer,
    form_for,
    group_rank,
    select,
)
from towpath.core.queues import QUEUES, Lanes, shared_lanes
from towpath.core.routes import WITH_OWNERS
from towpath.core.strategy import BETWEEN_HOSTS, OUTER_KINDS, Strategy, TransferKind
from towpath.core.transfer import Ranks, Transfer
from towpath.core.unit_plan import UnitPlan
from towpath.engine.agree.digest import CollectiveLog
from towpath.engine.agree.program import Program
from towpath.engine.agree.watchdog import Watchdog
from towpath.engine.streams.queue import Queues, Streams
from towpath.engine.streams.record import Record
from towpath.engine.streams.streams import timer_for
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups

# How many thread blocks a kernel of NCCL may use in a group that crosses nodes, or that exchanges all-to-all inside a
# node. More blocks keep no link between nodes busier, and take processors of the device away from the computation. For
# all-to-alls inside a node, each block also takes memory for each peer.
MAX_CTAS = 16


def shares_groups(backend: str) -> bool:
    """Return whether queues share the process groups of their lane.

    The threads of gloo's queues need groups of their own. Their messages overlap, and groups cost little.
    """
    return backend != "gloo"


class CommContext:
    """The communication of one model on one rank: its process groups, queues, record and logs.

    `build` makes it, and units and buckets turn their transfers into `RankTransfer`s with it. Every rank must bind the
    same transfers in the same order, because binding creates process groups.

    `groups` are those of the ranks that train together. `job` are those of all islands. Without islands, both are one.
    `rank` is this rank as `groups` count, and `number` as the job counts, which errors name.
    """

    def __init__(self, groups: Groups, device: torch.device, log: CollectiveLog, job: Groups | None = None) -> None:
        self.rank, self.number = groups.rank, groups.number
        self.device = device
        self.groups, self.job = groups, job or groups
        self.log = log
        self._backend = groups.backend(device)
        self.watchdog = Watchdog.of(groups)
        self.record = Record(self.watchdog, timer_for(device), self.job.world // groups.world)
        self._everyone = Watchdog.of(self.job)
        self._everyone.oversee(self.watchdog)
        if device.type == "cuda":
            self._everyone.watch_processes()
        self.program = Program(log, self.watchdog)
        self.queues = Queues(Streams.of(groups, device), device, self.record, log)
        self.form = form_for(self._backend)
        self._lanes = Lanes()

    def share(self, strategy: Strategy, plans: Iterable[UnitPlan]) -> None:
        """Share process groups as the transfers of `plans` need it. Call it before anything is bound."""
        plans = tuple(plans)
        self._lanes = Lanes.of(plans)
        self.log.share(shared_lanes(strategy, plans))

    def bind(self, transfers: Iterable[Transfer]) -> list[RankTransfer]:
        """Return for each transfer the collective that executes it on this rank."""
        bound: list[RankTransfer] = []
        for transfer in transfers:
            members = self._members(transfer)
            collective = select(transfer, members, self.device)
            # Errors of transfers between islands name ranks of the whole job.
            peers = self._everyone if transfer.kind in OUTER_KINDS else self.watchdog
            bound.append(RankTransfer(transfer, members, collective, self.record, peers.describe_ranks))
        return bound

    def tell(self, failure: str) -> None:
        """Post the error of an exchange between islands. Ranks of all islands that wait for this rank quote it."""
        if self.watchdog.activity.failure:  # the first failure is the cause of others
            return
        for monitor in {self.watchdog, self._everyone}:
            monitor.tell(failure)

    def bind_matrices(self, transfer: Transfer) -> RankMatrices:
        """Return the exchange that executes a transfer of matrices between holders and owners on this rank."""
        members = self._members(transfer)
        exchange = OwnersExchange(transfer, members, self.device)
        return RankMatrices(transfer, members, exchange, self.record, self.watchdog.describe_ranks)

    def _members(self, transfer: Transfer) -> GroupRank:
        queue, topology = QUEUES[transfer.kind], transfer.topology
        if transfer.kind in OUTER_KINDS:  # its ranks are those of the job
            return group_rank(transfer, self.job.rank, lambda ranks, part: self._of_job(ranks, f"{queue}{part}"))

        def group_of(ranks: Ranks, part: str) -> dist.ProcessGroup:
            if transfer.kind in BETWEEN_HOSTS:
                return self.groups.control_on_host()
            if not shares_groups(self._backend):
                return self.groups.of(ranks, f"{queue}{part}", self._backend)
            return self._of_lane(ranks, queue, topology, borrows=transfer.move.op in WITH_OWNERS)

        return group_rank(transfer, self.rank, group_of, self.groups.first)

    def control(self, ranks: Ranks, topology: Topology) -> dist.ProcessGroup:
        """Return this rank's process group for collectives on the training thread, such as those of full parameters."""
        if shares_groups(self._backend):
            return self._of_lane(ranks, "control", topology, borrows=True)
        return self.groups.of(ranks, "control", self._backend)

    def _of_lane(self, ranks: Ranks, queue: str, topology: Topology, borrows: bool) -> dist.ProcessGroup:
        """Return this rank's process group of the lane of `queue`.

        With `borrows`, the parent serves where the lane has no group of all ranks. It is used in optimizer steps, and
        between steps, when no transfer overlaps.
        """
        mine = next(each for each in ranks if self.rank in each)
        lane, parent = self._lanes.lane(queue, mine, topology), self.groups.parent
        if borrows and len(ranks) == 1 and parent is not None and not self.groups.has(ranks, lane):
            return parent
        crosses = len(set(map(topology.node_of, mine))) > 1
        is_limited = crosses or (ranks[0], lane) in self._lanes.with_all_to_alls  # alike on all ranks
        limit = MAX_CTAS if is_limited and "NCCL_MAX_CTAS" not in os.environ else None
        return self.groups.of(ranks, lane, self._backend, limit)

    def _of_job(self, ranks: Ranks, purpose: str) -> dist.ProcessGroup:
        limit = MAX_CTAS if self._backend == "nccl" and "NCCL_MAX_CTAS" not in os.environ else None
        return self.job.of(ranks, purpose, self._backend, limit)

    def coalesce(self, alike: Sequence[RankTransfer]) -> CoalescedTransfers:
        """Return one transfer that runs all gathers, or all reductions, of the same members as one."""
        members = alike[0].members
        if alike[0].transfer.kind is TransferKind.REDUCE:
            return CoalescedTransfers(alike, CoalescedReduceScatter(members))
        return CoalescedTransfers(alike, CoalescedAllGather([bound.transfer for bound in alike], members, self.device))
