"""The base class of collectives, and what a collective works with: its group and its workspace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final
from zlib import crc32

import torch
import torch.distributed as dist

from towpath.codecs.kernels import Watch
from towpath.codecs.packing import RoundingSeeds
from towpath.core.routes import Grid, Group
from towpath.core.transfer import Transfer


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

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self._buffers.values())


@dataclass(slots=True)
class Workspace:
    """The memory and the tags of one transfer, from its submission to its end.

    Transfers of one queue that run at the same time have different buffer indices, and so different buffers and tags.
    """

    buffers: WireBuffers  # the wire buffers with this index
    # Their index. Transfers with the same index never overlap.
    buffer_index: int = 0
    depth: int = 1  # how many transfers of the queue may run at the same time
    micro_step: int = 0  # the micro-step in which the transfer was submitted
    watch: Watch | None = None  # a callback for the work of codecs, if a trace records it
    # A function to call when the transfer no longer needs the links. The next transfer may then begin.
    links_free: Callable[[], None] = lambda: None
    # The bytes of values that were encoded so far in messages of any length, and the bytes of these messages.
    encoded_bytes: tuple[int, int] = (0, 0)

    def count_encoded(self, values: int, messages: int) -> None:
        """Note that `values` bytes of values became `messages` bytes of messages between nodes."""
        before, after = self.encoded_bytes
        self.encoded_bytes = before + values, after + messages

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a wire buffer of `numel` elements. All calls for a dtype return the same memory, unless it grows."""
        return self.buffers.take(numel, dtype)

    def tag(self, tag: int) -> int:
        """Return the tag of this transfer's messages, for a collective whose tag is `tag`."""
        return tag * self.depth + self.buffer_index


@dataclass(frozen=True, slots=True)
class GroupRank:
    """The group of a collective, and this rank's position in it."""

    # The process group of all members. A transfer by rows and columns does not use it, and it is then `row`.
    process_group: dist.ProcessGroup
    group: Group  # the ranks in ring order, and their slices
    position: int  # the position of this rank in the group
    nodes: tuple[int, ...]  # the node of each member
    # The process group of the members of this node, in their order. It is None in the form of messages.
    row: dist.ProcessGroup | None = None
    # The process group of the members at this place of each node, by node. It is None in the form of messages. If
    # collectives of the whole group execute the transfer, both are `process_group`.
    column: dist.ProcessGroup | None = None
    # The number in the job of the rank that the group counts as rank 0. Errors name ranks by their numbers.
    first: int = 0

    @property
    def slot(self) -> int:
        """The slice of the region that this rank holds."""
        return self.group.slots[self.position]

    @property
    def rank(self) -> int:
        """The rank of this member, as the model's process group counts."""
        return self.group.ranks[self.position]

    @property
    def number(self) -> int:
        """The rank of this member, as the job counts."""
        return self.first + self.rank

    @property
    def numbers(self) -> list[int]:
        """The ranks of all members, as the job counts."""
        return [self.first + rank for rank in self.group.ranks]

    @property
    def grid(self) -> Grid:
        return Grid.of(self.nodes)


def message_tag(transfer: Transfer) -> int:
    """Return the tag of a collective's messages, so that those of collectives that do not fit each other never meet."""
    # gloo ends a process that receives more than it expects. Collectives that do fit share a tag. If ranks mix them up,
    # the collective logs reveal it, without a wait.
    told = transfer.move.op.value, transfer.route, transfer.elements, transfer.dtype, transfer.encoding
    return crc32(" ".join(map(str, told)).encode()) >> 8


class Collective(ABC):
    """An operation of a group on a *region*, a contiguous 1-D tensor with one slice per member.

    `shard` is this rank's slice. It may be a view of the region. An all-gather copies the `shard` of each member to
    every `region`. A reduce-scatter writes the sum of all members' regions to `shard`, and leaves the rest of `region`
    undefined. An all-reduce writes the sum to all of `region`. Coalesced collectives take a list of regions and one of
    shards. `OwnersExchange` has a region for each matrix.
    """

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """Tensors that the collective keeps from one run to the next, such as error feedback."""
        return ()

    def restart(self) -> None:
        """Reset what is kept from earlier runs."""
        for kept in self.state:
            kept.zero_()

    def problems(self, wait: bool = True) -> Sequence[str]:
        """Return what is wrong with what this rank received, if it could go on. All ranks raise at the boundary.

        `wait`: Whether the host waits for what was received last. Otherwise this is about what is known so far.
        """
        return ()

    @property
    def kept_bytes(self) -> int:
        """The bytes that are kept of what was sent last, because the next run sends differences to it."""
        return 0

    # If messages have sizes of their own, collectives of the backend need one that all ranks agree on. `encode` then
    # comes first. The ranks set `agreed_size` to the largest `encoded_size`, and `run` sends as many bytes.

    @property
    def encoded_size(self) -> torch.Tensor | None:
        """The bytes of the encoded message, one integer on the device. None if ranks need not agree on it."""
        return None

    agreed_size = 0

    @property
    def largest_size(self) -> int:
        """The bytes of the longest message."""
        raise NotImplementedError(f"{type(self).__name__} sends messages of one size.")

    def encode(self, region: torch.Tensor, shard: torch.Tensor) -> None:
        """Encode `shard` before the ranks agree on sizes."""
        raise NotImplementedError(f"{type(self).__name__} sends messages of one size.")

    @property
    def seeds(self) -> tuple[RoundingSeeds, ...]:
        """The seeds of stochastic rounding, which change in each run."""
        return ()

    def begin(  # noqa: B027 most collectives have no such part
        self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace
    ) -> None:
        """Start the part of `run` that waits for no other rank, if there is one. `run` continues from there."""

    @abstractmethod
    def run(self, region: Any, shard: Any, workspace: Workspace) -> None:
        """Complete the collective in the order of the current stream. On a CPU, complete it before returning."""
