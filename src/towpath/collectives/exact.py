"""The exact parameter sync: an all-gather of differences to the values that every member holds.

Each member encodes its slice once, against the values that it sent last. The encoded slices go along the route as they
are, because a member that has decoded a slice no longer holds the values that the next one needs to decode it. At the
end each member decodes the slices of the others in place.

Messages have sizes of their own. `ExactAllGather` encodes and sends in one go, because a message between two ranks may
have any length. `AgreedAllGather` uses the backend's collectives, in which every rank sends as many bytes. It encodes
before the ranks agree on the largest size (`engine/parameters/unit.py`), and sends afterwards.

A message that a member cannot decode leaves its slice unchanged. The member tells all ranks at the boundary, which
raise before the optimizer steps (`Collective.problems`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch

from towpath.codecs.exact import (
    MessageError,
    Problem,
    decode,
    decode_slices,
    encode,
    is_difference,
    message_bytes,
    raise_failed,
)
from towpath.collectives.backend import grouped
from towpath.collectives.collective import Collective, GroupRank, Workspace
from towpath.collectives.point_to_point import PointToPoint
from towpath.core.formats import CELL_ALIGNMENT, message_cell
from towpath.core.routes import Op, SlicePart, cell_elements, piece_bounds
from towpath.core.transfer import Transfer
from towpath.core.units import Range, round_up


class ExactSync(Collective):
    """An all-gather of new values for slices whose old values all members hold.

    `region` has the old values, which the last run left there, and `shard` the new ones of this member's slice. `shard`
    may be a view of the region, where the optimizer has overwritten the old ones. The first run, and that after
    `restart`, sends the values themselves instead of differences.
    """

    def __init__(self, transfer: Transfer, members: GroupRank, parts: int) -> None:
        assert isinstance(transfer.payload, Range)
        count = len(members.group.ranks)
        self._members = members
        self._own = slice(*transfer.bounds(members.slot))
        self._cell = message_cell(cell_elements(transfer.elements, count, parts), transfer.dtype)
        self._bytes = count * parts * self._cell
        # By slice: the start and the end of each part of it in the region.
        self._pieces = [
            [piece_bounds(transfer.elements, count, SlicePart(slot, part, parts)) for part in range(parts)]
            for slot in range(count)
        ]
        self._sent: torch.Tensor | None = None  # a copy of what was sent last, if the region does not keep it
        self._is_first = True
        # By slice: why its last message could not be decoded. It stays until a later one is, after a load for example.
        self._problems: dict[int, str] = {}

    @property
    def kept_bytes(self) -> int:
        """The bytes that are kept of what was sent last."""
        return 0 if self._sent is None else self._sent.nbytes

    def restart(self) -> None:
        """Send the next slice in a form that does not depend on what its receivers hold."""
        self._is_first = True

    def problems(self, wait: bool = True) -> Sequence[str]:
        """Return which slices hold old values, because their last messages could not be decoded."""
        return tuple(self._problems.values())

    def _encode(self, region: torch.Tensor, shard: torch.Tensor, cells: Sequence[torch.Tensor]) -> bool:
        """Encode the parts of this member's slice, and write them to the region. Return whether as differences."""
        before, in_place = region[self._own], shard.data_ptr() == region[self._own].data_ptr()
        # The optimizer has overwritten the region itself.
        if in_place:
            if self._sent is None:
                self._sent = torch.empty_like(shard)
            before = self._sent
        is_first, self._is_first = self._is_first, False
        for cell, (start, end) in zip(cells, self._pieces[self._members.slot], strict=True):
            part = slice(start - self._own.start, end - self._own.start)
            encode(None if is_first else before[part], shard[part], cell)
        # The receivers will hold these values, which the next differences refer to.
        before.copy_(shard)
        return not is_first

    def _decode(self, cells: torch.Tensor, region: torch.Tensor) -> None:
        """Decode the slices of the others, one message after the other, and note which ones cannot be decoded."""
        for slot, pieces in enumerate(self._pieces):
            problem = ""
            for cell, (start, end) in zip(cells[slot], pieces, strict=True):
                try:
                    if slot != self._members.slot:
                        raise_failed([decode(cell, region[start:end], is_difference(cell))])
                except MessageError as error:
                    problem = str(error)
            self._note(slot, problem)

    def _note(self, slot: int, problem: str) -> None:
        """Keep the problem of a slice's last message. An empty one means that it was decoded."""
        self._problems.pop(slot, None)
        if problem:
            members = self._members
            number = members.numbers[members.group.slots.index(slot)]
            self._problems[slot] = f"the message from rank {number}: {problem}"


@final
class ExactAllGather(ExactSync):
    """The exact parameter sync by messages between two ranks."""

    def __init__(self, transfer: Transfer, members: GroupRank) -> None:
        super().__init__(transfer, members, transfer.parts)
        assert isinstance(transfer.payload, Range)
        encoded = replace(transfer, payload=replace(transfer.payload, elements=self._bytes, dtype="uint8"))
        self._inner = PointToPoint(encoded, members, cells_of=self._cell)

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Send `shard` to all members, and replace the region by the new values of all."""
        cells = workspace.take(self._bytes, torch.uint8).view(len(self._pieces), -1, self._cell)
        mine = cells[self._members.slot]
        self._encode(region, shard, list(mine))
        self._inner.run(cells.view(-1), mine.view(-1), workspace)
        workspace.count_encoded(region.nbytes, sum(message_bytes(list(cells.view(-1, self._cell)))))
        self._decode(cells, region)


@final
class AgreedAllGather(ExactSync):
    """The exact parameter sync by collectives of the backend. All slices have the same length.

    `encode` comes first. `run` sends as many bytes as the ranks have agreed on.
    """

    def __init__(self, transfer: Transfer, members: GroupRank, device: torch.device) -> None:
        super().__init__(transfer, members, 1)
        self._message = torch.zeros(self._cell, dtype=torch.uint8, device=device)
        self._inner = grouped(Op.ALL_GATHER, transfer.route, members, self._bytes, device, start=self._bytes)
        self._as_differences = False
        self._is_encoded = False  # a message is encoded, and not sent yet
        on_device = device.type == "cuda"
        # The outcomes of decoding, by slice. On a GPU the host reads them at the boundary.
        self._outcomes = torch.zeros(len(self._pieces), dtype=torch.int32, pin_memory=True) if on_device else None
        self._end: torch.cuda.Event | None = None

    @property
    def kept_bytes(self) -> int:
        """The bytes that are kept of what was sent last, and those of its message."""
        return super().kept_bytes + self._message.nbytes

    @property
    def encoded_size(self) -> torch.Tensor:
        """The bytes of the message, one integer on the device."""
        return self._message[16:24].view(torch.int64)

    @property
    def largest_size(self) -> int:
        """The bytes of the longest message."""
        return len(self._message)

    def encode(self, region: torch.Tensor, shard: torch.Tensor) -> None:
        """Encode `shard`, and write it to this member's slice of the region."""
        # The receivers will never get the values that differences would refer to.
        if self._is_encoded:
            self.restart()
        self._is_encoded = True
        self._as_differences = self._encode(region, shard, [self._message])

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Send the encoded slice to all members, and replace the region by the new values of all."""
        size, self.agreed_size = round_up(self.agreed_size, CELL_ALIGNMENT), 0
        assert size, "the ranks have not agreed on a size"
        self._is_encoded = False
        self._read_outcomes(wait=True)  # of the run before, if nobody has read them
        count = len(self._pieces)
        gathered = workspace.take(self._bytes, torch.uint8)[: count * size]
        self._inner.run(gathered, self._message[:size], workspace)
        workspace.count_encoded(region.nbytes, gathered.nbytes)
        if self._outcomes is None:
            self._decode(gathered.view(count, 1, size), region)
            return
        slices = region.view(count, -1)
        outcomes = decode_slices(gathered.view(count, size), slices, self._members.slot, self._as_differences)
        # To page-locked memory, so that the host does not wait.
        self._outcomes.copy_(outcomes, non_blocking=True)
        # The event tells the host when the outcomes are there, without a wait for the device now.
        self._end = torch.cuda.Event()
        self._end.record()

    def problems(self, wait: bool = True) -> Sequence[str]:
        """Return which slices hold old values, after the last run if it has ended, or if `wait`."""
        self._read_outcomes(wait)
        return super().problems()

    def _read_outcomes(self, wait: bool) -> None:
        if self._outcomes is not None and self._end is not None and (wait or self._end.query()):
            self._end.synchronize()
            self._end = None
            for slot, code in enumerate(self._outcomes.tolist()):
                self._note(slot, Problem(code).text if code else "")
