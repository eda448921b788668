"""The communication of one model on one rank: its streams, its process groups, and the collectives of its transfers.

A *lane* is a set of queues that share communicators (`core/queues.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import final

import torch
import torch.distributed as dist

from towpath.collectives.collective import Collective, GroupRank
from towpath.collectives.point_to_point import OwnersExchange
from towpath.collectives.select import CoalescedAllGather, CoalescedReduceScatter, form_for, group_rank, select
from towpath.core.queues import HOST_QUEUES, MAX_IN_FLIGHT, QUEUES, CommunicatorSharing, shared_lanes
from towpath.core.routes import WITH_OWNERS
from towpath.core.strategy import BETWEEN_HOSTS, OUTER_KINDS, Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.unit_plan import UnitPlan
from towpath.daemons import ends_in_error
from towpath.engine.agree.digest import CollectiveLog
from towpath.engine.agree.program import Program
from towpath.engine.agree.watchdog import Watchdog
from towpath.engine.threads import ThreadStream
from towpath.engine.transfer_queues import CudaStream, Queues, RankTransfer, Stream
from towpath.logs import logger
from towpath.observe.record import DeviceTimer, Record, Timer
from towpath.topology.cluster import RankSets, Topology
from towpath.topology.groups import Groups

_LOG = logger("engine")

# The priorities of the queues' CUDA streams. The computation (0) waits for most transfers soon, so these go first (-1).
# Nothing waits for the sync of gradients before the boundary, or for an exchange between islands before it is applied.
_LAST = (QUEUES[TransferKind.GRAD_SYNC], QUEUES[TransferKind.OUTER])
PRIORITIES = {queue: 0 if queue in _LAST else -1 for queue in QUEUES.values()}


def make_stream(name: str, device: torch.device, depth: int) -> Stream:
    """Return a new stream that runs the queue `name`, with `depth` jobs at a time."""
    # What ranks compare is in the host's memory, and a thread sends it on GPUs, too. So the training thread can check,
    # while it waits, whether its peers can still come. A thread also sends exchanges that are in the host's memory.
    if device.type != "cuda" or name in HOST_QUEUES:
        return ThreadStream(name, depth)
    _warn_of_one_connection()
    return CudaStream(device, depth, PRIORITIES[name])


@cache
def _warn_of_one_connection() -> None:
    """Warn once per process if the streams of a GPU share one hardware queue."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        _LOG.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, so transfers queue behind the computation and cannot overlap with it. "
            "Unset it, or set it to 32, before the program uses CUDA."
        )


@final
class Streams(dict[str, Stream]):
    """The streams of one process group on this rank, by the names of their queues. They are made when first used.

    All models that are sharded over one process group share them. So they share the threads and the connections of the
    process groups, and their number does not grow with the number of models. Sharing also gives the transfers of
    several models the same order on all ranks.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @staticmethod
    def of(groups: Groups, device: torch.device) -> Streams:
        """Return the streams of a process group, which are made at the first call."""

        def make() -> Streams:
            streams = Streams(device)
            atexit.register(leave, weakref.ref(streams), Watchdog.of(groups))
            return streams

        return groups.shared(f"streams on {device}", make)

    def __missing__(self, name: str) -> Stream:
        self[name] = make_stream(name, self._device, MAX_IN_FLIGHT[name])
        return self[name]


def leave(streams: weakref.ref[Streams], peers: Watchdog) -> None:
    """Wait at the program's end for jobs that are under way, because their threads cannot be stopped."""
    # If the ranks have diverged, such a job can never end. It would block the program until the process group's
    # timeout. So the process then exits at once, with status 1.
    if peers.diverged:
        _LOG.error("this process ends with status 1: %s", peers.diverged)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    left = streams()
    # After an error, a job may wait for a node that is gone without a word. `daemons` then ends the process.
    if left is not None and not ends_in_error():
        with contextlib.suppress(Exception):
            for stream in left.values():
                stream.finish()


# How many thread blocks a kernel of NCCL may use in a group that crosses nodes, or that exchanges all-to-all inside a
# node. More blocks keep no link between nodes busier, and take processors of the device away from the computation. For
# all-to-alls inside a node, each block also takes memory for each peer.
MAX_CTAS = 16
# The same between islands. Two blocks keep their link busy, and an exchange holds them for as long as it takes.
ISLAND_CTAS = 2


def shares_groups(backend: str) -> bool:
    """Return whether queues share the process groups of their lane."""
    # The threads of gloo's queues need groups of their own. Their messages overlap, and groups cost little.
    return backend != "gloo"


class CommContext:
    """The communication of one model on one rank: its process groups, queues, record and logs.

    `build` makes it, and units and buckets turn their transfers into `RankTransfer`s with it. Every rank must bind the
    same transfers in the same order, because binding creates process groups.

    `groups` are those of the ranks that train together. `job` are those of all islands. Without islands, both are one.
    `rank` is this rank as `groups` count, and `number` as the job counts, which errors name.
    `protected`: whether the job heals itself.
    """

    def __init__(
        self,
        groups: Groups,
        device: torch.device,
        log: CollectiveLog,
        job: Groups | None = None,
        protected: bool = False,
    ) -> None:
        self.rank, self.number = groups.rank, groups.number
        self.device = device
        self.groups, self.job = groups, job or groups
        self.log = log
        self._backend = groups.backend(device)
        self.watchdog = Watchdog.of(groups)
        timer = DeviceTimer(device) if device.type == "cuda" else Timer()
        self.record = Record(self.watchdog, timer, self.job.world // groups.world)
        self._everyone = Watchdog.of(self.job)
        self._everyone.oversee(self.watchdog)
        self._everyone.watch_processes(protected)
        self.program = Program(log, groups)
        # The streams belong to the process group and not to the model: its transfers and those of another model over
        # the same group then have one order on all ranks.
        self.queues = Queues(Streams.of(groups, device), device, self.record, log)
        self.exchange_timeout = self.job.timeout  # for exchanges between islands
        self.form = form_for(self._backend)
        self._lanes = CommunicatorSharing()

    def share(self, strategy: Strategy, plans: Iterable[UnitPlan]) -> None:
        """Share process groups as the transfers of `plans` need it. Call it before anything is bound."""
        plans = tuple(plans)
        self._lanes = CommunicatorSharing.of(plans)
        self.log.share(shared_lanes(strategy, plans))

    def meet(self, transfers: Iterable[Transfer]) -> None:
        """Make the process groups of transfers that are bound later, perhaps by threads, or while a rank is gone."""
        for transfer in transfers:
            self._members(transfer)

    def bind(self, transfers: Iterable[Transfer]) -> list[RankTransfer]:
        """Return for each transfer the collective that executes it on this rank."""
        # Making a process group is itself a collective. So all ranks bind all transfers, in one order.
        bound: list[RankTransfer] = []
        for transfer in transfers:
            members = self._members(transfer)
            if transfer.move.op in WITH_OWNERS:
                collective: Collective = OwnersExchange(transfer, members, self.device)
            else:
                device = torch.device("cpu") if transfer.between_hosts else self.device
                collective = select(transfer, members, device)
            # Errors of transfers between islands name ranks of the whole job.
            peers = self._everyone if transfer.kind in OUTER_KINDS else self.watchdog
            bound.append(RankTransfer([transfer], members, collective, self.record, peers.describe_ranks))
        return bound

    def coalesce(self, alike: Sequence[RankTransfer]) -> RankTransfer:
        """Return one transfer that runs all gathers, or all reductions, of the same members as one."""
        transfers, members = [bound.transfer for bound in alike], alike[0].members
        if transfers[0].kind is TransferKind.REDUCE:
            collective: Collective = CoalescedReduceScatter(members)
        else:
            collective = CoalescedAllGather(transfers, members, self.device)
        return RankTransfer(transfers, members, collective, self.record, self.watchdog.describe_ranks)

    def tell(self, failure: str) -> None:
        """Post the error of an exchange between islands. Ranks of all islands that wait for this rank quote it."""
        # The first failure is the cause of others.
        if self.watchdog.status.failure:
            return
        for monitor in {self.watchdog, self._everyone}:
            monitor.tell(failure)

    def _members(self, transfer: Transfer) -> GroupRank:
        queue, topology = QUEUES[transfer.kind], transfer.topology
        # Transfers between islands number ranks as the job does.
        if transfer.kind in OUTER_KINDS:
            over_gloo = transfer.between_hosts
            return group_rank(
                transfer, self.job.rank, lambda ranks, part: self._of_job(ranks, f"{queue}{part}", over_gloo)
            )

        def group_of(ranks: RankSets, part: str) -> dist.ProcessGroup:
            if transfer.kind in BETWEEN_HOSTS:
                return self.groups.gloo_group()
            if not shares_groups(self._backend):
                return self.groups.of(ranks, f"{queue}{part}", self._backend)
            return self._of_lane(ranks, queue, topology, borrows=transfer.move.op in WITH_OWNERS)

        return group_rank(transfer, self.rank, group_of, self.groups.first)

    def control(self, ranks: RankSets, topology: Topology) -> dist.ProcessGroup:
        """Return this rank's process group for collectives on the training thread, such as those of full parameters."""
        # NCCL's communicators take memory on the device, so collectives on the training thread borrow one.
        if shares_groups(self._backend):
            return self._of_lane(ranks, "control", topology, borrows=True)
        # Gloo ends a process without a word if a norm meets a boundary of another size, as after a step that one rank
        # has left out. In a group of their own, both wait, and the watchdog says why.
        return self.groups.of(ranks, "norms", self._backend)

    def _of_lane(self, ranks: RankSets, queue: str, topology: Topology, borrows: bool) -> dist.ProcessGroup:
        """Return this rank's process group of the lane of `queue`."""
        # With `borrows`, the parent serves where the lane has no group of all ranks. It is used in optimizer steps, and
        # between steps, when no transfer overlaps.
        mine = next(each for each in ranks if self.rank in each)
        lane, parent = self._lanes.lane(queue, mine, topology), self.groups.parent
        if borrows and len(ranks) == 1 and parent is not None and not self.groups.has(ranks, lane):
            return parent
        crosses = len(set(map(topology.node_of, mine))) > 1
        # All ranks ask for the first group, so that they find the same limit.
        is_limited = crosses or (ranks[0], lane) in self._lanes.with_all_to_alls
        limit = MAX_CTAS if is_limited and "NCCL_MAX_CTAS" not in os.environ else None
        return self.groups.of(ranks, lane, self._backend, limit)

    def _of_job(self, ranks: RankSets, purpose: str, over_gloo: bool) -> dist.ProcessGroup:
        # A model whose exchanges may take longer gets groups of its own.
        timeout = self.exchange_timeout
        purpose = f"{purpose}{' over gloo' if over_gloo else ''} within {timeout}"
        # Exchanges between islands always cross nodes.
        limits = not over_gloo and self._backend == "nccl" and "NCCL_MAX_CTAS" not in os.environ
        backend = "gloo" if over_gloo else self._backend
        return self.job.of(ranks, purpose, backend, ISLAND_CTAS if limits else None, timeout)
