"""Collectives that run on the backend's own ones, through `torch.distributed`.

They serve the route 'flat'. All-gathers of encoded slices wrap a collective of any route.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.distributed as dist

from towpath.codecs.kernels import kernels_for
from towpath.codecs.kernels.pieces import PiecePlace, PieceTable
from towpath.codecs.packing import RoundingSeeds
from towpath.collectives.collective import Collective, GroupRank, Workspace
from towpath.core.formats import Codec
from towpath.core.payloads import Range
from towpath.core.routes import encoded_slice
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport


def all_gather_single(
    region: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """All-gather `shard` into `region`, under the name that the installed PyTorch has for it.

    PyTorch 2.13 and later warn about the older name.
    """
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(region, shard, group=group, async_op=async_op)


def reduce_scatter_single(shard: torch.Tensor, region: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Reduce-scatter `region` into `shard`, under the name that the installed PyTorch has for it."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    getattr(dist, name)(shard, region, group=group)


def launched_together(group: dist.ProcessGroup, calls: int) -> AbstractContextManager[object]:
    """Return a context in which `calls` calls of one kind become one launch of `group`. gloo makes them one by one."""
    # Private, and what torch.distributed itself offers for this. FSDP2 copies all tensors to one buffer instead.
    if calls == 1 or group.name() == "gloo":
        return nullcontext()
    return dist.distributed_c10d._coalescing_manager(group)  # pyright: ignore[reportPrivateUsage]


@final
@dataclass(frozen=True, slots=True)
class FlatAllGather(Collective):
    """An all-gather by the backend's own collective. Member i holds slice i."""

    members: GroupRank

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        all_gather_single(region, shard, self.members.process_group)

    def run_all(self, regions: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], workspace: Workspace) -> None:
        """Gather `shards[i]` of every member into `regions[i]`, all of them with one launch."""
        group = self.members.process_group
        with launched_together(group, len(regions)):
            for region, shard in zip(regions, shards, strict=True):
                all_gather_single(region, shard, group)


@final
@dataclass(frozen=True, slots=True)
class FlatReduceScatter(Collective):
    """A reduce-scatter by the backend's own collective. Member i holds slice i."""

    members: GroupRank

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Sum the regions of all members, and write this member's slice of the sum to `shard`."""
        reduce_scatter_single(shard, region, self.members.process_group)


@final
@dataclass(frozen=True, slots=True)
class FlatAllReduce(Collective):
    """An all-reduce by the backend's own collective: a sum, or a maximum, which unites bitmaps of used parameters."""

    members: GroupRank
    operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        dist.all_reduce(region, self.operation, group=self.members.process_group)


@final
@dataclass(frozen=True, slots=True)
class ReduceThenGather(Collective):
    """An all-reduce that runs a reduce-scatter and then an all-gather. `own` is this rank's slice of the region."""

    own: slice
    reduce: Collective
    gather: Collective

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return (*self.reduce.state, *self.gather.state)

    @property
    def seeds(self) -> tuple[RoundingSeeds, ...]:
        return (*self.reduce.seeds, *self.gather.seeds)

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        # In place: the slice of the sum is where the all-gather reads it.
        mine = region[self.own]
        self.reduce.run(region, mine, workspace)
        self.gather.run(region, mine, workspace)


# Each member encodes its slice, unless it is stored encoded already. After the gather it decodes all slices. It decodes
# its own slice too, so that every member has the same values.


@final
class EncodedAllGather(Collective):
    """An all-gather of encoded slices. `inner` gathers their bytes: it executes `of_bytes(transfer)`."""

    def __init__(self, transfer: Transfer, members: GroupRank, inner: Collective, device: torch.device) -> None:
        assert isinstance(transfer.payload, Range) and transfer.transport.encoding is not None
        codec, count = transfer.transport.encoding, len(members.group.ranks)
        self._inner, self._rests, self._kernels = inner, transfer.payload.encoded, kernels_for(device)
        cell = encoded_slice(codec, transfer.elements, count)
        self._bytes, self._mine = cell * count, slice(members.slot * cell, (members.slot + 1) * cell)
        bounds = [transfer.bounds(slot) for slot in range(count)]
        start, end = bounds[members.slot]
        self._own = PieceTable(codec, [PiecePlace(end - start, target=self._mine.start)], device)
        slices = [PiecePlace(end - start, start, source=slot * cell) for slot, (start, end) in enumerate(bounds)]
        self._slices = PieceTable(codec, slices, device)
        self._seeds = RoundingSeeds(members.slot)
        # Sums that an all-reduce gathers may have error feedback.
        keeps = transfer.transport.feedback == "all"
        self._kept = torch.zeros(end - start, device=device) if keeps else None
        self._begun: torch.Tensor | None = None  # the messages between `begin` and `run`, with this member's encoded

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """The error feedback of this member's slice, if it keeps any."""
        return () if self._kept is None else (self._kept,)

    @property
    def seeds(self) -> tuple[RoundingSeeds, ...]:
        """The seeds of stochastic rounding, unless slices are stored encoded."""
        return () if self._rests else (self._seeds,)

    def begin(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Encode this member's slice, and begin to gather."""
        # The wire buffer belongs to this job until its end, so the encoded slice may wait there for `run`.
        messages = self._begun = self._encoded(shard, workspace)
        self._inner.begin(messages, messages[self._mine], workspace)

    def _encoded(self, shard: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        messages = workspace.take(self._bytes, torch.uint8)
        # Slices that rest encoded are sent as they are. They were rounded when they were written.
        if self._rests:
            messages[self._mine][: shard.numel()].copy_(shard)
        else:
            kernels = self._kernels.watched(workspace.watch)
            kept = self._kept
            scratch = None if kept is None else workspace.take(2 * kept.numel(), torch.float32)
            kernels.encode_pieces(self._own, shard, messages, self._seeds.draw(self._own), kept, scratch)
        return messages

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Gather all slices, and decode them into the region."""
        messages, self._begun = self._encoded(shard, workspace) if self._begun is None else self._begun, None
        self._inner.run(messages, messages[self._mine], workspace)
        # Decoded from the messages on every member, its own slice too: all ranks compute with the same rounded weights.
        self._kernels.watched(workspace.watch).decode_pieces(self._slices, messages, region)


def of_bytes(transfer: Transfer, codec: Codec) -> Transfer:
    """Return the all-gather that sends the encoded slices of `transfer` as plain bytes."""
    count = transfer.move.members
    nbytes = count * encoded_slice(codec, transfer.elements, count)
    payload = Range(transfer.unit, transfer.bucket, nbytes, "uint8")
    return replace(transfer, payload=payload, transport=Transport(transfer.transport.route))
