"""Collectives that send the messages of a route one by one, as point-to-point messages.

This works for every route. The first step of an all-gather waits for no other rank. It is therefore posted as soon as
the all-gather before it has posted its last messages between nodes. The links between nodes then stay busy while nodes
share out what has arrived.

Optimizers that need full matrices also send messages: between the ranks that hold pieces of a matrix and its owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import final

import torch
import torch.distributed as dist

from towpath.codecs.exact import decode, encode, message_bytes, raise_failed
from towpath.codecs.kernels import kernels_for
from towpath.collectives.collective import Collective, GroupRank, Workspace, message_tag
from towpath.core.buffers import crossing
from towpath.core.formats import item_bytes, message_cell
from towpath.core.routes import Op, Send, cell_elements, cells_of, piece_bounds, sends
from towpath.core.transfer import Transfer
from towpath.core.units import Matrices, owner_messages, piece_bytes
from towpath.errors import StepError


class LostMessageError(StepError, RuntimeError):
    """A message that failed midway.

    It is a RuntimeError, like failures of the backend, so that callers can add what they know.
    """


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """A message to the member at position `peer` if `leaves` is set, else from that member.

    With a `cell`, the content is sent encoded to the bit, and the cell is the memory of the encoded message.
    """

    leaves: bool
    peer: int
    content: torch.Tensor
    cell: torch.Tensor | None = None

    def encoded(self) -> torch.Tensor:
        """Encode the content, if there is a cell. Return what to send, or the memory to receive in."""
        # That memory may be larger than what arrives.
        if self.cell is None:
            return self.content
        return self.cell[: encode(None, self.content, self.cell)] if self.leaves else self.cell


@dataclass(frozen=True, slots=True)
class Posted:
    """A batch of messages in flight."""

    works: Sequence[dist.Work]
    messages: Sequence[PeerMessage]
    members: GroupRank
    where: str
    workspace: Workspace

    def wait(self) -> None:
        """Wait for all messages, and decode what arrived encoded. Raise LostMessageError if one failed."""
        # Some backends run a batch as one operation, and return a single work for all its messages.
        each = [[m] for m in self.messages] if len(self.works) == len(self.messages) else [self.messages]
        for work, messages in zip(self.works, each, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise _lost(messages, self.members, self.where, error) from error
        for message in self.messages:
            if message.cell is not None:
                self.workspace.count_encoded(message.content.nbytes, message_bytes([message.cell])[0])
                if not message.leaves:
                    raise_failed([decode(message.cell, message.content, difference=False)])


def post(messages: Sequence[PeerMessage], members: GroupRank, where: str, workspace: Workspace, tag: int) -> Posted:
    """Start to send and receive `messages`, and return the batch to wait for."""
    # Both ends must post the messages that they exchange under a tag in the same order.
    group = members.process_group
    # Receives are posted first. gloo notifies a sender that it may start through the connection that also has the data
    # of the other direction. Queued behind that data, the notification would arrive late, and the two directions would
    # take turns.
    messages = [*(m for m in messages if not m.leaves), *(m for m in messages if m.leaves)]
    try:
        works = _launched(messages, group, workspace.tag(tag))
    except RuntimeError as error:
        raise _lost(messages, members, where, error) from error
    return Posted(works, messages, members, where, workspace)


def _launched(messages: Sequence[PeerMessage], group: dist.ProcessGroup, tag: int) -> Sequence[dist.Work]:
    # gloo has no batches. The function for batches takes twice the time of the calls that it makes.
    if group.name() == "gloo":
        return [(group.send if m.leaves else group.recv)([m.encoded()], m.peer, tag) for m in messages]
    # With the other backends, a transfer posts all its messages before the next one posts any, so tags are not needed.
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend if m.leaves else dist.irecv, m.encoded(), group=group, group_peer=m.peer)
            for m in messages
        ]
    )


def _lost(messages: Sequence[PeerMessage], members: GroupRank, where: str, error: RuntimeError) -> LostMessageError:
    def ends(message: PeerMessage) -> str:
        there, here = members.numbers[message.peer], members.number
        return f"rank {here} to rank {there}" if message.leaves else f"rank {there} to rank {here}"

    lost = ", ".join(dict.fromkeys(map(ends, messages)))
    return LostMessageError(f"{where}: the message from {lost} was lost: {error}")


@dataclass(frozen=True, slots=True)
class _RangeMessage:
    """A message of the plan at one of its ends: its range of the region, and its wire cell if it is added.

    If it is encoded, `encoded` is the cell of its encoded message.
    """

    leaves: bool
    peer: int
    start: int
    end: int
    cell: int | None
    encoded: int | None = None


@dataclass(frozen=True, slots=True)
class _Batch:
    """Messages that are posted in the same step, and due in the same step."""

    step: int
    until: int
    messages: tuple[_RangeMessage, ...]


@final
class PointToPoint(Collective):
    """A collective that follows the plan of a route.

    In each step it waits for the messages that are due, adds what they bring to a sum, and posts the step's messages.

    `cells_of`: The bytes of a cell, if the region consists of cells with encoded messages, one for each part of
    a slice. Only the part of a cell that the message fills is sent.
    """

    def __init__(self, transfer: Transfer, members: GroupRank, cells_of: int = 0) -> None:
        self._op, self._members, self._tag = transfer.move.op, members, message_tag(transfer)
        self._filled, self._grain = bool(cells_of), cells_of or transfer.grain
        count = len(members.group.ranks)
        parts = transfer.elements // (count * cells_of) if cells_of else transfer.parts
        self._what = f"{self._op.value} by {transfer.route}"
        self._own = slice(*transfer.bounds(members.slot))
        # Every member derives the same list of messages, and keeps its own ends.
        messages = sends(self._op, transfer.route, members.group, members.nodes, parts)
        plan = [s for s in messages if members.position in (s.source, s.target)]
        self._cell = cell_elements(transfer.elements, count, parts, self._grain)
        self._message_cell = message_cell(self._cell, transfer.dtype) if transfer.coding is not None else 0
        self._batches = self._in_batches(plan, transfer)
        self._first = [b for b in self._batches if b.step == self._batches[0].step]
        node = members.nodes[members.position]
        peers = [{members.nodes[message.peer] for message in batch.messages} for batch in self._batches]
        # After this batch the links between nodes are free for the next transfer. Inside one node, after the last one.
        last = [i for i, nodes in enumerate(peers) if nodes != {node}][-1:]
        self._last_crossing = last[0] if last else len(self._batches) - 1
        self._begun: list[tuple[_Batch, Posted]] | None = None
        self._cells = 1 + max((p.cell for b in self._batches for p in b.messages if p.cell is not None), default=-1)
        encoded = (p.encoded for b in self._batches for p in b.messages if p.encoded is not None)
        self._message_cells = 1 + max(encoded, default=-1)

    def _in_batches(self, plan: list[Send], transfer: Transfer) -> list[_Batch]:
        members, position = self._members, self._members.position
        added = [s for s in plan if s.adds and s.target == position]
        cells = dict(zip(added, cells_of(added), strict=True))
        crosses = crossing(plan, members.nodes, position) if transfer.coding is not None else []
        encoded = dict(zip(crosses, cells_of(crosses), strict=True))

        def message(send: Send) -> _RangeMessage:
            leaves = send.source == position
            start, end = piece_bounds(transfer.elements, len(members.group.ranks), send.piece, self._grain)
            peer = send.target if leaves else send.source
            return _RangeMessage(leaves, peer, start, end, cells.get(send), encoded.get(send))

        batches, batch_of = list[_Batch](), attrgetter("step", "until")
        for (step, until), posted in groupby(sorted(plan, key=batch_of), batch_of):
            # A region with fewer elements than parts has empty parts. Both ends leave them out.
            messages = tuple(p for p in map(message, posted) if p.start < p.end)
            if messages:
                batches.append(_Batch(step, until, messages))
        return batches

    def begin(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Post the first step of an all-gather, which waits for no other rank. Do nothing for reductions."""
        if self._op is Op.ALL_GATHER:
            mine = region[self._own]
            if mine.data_ptr() != shard.data_ptr():
                mine.copy_(shard)
            # A gather adds nothing, and so it needs no wire buffer: all messages are received in the region.
            self._begun = [(batch, self._post(region, region, batch, workspace)) for batch in self._first]

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Execute all steps. `begin` may have posted the first one already."""
        if self._begun is None:
            self.begin(region, shard, workspace)
        # Taken out before anything can fail: the next run must not wait for messages of this one.
        under_way, self._begun = self._begun or [], None
        begun = len(under_way)
        wire = workspace.take(self._cells * self._cell, region.dtype) if self._cells else region
        for number, batch in enumerate(self._batches):
            if number >= begun:
                under_way = self._complete(region, wire, under_way, before=batch.step)
                under_way.append((batch, self._post(region, wire, batch, workspace)))
            # All later messages stay inside nodes. The next transfer may start to use the links between nodes.
            if number == self._last_crossing:
                workspace.links_free()
        self._complete(region, wire, under_way)
        mine = region[self._own]
        if self._op is Op.REDUCE_SCATTER and mine.data_ptr() != shard.data_ptr():
            shard.copy_(mine)

    def _post(self, region: torch.Tensor, wire: torch.Tensor, batch: _Batch, workspace: Workspace) -> Posted:
        each = self._message_cell
        memory = workspace.take(self._message_cells * each, torch.uint8) if each else region
        messages: list[PeerMessage] = []
        for p in batch.messages:
            content = self._content(region, wire, p)
            if self._filled and p.leaves:
                content = content[: message_bytes([content])[0]]
            cell = None if p.encoded is None else memory[p.encoded * each :][:each]
            messages.append(PeerMessage(p.leaves, p.peer, content, cell))
        where = f"{self._what}, step {batch.step}"
        return post(messages, self._members, where, workspace, self._tag)

    def _complete(
        self,
        region: torch.Tensor,
        wire: torch.Tensor,
        under_way: Iterable[tuple[_Batch, Posted]],
        before: int | None = None,
    ) -> list[tuple[_Batch, Posted]]:
        """Wait for the messages that are due by step `before`, or for all of them with None, and add what arrived."""
        # It returns the batches that are still in flight.
        remaining: list[tuple[_Batch, Posted]] = []
        for batch, posted in under_way:
            if before is not None and batch.until > before:
                remaining.append((batch, posted))
                continue
            posted.wait()
            for message in batch.messages:
                if message.cell is not None:
                    region[message.start : message.end].add_(self._content(region, wire, message))
        return remaining

    def _content(self, region: torch.Tensor, wire: torch.Tensor, message: _RangeMessage) -> torch.Tensor:
        if message.cell is None:
            return region[message.start : message.end]
        start = message.cell * self._cell
        return wire[start : start + message.end - message.start]


# Codecs that round stochastically are refused for these transfers, so that the seed is never used.
_NO_SEED = 0


@final
class OwnersExchange(Collective):
    """One transfer of matrices on this rank. All messages are posted together, directly between holder and owner."""

    def __init__(self, transfer: Transfer, members: GroupRank, device: torch.device) -> None:
        assert isinstance(transfer.payload, Matrices)
        self._transfer, self._members, self._op = transfer, members, transfer.move.op
        self._matrices, self._codec = transfer.payload.matrices, transfer.transport.encoding
        self._item, self._dtype = item_bytes(transfer.dtype), getattr(torch, transfer.dtype)
        self._kernels = kernels_for(device) if self._codec is not None else None
        self._mine = [
            message
            for message in owner_messages(self._op, self._matrices, members.group)
            if members.position in (message.source, message.target)
        ]

    def run(self, region: Mapping[int, torch.Tensor], shard: Sequence[torch.Tensor], workspace: Workspace) -> None:
        """Execute the transfer. To the owners, each piece is copied into its place in the region; from them, back."""
        # `region` has the full matrices that this rank owns, by index of the matrix, and `shard` this rank's piece of
        # each matrix. All are 1-D.
        self._check(shard, region)
        codec, kernels = self._codec, None if self._kernels is None else self._kernels.watched(workspace.watch)
        sizes = [piece_bytes(self._matrices[m.matrix].pieces[m.slot], self._item, codec) for m in self._mine]
        # One buffer for all messages, because each `take` returns the same bytes.
        cells = () if codec is None or not sizes else workspace.take(sum(sizes), torch.uint8).split(sizes)
        messages: list[PeerMessage] = []
        arriving: list[tuple[torch.Tensor, torch.Tensor]] = []  # encoded messages, and where their contents belong
        for index, (source, target, number, slot) in enumerate(self._mine):
            leaves = source == self._members.position
            start, end = self._matrices[number].bounds(slot)
            content = shard[number] if leaves is (self._op is Op.TO_OWNERS) else region[number][start:end]
            if codec is not None and kernels is not None:
                values, content = content, cells[index]
                if leaves:
                    kernels.encode(codec, values, content, _NO_SEED)
                else:
                    arriving.append((content, values))
            messages.append(PeerMessage(leaves, target if leaves else source, content))
        # All messages are posted in one batch, so that no order between holders and owners can block.
        posted = post(messages, self._members, self._transfer.kind.value, workspace, 0) if messages else None
        # While the messages travel, the owner copies its own piece of each matrix.
        for number, whole in region.items():
            start, end = self._matrices[number].bounds(self._members.slot)
            source, target = whole[start:end], shard[number]
            if self._op is Op.TO_OWNERS:
                source, target = target, source
            target.copy_(source)
        if posted is not None:
            posted.wait()
        if codec is not None and kernels is not None:
            for message, values in arriving:
                kernels.decode(codec, message, values)

    def _check(self, pieces: Sequence[torch.Tensor], wholes: Mapping[int, torch.Tensor]) -> None:
        slot = self._members.slot
        wanted = [(piece, matrix.pieces[slot]) for piece, matrix in zip(pieces, self._matrices, strict=True)]
        wanted += [(whole, self._matrices[number].numel) for number, whole in wholes.items()]
        for tensor, elements in wanted:
            if tensor.numel() != elements or tensor.dtype != self._dtype or not tensor.is_contiguous():
                raise StepError(
                    f"rank {self._members.number}: {self._transfer}: got {tensor.numel()} elements of {tensor.dtype}, "
                    f"expected {elements} of {self._dtype}, contiguous. Parameters and gradients keep the dtype that "
                    "they had at shard()."
                )
