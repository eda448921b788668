"""The base class of collectives, and what a collective works with: its group, its binding and its workspace."""

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
# A workspace belongs to one running transfer. It has the memory to send from and to receive in, and the messages' tag.


@final
class WireBuffers:
    """A cache of wire buffers, one for each dtype. Each is as large as the largest request so far.

    `own` is called with every new buffer. A stream uses it to keep the memory from being reused too early.
    """

    def __init__(self, device: torch.device, own: Callable[[torch.Tensor], None] | None = None) -> None:
        self._device, self._own = device, own
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self.made = 0

    @torch.inference_mode(False)  # tensors that are created in inference mode cannot be used in training
    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of `numel` elements. All calls for a dtype return the same memory, unless it grows."""
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[dtype] = torch.empty(numel, dtype=dtype, device=self._device)
            self.made += 1
            if self._own is not None:
                self._own(buffer)
        return buffer[:numel]

    def reserve(self, needs: Mapping[str, int]) -> None:
        """Allocate the given number of elements for each dtype now, so that `take` allocates nothing later."""
        for dtype, numel in needs.items():
            if numel:
                self.take(numel, getattr(torch, dtype))

    def clear(self) -> None:
        """Drop all buffers."""
        self._buffers.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.nbytes for b in self._buffers.values())


@dataclass(slots=True)
class Workspace:
    """The memory and the tags of one transfer, from its submission to its end.

    Transfers of one queue that run at the same time have different *ways*: different wire buffers and different tags.

    Attributes:
        buffers: The wire buffers of this way.
        way: The number of the way.
        ways: How many ways the queue has.
        micro_step: The micro-step in which the transfer was submitted.
        watch: A callback for the work of codecs, if a trace records it.
        links_free: A function to call when the transfer no longer needs the links. The next transfer may then begin.
    """

    buffers: WireBuffers
    way: int = 0
    ways: int = 1
    micro_step: int = 0
    watch: Watch | None = None
    links_free: Callable[[], None] = lambda: None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a wire buffer of `numel` elements. All calls for a dtype return the same memory, unless it grows."""
        return self.buffers.take(numel, dtype)

    def tag(self, tag: int) -> int:
        """Return the tag of messages of this way, for a collective whose tag is `tag`."""
        return tag * self.ways + self.way


@dataclass(frozen=True, slots=True)
class GroupRank:
    """The group of a collective, and this rank's position in it.

    Attributes:
        process_group: The process group of all members.
        between_nodes: A process group of the same ranks for messages between nodes. It lets them overlap with other
            messages on backends that run a group's messages one after the other. It may be `process_group` itself.
        group: The ranks in ring order, and their slices.
        position: The position of this rank in the group.
        nodes: The node of each member.
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
        """The global rank of this member."""
        return self.group.ranks[self.position]

    @property
    def grid(self) -> Grid:
        """The grid of the members."""
        return Grid.of(self.nodes)

    def crosses(self, peer: int) -> bool:
        """Return whether messages to the member at position `peer` use the process group between nodes."""
        return self.between_nodes is not self.process_group and self.nodes[peer] != self.nodes[self.position]


@dataclass(frozen=True, slots=True)
class Binding:
    """The tensors and the operation that a collective is made for.

    Attributes:
        op: The operation.
        route: The route of its messages.
        elements: The length of the region. The collective refuses other tensors.
        dtype: The dtype of the region.
        label: The name of the transfer in error messages.
        codec: The codec, if any.
        kept: How many elements of error feedback each hop of a reduction keeps.
        encoded: True if each member's shard of a gather is already encoded.
    """

    op: Op
    route: str
    elements: int
    dtype: torch.dtype
    label: str
    codec: Codec | None = None
    kept: tuple[int, ...] = ()
    encoded: bool = False

    @staticmethod
    def of(transfer: Transfer) -> Binding:
        """Return the binding of a transfer."""
        dtype, codec, kept = getattr(torch, transfer.dtype), transfer.wire.encoding, transfer.kept_elements
        encoded = isinstance(transfer.payload, Range) and transfer.payload.encoded
        return Binding(transfer.move.op, transfer.route, transfer.elements, dtype, str(transfer), codec, kept, encoded)

    @property
    def tag(self) -> int:
        """The tag of its messages, so that messages of collectives that do not fit each other never meet.

        gloo ends a process that receives more than it expects. Collectives that do fit share a tag. If ranks mix them
        up, the journals reveal it, without a wait.
        """
        codec = "none" if self.codec is None else str(self.codec)
        return crc32(f"{self.op.value} {self.route} {self.elements} {self.dtype} {codec}".encode()) >> 8

    def parts(self, members: GroupRank) -> int:
        """Return how many parts each slice is cut into while it is sent."""
        size = slice_bytes(self.elements, len(members.group.ranks), self.dtype.itemsize, self.codec)
        return parts_of(self.route, members.grid, size)

    @property
    def grain(self) -> int:
        """Slices and their parts start at multiples of this many elements."""
        return 1 if self.codec is None else self.codec.grain

    def bounds(self, members: GroupRank, slot: int | None = None) -> tuple[int, int]:
        """Return the start and end of slice `slot` in the region. The default is this member's slice."""
        return bounds(self.elements, len(members.group.ranks), members.slot if slot is None else slot, self.grain)

    def own_slice(self, region: torch.Tensor, members: GroupRank) -> torch.Tensor:
        """Return this member's slice of `region`, as a view."""
        start, end = self.bounds(members)
        return region[start:end]

    def check_fit(self, region: torch.Tensor, shard: torch.Tensor, members: GroupRank) -> None:
        """Check the tensors before any message is sent, so that they cannot be mixed with messages of other sizes.

        Raises:
            StepError: If a tensor's length, dtype or layout is not what the collective was made for.
        """
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
    """An operation of a group on a *region*, a contiguous 1-D tensor with one slice per member.

    `shard` is this rank's slice. It may be a view of the region. An all-gather copies the `shard` of each member to
    every `region`. A reduce-scatter writes the sum of all members' regions to `shard`, and leaves the rest of `region`
    undefined. An all-reduce writes the sum to all of `region`.
    """

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """Tensors that the collective keeps from one run to the next, such as error feedback."""
        return ()

    def restart(self) -> None:
        """Reset what is kept from earlier runs."""
        for kept in self.state:
            kept.zero_()

    @property
    def draws(self) -> tuple[Draws, ...]:
        """The seeds of stochastic rounding, which change in each run."""
        return ()

    def begin(  # noqa: B027 most collectives have no such part
        self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace
    ) -> None:
        """Start the part of `run` that waits for no other rank, if there is one. `run` continues from there."""

    @abstractmethod
    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        """Complete the collective in the order of the current stream. On a CPU, complete it before returning."""
