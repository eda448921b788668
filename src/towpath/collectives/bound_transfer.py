"""The transfers of the schedule as the engine runs them: each one with the collective that executes it on this rank.

`shard()` makes all ranks agree on the transfers that they bind. Every boundary compares the order in which the ranks
run them (`core/journal.py`).
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
# These functions choose the class that executes a transfer, by its operation, its route, its codec and the backend.


_FLAT = {Op.ALL_GATHER: FlatAllGather, Op.REDUCE_SCATTER: FlatReduceScatter, Op.ALL_REDUCE: FlatAllReduce}


def select(transfer: Transfer, members: GroupRank, backend: str, device: torch.device) -> Collective:
    """Return the collective that executes `transfer` on this rank."""
    if transfer.kind is Kind.USAGE:
        return FlatMaximum(members)
    return bind(Binding.of(transfer), members, backend, device)


def bind(binding: Binding, members: GroupRank, backend: str, device: torch.device) -> Collective:
    """Return the collective that executes `binding` on this rank.

    Args:
        binding: The operation, its route and codec, and the length of the region.
        members: The group, and this rank's position in it.
        backend: The backend of the process group, such as 'nccl' or 'gloo'.
        device: The device of the tensors.
    """
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
    """Return whether messages between nodes need a process group of their own to overlap with messages inside nodes.

    NCCL runs the messages of one group one after the other. With gloo they overlap anyway. The routes 'flat' and 'ring'
    have nothing to overlap.
    """
    return backend == "nccl" and route not in ("flat", "ring")


def _better_walked(binding: Binding, members: GroupRank, backend: str) -> bool:
    """Return whether point-to-point messages replace the backend's own collective.

    The backends' collectives need slices of equal length. The reduce-scatter of gloo is an all-reduce inside, and sends
    twice the bytes. The all-gather of gloo allocates a copy of the region in each call, which fragments the heap.
    """
    if binding.op is Op.ALL_REDUCE:
        return False
    return backend == "gloo" or binding.elements % len(members.group.ranks) != 0


# --- coalesced --------------------------------------------------------------------------------------------------------
#
# Several all-gathers of one group run as one (MiCS, section 4). The time of small gathers is mostly latency, which is
# then paid once.


@final
class CoalescedAllGather:
    """One all-gather for several regions, over one route. Each member has an equal slice of every region.

    NCCL launches its own gathers together. On other backends and routes, a member's slices are sent as one message.
    They are packed into a wire buffer as large as all regions, gathered there, and copied to their regions.
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
        """Gather `shards[i]` of every member into `regions[i]`, for all regions together."""
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
    """An object that records the transfers that run. The engine passes its `Record`."""

    def running(self, transfers: Sequence[Transfer], micro_step: int) -> AbstractContextManager[object]:
        """Return a context manager that is entered while `transfers` run together."""
        ...

    def describe_ranks(self, others: Sequence[int]) -> str:
        """Return a text that says what this rank does, and what `others` reported last."""
        ...


@final
@dataclass(frozen=True, slots=True)
class RankTransfer:
    """A transfer with the collective that executes it on this rank.

    It checks that tensors fit before they are sent. If the collective fails, it raises an error that names the transfer
    and the ranks that may have caused it.
    """

    transfer: Transfer
    binding: Binding
    members: GroupRank
    collective: Collective
    observer: Observer

    def begin(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Start the non-blocking first phase, before this transfer's turn in the queue."""
        self.binding.check_fit(region, shard, self.members)
        with self.explained():
            self.collective.begin(region, shard, workspace)

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Execute the transfer, and record it."""
        self.binding.check_fit(region, shard, self.members)
        with self.observer.running([self.transfer], workspace.micro_step), self.explained():
            self.collective.run(region, shard, workspace)

    def explained(self) -> AbstractContextManager[None]:
        """Return a context manager that explains failures of this transfer."""
        return _explained(self.transfer, self.members, self.observer)


@contextmanager
def _explained(transfer: Transfer, members: GroupRank, observer: Observer) -> Generator[None]:
    """Turn a RuntimeError inside the block into a StepError that names the transfer and the possible causes."""
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
    """A transfer of matrices with the exchange that executes it on this rank."""

    transfer: Transfer
    members: GroupRank
    exchange: OwnersExchange
    observer: Observer

    def run(self, pieces: Sequence[torch.Tensor], wholes: Mapping[int, torch.Tensor], workspace: Workspace) -> None:
        """Execute the transfer, and record it. `OwnersExchange.run` explains the arguments."""
        with (
            self.observer.running([self.transfer], workspace.micro_step),
            _explained(self.transfer, self.members, self.observer),
        ):
            self.exchange.run(pieces, wholes, workspace)


@final
@dataclass(frozen=True, slots=True)
class CoalescedTransfers:
    """Several gathers that run as one all-gather."""

    transfers: Sequence[RankTransfer]
    collective: CoalescedAllGather

    def run(self, regions: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], workspace: Workspace) -> None:
        """Execute all gathers together, and record them."""
        first, each = self.transfers[0], [bound.transfer for bound in self.transfers]
        with first.observer.running(each, workspace.micro_step), first.explained():
            self.collective.run(regions, shards, workspace)
