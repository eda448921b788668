"""The transfers of the schedule as the engine runs them: each one with the collective that executes it on this rank.

`shard()` makes all ranks agree on the transfers that they bind. Every boundary compares the order in which the ranks
run them (`engine/agree/digest.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, final

import torch
import torch.distributed as dist

from towpath.codecs.exact.message import MessageError
from towpath.collectives.all_to_all import AllToAllReduceScatter
from towpath.collectives.collective import Collective, GroupRank, Workspace
from towpath.collectives.columns_and_rows import ColumnRowAllGather, grouped, is_direct
from towpath.collectives.exact import AgreedAllGather, ExactAllGather
from towpath.collectives.flat import (
    EncodedAllGather,
    FlatAllGather,
    FlatAllReduce,
    ReduceThenGather,
    launched_together,
    of_bytes,
    reduce_scatter_single,
)
from towpath.collectives.owners import OwnersExchange
from towpath.collectives.point_to_point import PointToPoint
from towpath.core.routes import Form, Op, hops_of
from towpath.core.strategy import BY_MAXIMUM, TransferKind
from towpath.core.transfer import Range, Ranks, Transfer
from towpath.errors import ConfigError, StepError


def form_for(backend: str) -> Form:
    """Return the form of transfers on a backend, such as 'nccl' or 'gloo'."""
    return Form.COLLECTIVES if backend == "nccl" else Form.MESSAGES


def select(transfer: Transfer, members: GroupRank, device: torch.device, start: int = 0) -> Collective:
    """Return the collective that executes `transfer` on this rank.

    Args:
        start: The elements of the wire buffer that the caller uses itself.
    """
    if transfer.kind in BY_MAXIMUM:
        return FlatAllReduce(members, dist.ReduceOp.MAX)
    op, route, codec = transfer.move.op, transfer.route, transfer.transport.encoding
    if transfer.kind is TransferKind.PARAM_SYNC and transfer.exact:
        return (
            AgreedAllGather(transfer, members, device)
            if transfer.agrees_on_sizes
            else ExactAllGather(transfer, members)
        )
    if op is Op.ALL_GATHER and codec is not None:
        encoded = of_bytes(transfer, codec)
        return EncodedAllGather(transfer, members, select(encoded, members, device, encoded.elements), device)
    if op is Op.ALL_REDUCE and route == "flat":
        return FlatAllReduce(members)
    # Collectives of the backend need slices of equal length. In the form of messages, point-to-point messages replace
    # some of them. The reduce-scatter of gloo is an all-reduce inside, and sends twice the bytes. The all-gather of
    # gloo allocates a copy of the region in each call, which fragments the heap.
    in_calls = transfer.form is Form.COLLECTIVES and transfer.elements % transfer.move.members == 0
    if op is not Op.ALL_GATHER and hops_of(route, members.grid):
        reduce = AllToAllReduceScatter(transfer, members, device, transfer.form is Form.COLLECTIVES)
    elif codec is not None:  # a route that was added without its hops would send unencoded values
        raise ConfigError(f"{transfer}: {codec} needs hops, and hops_of() has none for {route!r}.")
    elif not in_calls:
        return PointToPoint(transfer, members)
    elif op is Op.ALL_GATHER:
        return grouped(op, route, members, transfer.elements, device, start)
    else:
        reduce = grouped(Op.REDUCE_SCATTER, route, members, transfer.elements, device)
    if op is Op.REDUCE_SCATTER:
        return reduce
    gather = replace(transfer, move=replace(transfer.move, op=Op.ALL_GATHER))
    own = slice(*transfer.bounds(members.slot))
    return ReduceThenGather(own, reduce, select(gather, members, device))


def group_rank(
    transfer: Transfer, rank: int, group_of: Callable[[Ranks, str], dist.ProcessGroup], first: int = 0
) -> GroupRank:
    """Return the group of `transfer` that `rank` belongs to, with the process groups that execute the transfer.

    Args:
        group_of: A function that returns this rank's process group of some sets of ranks, which have every rank once.
            Its second argument says which part of the transfer's groups they are: '', ' in nodes' or ' between nodes'.
    """
    group = transfer.move.group_of(rank)
    nodes = tuple(map(transfer.topology.node_of, group.ranks))
    position = group.ranks.index(rank)
    everyone = tuple(g.ranks for g in transfer.move.groups)
    if transfer.by_rows_and_columns:
        row, column = group_of(transfer.rows, " in nodes"), group_of(transfer.columns, " between nodes")
        # Slices of different lengths are sent as messages.
        whole = group_of(everyone, "") if transfer.elements % transfer.move.members else row
        return GroupRank(whole, group, position, nodes, row, column, first)
    whole = group_of(everyone, "")
    each = whole if transfer.form is Form.COLLECTIVES else None
    return GroupRank(whole, group, position, nodes, each, each, first)


# Several all-gathers or reduce-scatters of one group run as one (MiCS, section 4). The time of small ones is mostly
# latency, which is then paid once.


@final
class CoalescedAllGather:
    """One all-gather for several regions, over one route. Each member has an equal slice of every region.

    Collectives of the backend launch all gathers together. Otherwise a member's slices are sent as one message. They
    are packed into a wire buffer as large as all regions, gathered there, and copied to their regions.
    """

    def __init__(self, gathers: Sequence[Transfer], members: GroupRank, device: torch.device) -> None:
        first, count = gathers[0], len(members.group.ranks)
        for each in gathers:
            op = each.move.op
            if op is not Op.ALL_GATHER or each.route != first.route or each.elements % count:
                raise StepError(
                    f"rank {members.number}: {each}: got {op.value} by {each.route} of {each.elements} elements, "
                    f"expected an all-gather by {first.route} of equal slices for {count} ranks, as the others that it "
                    "is coalesced with. Run it by itself."
                )
        self._members = members
        self._bytes = sum(each.region_bytes for each in gathers)
        packed = replace(first, payload=Range("", "", self._bytes, "uint8"))
        self._direct = first.form is Form.COLLECTIVES and is_direct(first.route, members)
        self._gather = select(packed, members, device, 0 if self._direct else self._bytes)

    def run(self, regions: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], workspace: Workspace) -> None:
        """Gather `shards[i]` of every member into `regions[i]`, for all regions together."""
        octets = [region.view(torch.uint8) for region in regions]
        mine = [shard.view(torch.uint8) for shard in shards]
        if self._direct:
            assert isinstance(self._gather, (FlatAllGather, ColumnRowAllGather))
            self._gather.run_all(octets, mine, workspace)
            return
        packed = workspace.take(self._bytes, torch.uint8).view(len(self._members.group.ranks), -1)
        torch.cat(mine, out=packed[self._members.slot])
        self._gather.run(packed.view(-1), packed[self._members.slot], workspace)
        each = [region.view(len(packed), -1) for region in octets]  # [slots, bytes of a slice]
        for whole, arrived in zip(each, packed.split([e.shape[1] for e in each], dim=1), strict=True):
            whole.copy_(arrived)


@final
@dataclass(frozen=True, slots=True)
class CoalescedReduceScatter:
    """Reduce-scatters of the backend over one group, launched together. Members have equal slices of every region."""

    members: GroupRank

    def run(self, regions: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], workspace: Workspace) -> None:
        """Sum `regions[i]` over all members, and write this member's slice to `shards[i]`, for all regions together."""
        group = self.members.process_group
        with launched_together(group, len(regions)):
            for region, shard in zip(regions, shards, strict=True):
                reduce_scatter_single(shard, region, group)


# Returns a text that says what this rank does, and what some other ranks reported last.
DescribeRanks = Callable[[Sequence[int]], str]


class Observer(Protocol):
    """An object that records the transfers that run. The engine passes its `Record`."""

    def running(self, transfers: Sequence[Transfer], micro_step: int) -> AbstractContextManager[object]:
        """Return a context manager that is entered while `transfers` run together."""
        ...

    def encoded(self, transfer: Transfer, values: int, messages: int) -> None:
        """Note that an exact transfer encoded `values` bytes of values in `messages` bytes of messages."""
        ...


@final
class RankTransfer:
    """A transfer with the collective that executes it on this rank.

    It checks that tensors fit before they are sent. If the collective fails, it raises an error that names the transfer
    and the ranks that may have caused it.
    """

    def __init__(
        self,
        transfer: Transfer,
        members: GroupRank,
        collective: Collective,
        observer: Observer,
        describe_ranks: DescribeRanks,
    ) -> None:
        self.transfer, self.members, self.collective, self.observer = transfer, members, collective, observer
        self._describe_ranks = describe_ranks
        # The length and dtype of the region, and of the shard unless the operation has none.
        self._expected: list[tuple[int, torch.dtype]] = [(transfer.elements, getattr(torch, transfer.dtype))]
        if transfer.move.op is not Op.ALL_REDUCE:
            start, end = transfer.bounds(members.slot)
            codec = transfer.transport.encoding
            if codec is not None and isinstance(transfer.payload, Range) and transfer.payload.encoded:
                self._expected.append((codec.encoded_bytes(end - start), torch.uint8))
            else:
                self._expected.append((end - start, self._expected[0][1]))

    def begin(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Start the non-blocking first phase, before this transfer's turn in the queue."""
        self.check_fit(region, shard)
        with self.explained():
            self.collective.begin(region, shard, workspace)

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        self.check_fit(region, shard)
        values, messages = workspace.exact_bytes
        with self.observer.running([self.transfer], workspace.micro_step), self.explained():
            self.collective.run(region, shard, workspace)
            if workspace.exact_bytes != (values, messages):
                after = workspace.exact_bytes
                self.observer.encoded(self.transfer, after[0] - values, after[1] - messages)

    def check_fit(self, region: torch.Tensor, shard: torch.Tensor) -> None:
        """Check the tensors before any message is sent, so that they cannot be mixed with messages of other sizes."""
        tensors = ("region", region), ("shard", shard)
        for (name, tensor), (elements, dtype) in zip(tensors, self._expected, strict=False):
            if tensor.numel() != elements or tensor.dtype != dtype or not tensor.is_contiguous():
                raise StepError(
                    f"rank {self.members.number}: {self.transfer} by {self.transfer.route}: got a {name} of "
                    f"{tensor.numel()} elements of {tensor.dtype}, expected {elements} of {dtype}, contiguous. A "
                    "collective carries what it was made for; make another for other tensors."
                )

    def explained(self) -> AbstractContextManager[None]:
        """Return a context that turns a backend's error into a StepError with the transfer and possible causes."""
        return _explained(self.transfer, self.members, self._describe_ranks)


@contextmanager
def _explained(transfer: Transfer, members: GroupRank, describe_ranks: DescribeRanks) -> Generator[None]:
    """Turn an error inside the block into a StepError that names the transfer and the possible causes."""
    try:
        yield
    except MessageError as error:
        raise StepError(f"rank {members.number}: {transfer} failed: {error}") from error
    except RuntimeError as error:
        others = [r for r in members.group.ranks if r != members.rank]
        numbers = ", ".join(str(members.first + other) for other in others)
        raise StepError(
            f"rank {members.number}: {transfer} failed: {error}\nIf this speaks of a connection or of time, "
            f"one of its peers (rank {numbers}) has died, hangs, is at another step or has lost its link. See what it "
            f"printed, and restart the job from the last checkpoint. {describe_ranks(others)}"
        ) from error


@final
@dataclass(frozen=True, slots=True)
class RankMatrices:
    """A transfer of matrices with the exchange that executes it on this rank."""

    transfer: Transfer
    members: GroupRank
    exchange: OwnersExchange
    observer: Observer
    describe_ranks: DescribeRanks

    def run(self, pieces: Sequence[torch.Tensor], wholes: Mapping[int, torch.Tensor], workspace: Workspace) -> None:
        """Execute the transfer, and record it. `OwnersExchange.run` explains the arguments."""
        with (
            self.observer.running([self.transfer], workspace.micro_step),
            _explained(self.transfer, self.members, self.describe_ranks),
        ):
            self.exchange.run(pieces, wholes, workspace)


@final
@dataclass(frozen=True, slots=True)
class CoalescedTransfers:
    """Several gathers, or several reductions, that run as one collective."""

    transfers: Sequence[RankTransfer]
    collective: CoalescedAllGather | CoalescedReduceScatter

    def run(self, regions: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], workspace: Workspace) -> None:
        for bound, region, shard in zip(self.transfers, regions, shards, strict=True):
            bound.check_fit(region, shard)
        first, each = self.transfers[0], [bound.transfer for bound in self.transfers]
        with first.observer.running(each, workspace.micro_step), first.explained():
            self.collective.run(regions, shards, workspace)
