"""Transfers of the schedule bound to the collectives that execute them on this rank."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from towpath.collectives.coalesced import CoalescedAllGather
from towpath.collectives.collective import Collective, Members
from towpath.collectives.workspace import Workspace
from towpath.core.transfer import Transfer
from towpath.engine.profiled import profiled
from towpath.engine.record import Record
from towpath.errors import StepError


@dataclass(frozen=True, slots=True)
class BoundTransfer:
    transfer: Transfer
    members: Members
    collective: Collective
    record: Record

    def begin(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Before it is its turn, what waits for nobody."""
        with self._explained():
            self.collective.begin(region, shard, workspace)

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        began = self.record.begin([self.transfer])
        with self._explained(), profiled("", [self.transfer]):
            self.collective.run(region, shard, workspace)
        self.record.finished([self.transfer], began, workspace.micro_step)

    @contextmanager
    def _explained(self) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            failure = self.failure(error)
            self.record.peers.activity.ends()
            raise StepError(failure) from error

    def failure(self, error: RuntimeError) -> str:
        ranks = self.members.group.ranks
        mine = ranks[self.members.position]
        others = [r for r in ranks if r != mine]
        return (
            f"rank {mine}: {self.transfer} failed: {error}\nIf this speaks of a connection or of time, one of its "
            f"peers (rank {', '.join(map(str, others))}) has died, hangs, is at another step or has lost its link. "
            f"This rank: {self.record.peers.activity.describe()}. What its peers last said of themselves:"
            f"{self.record.peers.describe(others)}"
        )


@dataclass(frozen=True, slots=True)
class CoalescedTransfers:
    """Several gathers that travel as one."""

    transfers: Sequence[BoundTransfer]
    collective: CoalescedAllGather

    def run(self, regions: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], workspace: Workspace) -> None:
        first, each = self.transfers[0], [bound.transfer for bound in self.transfers]
        began = first.record.begin(each)
        try:
            with profiled("", each):
                self.collective.run(regions, shards, workspace)
        except RuntimeError as error:
            raise StepError(first.failure(error)) from error
        first.record.finished(each, began, workspace.micro_step)
