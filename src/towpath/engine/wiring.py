"""From the transfers of a plan to the collectives and process groups that execute them on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from towpath.collectives.bound_transfer import BoundMatrices, BoundTransfer, CoalescedTransfers
from towpath.collectives.coalesced import CoalescedAllGather
from towpath.collectives.collective import Binding, Members
from towpath.collectives.owners import OwnersExchange
from towpath.collectives.select import has_group_between_nodes, select
from towpath.core.journal import Journal
from towpath.core.queues import QUEUES
from towpath.core.strategy import Kind
from towpath.core.transfer import Transfer
from towpath.engine.activity import Peers
from towpath.engine.program import Program
from towpath.engine.queue import Queues, Streams
from towpath.engine.record import Record
from towpath.engine.timing import timer_for
from towpath.topology.groups import Groups


class Wiring:
    """Of one model. Every rank must bind the same transfers in the same order (that makes process groups)."""

    def __init__(self, groups: Groups, device: torch.device, journal: Journal) -> None:
        self.rank = groups.rank
        self.device = device
        self.groups = groups
        self.journal = journal
        self.record = Record(Peers.of(groups), timer_for(device))
        if device.type == "cuda":
            self.record.peers.watch_processes()
        self.program = Program(journal, self.record.peers)
        self.queues = Queues(Streams.of(groups, device), device, self.record, journal)
        self._backend = groups.backend(device)

    def bind(self, transfers: Iterable[Transfer]) -> list[BoundTransfer]:
        return [self._bind(t) for t in transfers]

    def _bind(self, transfer: Transfer) -> BoundTransfer:
        members = self._members(transfer)
        collective = select(transfer, members, self._backend, self.device)
        return BoundTransfer(transfer, Binding.of(transfer), members, collective, self.record)

    def bind_matrices(self, transfer: Transfer) -> BoundMatrices:
        members = self._members(transfer)
        return BoundMatrices(transfer, members, OwnersExchange(transfer, members, self.device), self.record)

    def _members(self, transfer: Transfer) -> Members:
        queue = QUEUES[transfer.kind]
        group = transfer.move.group_of(self.rank)
        partition = tuple(g.ranks for g in transfer.move.groups)
        nodes = tuple(map(transfer.topology.node_of, group.ranks))
        if transfer.kind is Kind.USAGE:
            within = between = self.groups.control_on_host()
        else:
            within = between = self.groups.of(partition, queue)
        if has_group_between_nodes(transfer.route, self._backend):
            between = self.groups.of(partition, f"{queue} between nodes")
        return Members(within, between, group, group.ranks.index(self.rank), nodes)

    def coalesce(self, gathers: Sequence[BoundTransfer]) -> CoalescedTransfers:
        """Gathers that have the same members, in one message."""
        bindings = [Binding.of(bound.transfer) for bound in gathers]
        collective = CoalescedAllGather(bindings, gathers[0].members, self._backend, self.device)
        return CoalescedTransfers(gathers, collective)
