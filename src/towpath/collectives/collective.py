"""What every collective is: one move of the schedule, run by this rank among its group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final
from zlib import crc32

import torch
import torch.distributed as dist

from towpath.codecs.packing import Draws
from towpath.codecs.watched import Watch
from towpath.core.formats import Codec
from towpath.core.routes import Grid, Group, Op, bounds, parts_of, slice_bytes
from towpath.core.transfer import Range, Transfer
from towpath.errors import StepError

# --- workspace --------------------------------------------------------------------------------------------------------
#
# What a transfer that runs has to itself: memory to send from and to receive in, and the tag of its messages.


@final
class WireBuffers:
    """One per dtype, as large as was ever needed. `own`: what a new one is passed to, if somebody has to know."""

    def __init__(self, device: torch.device, own: Callable[[torch.Tensor], None] | None = None) -> None:
        self._device, self._own = device, own
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self.made = 0

    @torch.inference_mode(False)  # what is made in inference mode could never be trained with
    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same memory at every call for a dtype."""
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[dtype] = torch.empty(numel, dtype=dtype, device=self._device)
            self.made += 1
            if self._own is not None:
                self._own(buffer)
        return buffer[:numel]

    def reserve(self, needs: Mapping[str, int]) -> None:
        """Make room for so many elements by dtype now, so that `take` finds it."""
        for dtype, numel in needs.items():
            if numel:
                self.take(numel, getattr(torch, dtype))

    def clear(self) -> None:
        self._buffers.clear()

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self._buffers.values())


@dataclass(slots=True)
class Workspace:
    """Of one transfer, from its submission to its end.

    Transfers of one queue that are under way together are on different *ways*: of wire buffers, and of tags.
    """

    buffers: WireBuffers
    way: int = 0
    ways: int = 1
    micro_step: int = 0
    watch: Watch | None = None  # told of the work of codecs
    # To be called when the transfer needs the links no more: the one behind it may then begin.
    links_free: Callable[[], None] = lambda: None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.buffers.take(numel, dtype)

    def tag(self, tag: int) -> int:
        """Of messages of this way."""
        return tag * self.ways + self.way


@dataclass(frozen=True, slots=True)
class GroupRank:
    """The group a collective runs in, this rank's position in it, and the node that each member lives on.

    `between_nodes` has the same ranks: where a backend runs a group's messages one after the other, those that cross
    take this one, so that they overlap with those that do not. It may be `process_group` itself.
    """

    process_group: dist.ProcessGroup
    between_nodes: dist.ProcessGroup
    group: Group
    position: int
    nodes: tuple[int, ...]

    @property
    def slot(self) -> int:
        """The slice of the region that this rank holds."""
        return self.group.slots[self.position]

    @property
    def rank(self) -> int:
        return self.group.ranks[self.position]

    @property
    def grid(self) -> Grid:
        return Grid.of(self.nodes)

    def crosses(self, peer: int) -> bool:
        """Whether messages to the member at position `peer` leave the node, and have a group of their own for it."""
        return self.between_nodes is not self.process_group and self.nodes[peer] != self.nodes[self.position]


@dataclass(frozen=True, slots=True)
class Binding:
    """What a collective is made for: it runs on regions of `elements` elements of `dtype`, and on no others."""

    op: Op
    route: str
    elements: int
    dtype: torch.dtype
    label: str  # for messages to the user
    codec: Codec | None = None
    kept: tuple[int, ...] = ()  # by hop of a reduction: elements of what the codec rounds away that are kept
    encoded: bool = False  # of a gather: what each member brings is encoded already, as it rests

    @staticmethod
    def of(transfer: Transfer) -> Binding:
        dtype, codec, kept = getattr(torch, transfer.dtype), transfer.wire.encoding, transfer.kept_elements
        encoded = isinstance(transfer.payload, Range) and transfer.payload.encoded
        return Binding(transfer.move.op, transfer.route, transfer.elements, dtype, str(transfer), codec, kept, encoded)

    @property
    def tag(self) -> int:
        """Of its messages: those of collectives that do not fit each other never meet. (Gloo ends a process that is
        sent more than it expects.) Collectives that do fit share one: journals tell them apart, without a wait."""
        codec = "none" if self.codec is None else str(self.codec)
        return crc32(f"{self.op.value} {self.route} {self.elements} {self.dtype} {codec}".encode()) >> 8

    def parts(self, members: GroupRank) -> int:
        """Into how many each slice is cut on its way."""
        size = slice_bytes(self.elements, len(members.group.ranks), self.dtype.itemsize, self.codec)
        return parts_of(self.route, members.grid, size)

    @property
    def grain(self) -> int:
        """Slices and their parts begin at multiples of this many elements."""
        return 1 if self.codec is None else self.codec.grain

    def bounds(self, members: GroupRank, slot: int | None = None) -> tuple[int, int]:
        """Where slice `slot` lies in the region; without one, this member's."""
        return bounds(self.elements, len(members.group.ranks), members.slot if slot is None else slot, self.grain)

    def own_slice(self, region: torch.Tensor, members: GroupRank) -> torch.Tensor:
        start, end = self.bounds(members)
        return region[start:end]

    def check_fit(self, region: torch.Tensor, shard: torch.Tensor, members: GroupRank) -> None:
        """A collective carries what it was made for; anything else is refused before it meets the others' messages."""
        wanted = [("region", region, self.elements, self.dtype)]
        if self.op is not Op.ALL_REDUCE:
            start, end = self.bounds(members)
            if self.encoded and self.codec is not None:
                wanted.append(("shard", shard, self.codec.encoded_bytes(end - start), torch.uint8))
            else:
                wanted.append(("shard", shard, end - start, self.dtype))
        for name, tensor, elements, dtype in wanted:
            if tensor.numel() != elements or tensor.dtype != dtype or not tensor.is_contiguous():
                raise StepError(
                    f"rank {members.rank}: {self.label} by {self.route}: got a {name} of {tensor.numel()} elements of "
                    f"{tensor.dtype}, expected {elements} of {dtype}, contiguous. A collective carries what it "
                    "was made for; make another for other tensors."
                )


class Collective(ABC):
    """Runs on a *region*, a contiguous 1-D tensor with one slice per member; `shard` is this rank's slice.

    all-gather: `shard` → every slice of `region`. reduce-scatter: the sum over members of their `region`
    → `shard`; the rest of `region` is left undefined. all-reduce: the sum → `region`, whole.
    `shard` may be this rank's own slice of `region`.
    """

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """What it keeps from one run to the next."""
        return ()

    def restart(self) -> None:
        """Begin without what was kept."""
        for kept in self.state:
            kept.zero_()

    @property
    def draws(self) -> tuple[Draws, ...]:
        """The seeds it draws for stochastic rounding, from one run to the next."""
        return ()

    def begin(  # noqa: B027 most have no such part
        self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace
    ) -> None:
        """The part of `run` that waits for nobody, if it has one: `run` follows, and goes on from there."""

    @abstractmethod
    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Complete the collective in the order of the current stream (on a CPU: before it returns)."""
