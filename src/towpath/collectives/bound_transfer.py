"""A transfer of the schedule bound to the collective that executes it on this rank: what the engine runs.

That all ranks bind the same transfers is agreed on by `shard()`; that they run them in the same order is compared at
every boundary (`core/journal.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, final

import torch

from towpath.collectives.coalesced import CoalescedAllGather
from towpath.collectives.collective import Binding, Collective, Members
from towpath.collectives.owners import OwnersExchange
from towpath.collectives.workspace import Workspace
from towpath.core.transfer import Transfer
from towpath.errors import StepError


class Observer(Protocol):
    """Sees transfers run."""

    def running(self, transfers: Sequence[Transfer], micro_step: int) -> AbstractContextManager[object]:
        """Around them, while they travel together."""
        ...

    def describe_ranks(self, others: Sequence[int]) -> str:
        """What this rank is doing, and what `others` last said of themselves."""
        ...


@final
@dataclass(frozen=True, slots=True)
class BoundTransfer:
    """Runs `collective` on tensors that fit the transfer, refuses others, and says of a failure whose it may be."""

    transfer: Transfer
    binding: Binding
    members: Members
    collective: Collective
    observer: Observer

    def begin(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Before it is its turn, what waits for nobody."""
        self.binding.check_fit(region, shard, self.members)
        with self.explained():
            self.collective.begin(region, shard, workspace)

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        self.binding.check_fit(region, shard, self.members)
        with self.observer.running([self.transfer], workspace.micro_step), self.explained():
            self.collective.run(region, shard, workspace)

    def explained(self) -> AbstractContextManager[None]:
        return _explained(self.transfer, self.members, self.observer)


@contextmanager
def _explained(transfer: Transfer, members: Members, observer: Observer) -> Generator[None]:
    """A failure inside names the transfer, and the ranks that may have caused it."""
    try:
        yield
    except RuntimeError as error:
        others = [r for r in members.group.ranks if r != members.rank]
        raise StepError(
            f"rank {members.rank}: {transfer} failed: {error}\nIf this speaks of a connection or of time, "
            f"one of its peers (rank {', '.join(map(str, others))}) has died, hangs, is at another step or has lost "
            f"its link. {observer.describe_ranks(others)}"
        ) from error


@final
@dataclass(frozen=True, slots=True)
class BoundMatrices:
    """Of matrices, between the ranks that hold their pieces and those that own them."""

    transfer: Transfer
    members: Members
    exchange: OwnersExchange
    observer: Observer

    def run(self, pieces: Sequence[torch.Tensor], wholes: Mapping[int, torch.Tensor], workspace: Workspace) -> None:
        with (
            self.observer.running([self.transfer], workspace.micro_step),
            _explained(self.transfer, self.members, self.observer),
        ):
            self.exchange.run(pieces, wholes, workspace)


@final
@dataclass(frozen=True, slots=True)
class CoalescedTransfers:
    """Several gathers that travel as one."""

    transfers: Sequence[BoundTransfer]
    collective: CoalescedAllGather

    def run(self, regions: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], workspace: Workspace) -> None:
        first, each = self.transfers[0], [bound.transfer for bound in self.transfers]
        with first.observer.running(each, workspace.micro_step), first.explained():
            self.collective.run(regions, shards, workspace)
