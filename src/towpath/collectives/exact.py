"""The exact parameter sync: an all-gather of differences to the values that every member holds.

Each member encodes its slice once, against the values that it sent last. The encoded slices go along the route as they
are, because a member that has decoded a slice no longer holds the values that the next one needs to decode it. At the
end each member decodes the slices of the others in place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch

from towpath.codecs.exact import (
    decode_difference,
    decode_values,
    encode_difference,
    encode_values,
    is_difference,
    message_bytes,
)
from towpath.collectives.collective import Collective, GroupRank, Workspace
from towpath.collectives.point_to_point import PointToPoint
from towpath.core.exact import message_cell
from towpath.core.routes import Piece, cell_elements, piece_bounds
from towpath.core.transfer import Range, Transfer


@final
class ExactAllGather(Collective):
    """An all-gather of new values for slices whose old values all members hold.

    `region` has the old values, which the last run left there, and `shard` the new ones of this member's slice. `shard`
    may be a view of the region, where the optimizer has overwritten the old ones. The first run, and that after
    `restart`, sends the values themselves instead of differences.
    """

    def __init__(self, transfer: Transfer, members: GroupRank) -> None:
        assert isinstance(transfer.payload, Range)
        count, parts = len(members.group.ranks), transfer.parts
        self._own = slice(*transfer.bounds(members.slot))
        self._cell = message_cell(cell_elements(transfer.elements, count, parts), transfer.dtype)
        self._bytes = count * parts * self._cell
        encoded = replace(transfer, payload=replace(transfer.payload, elements=self._bytes, dtype="uint8"))
        self._inner = PointToPoint(encoded, members, cells_of=self._cell)
        # By slice: the start and the end of each part of it in the region.
        self._pieces = [
            [piece_bounds(transfer.elements, count, Piece(slot, part, parts)) for part in range(parts)]
            for slot in range(count)
        ]
        self._slot = members.slot
        self._sent: torch.Tensor | None = None  # a copy of what was sent last, if the region does not keep it
        self._is_first = True

    @property
    def sent_bytes(self) -> int:
        """The bytes of the copy of what was sent last."""
        return 0 if self._sent is None else self._sent.nbytes

    def restart(self) -> None:
        """Send the next slice in a form that does not depend on what its receivers hold."""
        self._is_first = True

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Send `shard` to all members, and replace the region by the new values of all."""
        cells = workspace.take(self._bytes, torch.uint8).view(len(self._pieces), -1, self._cell)
        before, in_place = region[self._own], shard.data_ptr() == region[self._own].data_ptr()
        if in_place:  # the optimizer has overwritten the region itself
            if self._sent is None:
                self._sent = torch.empty_like(shard)
            before = self._sent
        for cell, (start, end) in zip(cells[self._slot], self._pieces[self._slot], strict=True):
            part = slice(start - self._own.start, end - self._own.start)
            if self._is_first:
                encode_values(shard[part], cell)
            else:
                encode_difference(before[part], shard[part], cell)
        before.copy_(shard)
        self._is_first = False
        wire = cells.view(-1)
        self._inner.run(wire, cells[self._slot].view(-1), workspace)
        for slot, pieces in enumerate(self._pieces):
            for cell, (start, end) in zip(cells[slot], pieces, strict=True):
                part = region[start:end]
                workspace.count_exact(part.nbytes, message_bytes([cell])[0])
                if slot != self._slot:
                    (decode_difference if is_difference(cell) else decode_values)(cell, part)
