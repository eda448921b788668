"""A transfer of the schedule bound to the collective that executes it on this rank: what the engine runs.

That all ranks bind the same transfers is agreed on by `shard()`; that they run them in the same order is compared at
every boundary (`core/journal.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, final

import torch
import torch.distributed as dist

from towpath.collectives.all_to_all import AllToAllReduceScatter
from towpath.collectives.collective import Binding, Collective, GroupRank, Workspace
from towpath.collectives.native import (
    EncodedAllGather,
    FlatAllGather,
    FlatAllReduce,
    FlatMaximum,
    FlatReduceScatter,
    ReduceThenGather,
    all_gather_single,
    encoded_binding,
)
from towpath.collectives.owners import OwnersExchange
from towpath.collectives.point_to_point import PointToPoint
from towpath.core.routes import Op, hops_of, travelled
from towpath.core.strategy import Kind
from towpath.core.transfer import Transfer
from towpath.errors import StepError

# --- select -----------------------------------------------------------------------------------------------------------
#
# Which class executes a transfer on a backend.


_FLAT = {Op.ALL_GATHER: FlatAllGather, Op.REDUCE_SCATTER: FlatReduceScatter, Op.ALL_REDUCE: FlatAllReduce}


def select(transfer: Transfer, members: GroupRank, backend: str, device: torch.device) -> Collective:
    if transfer.kind is Kind.USAGE:
        return FlatMaximum(members)
    return bind(Binding.of(transfer), members, backend, device)


def bind(binding: Binding, members: GroupRank, backend: str, device: torch.device) -> Collective:
    op, route = binding.op, travelled(binding.route, members.grid)
    if op is Op.ALL_GATHER and binding.codec is not None:
        inner = bind(encoded_binding(binding.codec, binding, members), members, backend, device)
        return EncodedAllGather(binding.codec, binding, members, inner, device)
    if route == "flat" and not _better_walked(binding, members, backend):
        return _FLAT[op](members)
    if not hops_of(route, members.grid) or op is Op.ALL_GATHER:
        return PointToPoint(route, binding, members)
    reduce = AllToAllReduceScatter(route, binding, members, device)
    if op is Op.REDUCE_SCATTER:
        return reduce
    return ReduceThenGather(
        binding, members, reduce, bind(replace(binding, op=Op.ALL_GATHER), members, backend, device)
    )


def has_group_between_nodes(route: str, backend: str) -> bool:
    """Whether what goes between nodes has a process group of its own, so that it overlaps what goes inside. NCCL runs a
    group's messages one after the other; gloo does not. Of routes of one kind of link there is nothing to overlap."""
    return backend == "nccl" and route not in ("flat", "ring")


def _better_walked(binding: Binding, members: GroupRank, backend: str) -> bool:
    """The backends' own need equal slices. And gloo's reduce-scatter is an all-reduce inside and sends twice the bytes;
    its gather allocates a copy of the whole region each time, which leaves ever more holes in the heap."""
    if binding.op is Op.ALL_REDUCE:
        return False
    return backend == "gloo" or binding.elements % len(members.group.ranks) != 0


# --- coalesced --------------------------------------------------------------------------------------------------------
#
# Several gathers of one group at the price of one (MiCS, section 4): the small ones are all waiting, no bytes.


@final
class CoalescedAllGather:
    """Gathers for all of `bindings` at once, over one route; each member has an equal slice of every region.

    NCCL launches its own gathers as one. Elsewhere, and on other routes, the slices of a member travel as one message:
    they are packed, gathered, and unpacked to where they belong, through a wire buffer as large as all the regions.
    """

    def __init__(self, bindings: Sequence[Binding], members: GroupRank, backend: str, device: torch.device) -> None:
        count, route = len(members.group.ranks), bindings[0].route
        for each in bindings:
            if each.op is not Op.ALL_GATHER or each.route != route or each.elements % count:
                raise StepError(
                    f"rank {members.rank}: {each.label}: got {each.op.value} by {each.route} of {each.elements} "
                    f"elements, expected an all-gather by {route} of equal slices for {count} ranks, as the others "
                    "that it is coalesced with. Run it by itself."
                )
        self._bindings, self._members = bindings, members
        self._bytes = sum(b.elements * b.dtype.itemsize for b in bindings)
        packed = Binding(Op.ALL_GATHER, route, self._bytes, torch.uint8, f"{len(bindings)} gathers in one")
        as_one_launch = backend == "nccl" and travelled(route, members.grid) == "flat" and members.group.in_order
        self._gather = None if as_one_launch else bind(packed, members, backend, device)

    def run(self, regions: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], workspace: Workspace) -> None:
        for binding, region, shard in zip(self._bindings, regions, shards, strict=True):
            binding.check_fit(region, shard, self._members)
        if self._gather is None:
            group = self._members.process_group
            with dist.distributed_c10d._coalescing_manager(group):  # pyright: ignore[reportPrivateUsage]
                for region, shard in zip(regions, shards, strict=True):
                    all_gather_single(region, shard, group)
            return
        packed = workspace.take(self._bytes, torch.uint8).view(len(self._members.group.ranks), -1)
        mine = packed[self._members.slot]
        torch.cat([shard.view(torch.uint8) for shard in shards], out=mine)
        self._gather.run(packed.view(-1), mine, workspace)
        each = [region.view(torch.uint8).view(len(packed), -1) for region in regions]  # [slots, bytes of a slice]
        for whole, arrived in zip(each, packed.split([e.shape[1] for e in each], dim=1), strict=True):
            whole.copy_(arrived)


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
class RankTransfer:
    """Runs `collective` on tensors that fit the transfer, refuses others, and says of a failure whose it may be."""

    transfer: Transfer
    binding: Binding
    members: GroupRank
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
def _explained(transfer: Transfer, members: GroupRank, observer: Observer) -> Generator[None]:
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
    members: GroupRank
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

    transfers: Sequence[RankTransfer]
    collective: CoalescedAllGather

    def run(self, regions: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], workspace: Workspace) -> None:
        first, each = self.transfers[0], [bound.transfer for bound in self.transfers]
        with first.observer.running(each, workspace.micro_step), first.explained():
            self.collective.run(regions, shards, workspace)
