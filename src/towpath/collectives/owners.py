"""The exchange of matrices between the ranks that hold their pieces and the ranks that own them.

`core/transfer.py` lists the messages. An optimizer that needs full matrices uses this exchange in its step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from towpath.codecs.kernels import kernels_for
from towpath.collectives.collective import Collective, GroupRank, Workspace
from towpath.collectives.point_to_point import PeerMessage, post
from towpath.core.formats import item_bytes
from towpath.core.payloads import Matrices, OwnerMessage, owner_messages, piece_bytes
from towpath.core.routes import Op
from towpath.core.transfer import Transfer
from towpath.errors import StepError

# Codecs that round stochastically are refused for these transfers, so that the seed is never used.
_NO_SEED = 0


@dataclass(frozen=True, slots=True)
class _PieceMessage:
    """A message at one of its ends."""

    message: OwnerMessage
    leaves: bool  # True if this rank sends it, False if it receives it
    tensor: torch.Tensor  # the elements that are read, or written
    content: torch.Tensor  # the memory that is sent or received: `tensor` itself, or a wire buffer if there is a codec


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
        """Execute the transfer. To the owners, each piece is copied into its place in the region; from them, back.

        `region` has the full matrices that this rank owns, by index of the matrix, and `shard` this rank's piece of
        each matrix. All are 1-D.
        """
        wholes, pieces = region, shard
        self._check(pieces, wholes)
        exchanged = self._piece_messages(pieces, wholes, workspace)
        kernels = None if self._kernels is None else self._kernels.watched(workspace.watch)
        for piece in exchanged:
            if piece.leaves and kernels is not None and self._codec is not None:
                kernels.encode(self._codec, piece.tensor, piece.content, _NO_SEED)
        messages = [
            PeerMessage(piece.leaves, piece.message.target if piece.leaves else piece.message.source, piece.content)
            for piece in exchanged
        ]
        what = self._transfer.kind.value
        posted = post(messages, self._members, what, workspace, 0) if messages else None
        # While the messages travel, the owner copies its own piece of each matrix.
        slot = self._members.slot
        for number, whole in wholes.items():
            start, end = self._matrices[number].bounds(slot)
            source, target = whole[start:end], pieces[number]
            if self._op is Op.TO_OWNERS:
                source, target = target, source
            target.copy_(source)
        if posted is not None:
            posted.wait()
        for piece in exchanged:
            if not piece.leaves and kernels is not None and self._codec is not None:
                kernels.decode(self._codec, piece.content, piece.tensor)

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

    def _piece_messages(
        self, pieces: Sequence[torch.Tensor], wholes: Mapping[int, torch.Tensor], workspace: Workspace
    ) -> list[_PieceMessage]:
        lengths = [self._matrices[m.matrix].pieces[m.slot] for m in self._mine]
        sizes = [piece_bytes(n, self._item, self._codec) for n in lengths]
        transports = workspace.take(sum(sizes), torch.uint8).split(sizes) if self._codec is not None and sizes else None
        found: list[_PieceMessage] = []
        for index, message in enumerate(self._mine):
            leaves, matrix = message.source == self._members.position, self._matrices[message.matrix]
            start, end = matrix.bounds(message.slot)
            is_piece = leaves is (self._op is Op.TO_OWNERS)
            tensor = pieces[message.matrix] if is_piece else wholes[message.matrix][start:end]
            found.append(_PieceMessage(message, leaves, tensor, tensor if transports is None else transports[index]))
        return found
