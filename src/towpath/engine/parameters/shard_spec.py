"""The description of a rank's slice of a parameter, the storage of an encoded slice, and the gathering of slices.

Each `ShardTensor` has a `ShardSpec`. Those of frozen parameters may store an `EncodedSlice` in place of a tensor.
`whole_tensors` all-gathers several ShardTensors at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from towpath.codecs.kernels import kernels_for
from towpath.collectives.backend import all_gather_single
from towpath.core.formats import SCALE_BYTES, Codec
from towpath.core.units import overlap
from towpath.engine.parameters.dtensors import MeshPlacements
from towpath.engine.parameters.partial_sums import Replica

if TYPE_CHECKING:
    from towpath.engine.parameters.shard_tensor import ShardTensor


@dataclass(frozen=True, slots=True, eq=False)
class ShardSpec:
    """The elements of a tensor that each rank holds: those in the rank's slice of the bucket's flat buffer.

    Each ShardTensor has one, shared with its aliases, its gradient and its optimizer states. ShardSpecs are compared by
    identity. Two ShardTensors match element by element only if they have the same ShardSpec.
    """

    shape: torch.Size  # shape in the flat buffer: the full tensor's, or that of this rank's part of a DTensor
    offset: int  # where the tensor starts in the flat buffer
    cut: int  # length of a slice of the flat buffer
    slot: int  # number of the slice of the flat buffer that this rank holds
    replica: Replica
    parallel: MeshPlacements | None = None
    counts: bool = True  # whether this copy counts in norms and sums; of copies on a tensor-parallel mesh, one does
    holders: tuple[int, ...] = ()  # the ranks that hold the same slice, including this one
    name: str = ""  # name of the parameter
    unit: str = ""  # name of the unit in whose forward the parameter is unsharded; empty for the root

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardSpec:
        """Return `self`: a copy of the tensor holds the same elements, and a process group cannot be copied."""
        return self

    @property
    def whole_shape(self) -> torch.Size:
        return self.shape if self.parallel is None else self.parallel.shape

    @property
    def is_saved(self) -> bool:
        """Whether torch.distributed.checkpoint saves this rank's slice: of several islands, those of the first one."""
        return self.replica.first == 0

    def counted(self, local: torch.Tensor) -> torch.Tensor:
        """Return `local` if this rank's copy counts in norms and sums, otherwise no elements of it."""
        return local if self.counts else local[:0]

    def bounds(self, slot: int | None = None) -> tuple[int, int]:
        """Return the elements [start, end) of the flattened tensor in slice `slot`, by default this rank's slice."""
        return overlap(self.offset, self.shape.numel(), self.cut, self.slot if slot is None else slot)

    def describe(self) -> str:
        start, end = self.bounds()
        return (
            f"parameter {self.name!r} of shape {tuple(self.whole_shape)} in unit {self.unit or 'root'!r}, of which "
            f"rank {self.replica.number} holds the elements [{start}:{end}]"
        )

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of `whole`, a tensor of the full shape."""
        start, end = self.bounds()
        return (whole if self.parallel is None else self.parallel.part_of(whole)).reshape(-1)[start:end]

    def bounds_in_slice(self) -> tuple[int, int]:
        """Return the same elements as positions [start, end) in this rank's slice of the flat buffer."""
        start, end = self.bounds()
        base = self.slot * self.cut - self.offset
        return (start - base, end - base) if end > start else (0, 0)


# No block crosses the border of a parameter or a shard (`BucketSpec.in_blocks`), so each parameter's part can be read
# and written by itself. A write compares block by block first. A block that already decodes to the new values is
# left unchanged, because encoding it again might round it once more.


class EncodedShard:
    """A frozen bucket's P shard, stored as one message of a codec: the scales, then the codes."""

    def __init__(self, codec: Codec, values: torch.Tensor) -> None:
        """Encode `values`. They are rounded here, and not again unless they are written to."""
        assert values.numel() % codec.block == 0
        self.codec, self.dtype, self.device = codec, values.dtype, values.device
        self.elements = values.numel()
        self._kernels = kernels_for(values.device)
        self.message = self._encoded(values)
        split = SCALE_BYTES * codec.scales(self.elements)
        self._scales = self.message[:split].view(-1, SCALE_BYTES)  # [blocks, bytes]
        self._codes = self.message[split:].view(len(self._scales), -1)  # [blocks, bytes]

    def decode(self, out: torch.Tensor) -> None:
        self._kernels.decode(self.codec, self.message, out)

    def read(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements [start, end), decoded. `start` must be the start of a block."""
        out = torch.empty(-(-(end - start) // self.codec.block) * self.codec.block, dtype=dtype, device=self.device)
        if end > start:
            blocks = self._blocks(start, end)
            message = torch.cat([self._scales[blocks].flatten(), self._codes[blocks].flatten()])
            self._kernels.decode(self.codec, message, out)
        return out[: end - start]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Encode `values` into the elements from `start` on, which must be the start of a block."""
        # The rest of the last block becomes zero.
        end, size = start + values.numel(), self.codec.block
        if end == start:
            return
        # Parameters start at a block, so the rest of the last block belongs to no other parameter.
        padded = torch.nn.functional.pad(values.detach(), (0, -values.numel() % size))
        blocks = self._blocks(start, end)
        before = self.read(start, start + padded.numel(), values.dtype)
        changed = (padded != before).view(-1, size).any(1, keepdim=True)
        message = self._encoded(padded)
        split = SCALE_BYTES * self.codec.scales(padded.numel())
        for held, now in ((self._scales[blocks], message[:split]), (self._codes[blocks], message[split:])):
            held.copy_(torch.where(changed, now.view(held.shape), held))

    def _blocks(self, start: int, end: int) -> slice:
        assert start % self.codec.block == 0, (start, self.codec)
        return slice(start // self.codec.block, -(-end // self.codec.block))

    def _encoded(self, values: torch.Tensor) -> torch.Tensor:
        nbytes = self.codec.encoded_bytes(values.numel())
        message = torch.empty(nbytes, dtype=torch.uint8, device=values.device)
        self._kernels.encode(self.codec, values.contiguous(), message)
        return message


class EncodedSlice:
    """The part of an `EncodedShard` for one parameter, which its ShardTensor holds in place of a tensor."""

    __slots__ = ("_end", "_shard", "_start", "codec", "device", "dtype")

    def __init__(self, shard: EncodedShard, start: int, end: int) -> None:
        self._shard, self._start, self._end = shard, start, end
        self.codec, self.dtype, self.device = shard.codec, shard.dtype, shard.device

    def read(self) -> torch.Tensor:
        """Decode and return the elements. The result is a copy, so writes to it have no effect."""
        return self._shard.read(self._start, self._end, self.dtype)

    def write(self, values: torch.Tensor) -> None:
        self._shard.write(self._start, values.to(self.dtype))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return the decoded elements on the host, as PyTorch's checkpoint stagers expect."""
        return self.read().cpu()


def whole_tensors(
    batches: Sequence[Sequence[ShardTensor]], device: torch.device | None = None, wanted: bool = True
) -> Iterator[list[torch.Tensor]]:
    """Yield the full tensors of each batch, with one all-gather for each batch.

    All ranks must pass the same batches, in the same order.

    `batches`: ShardTensors. Those of one batch have one dtype and are sharded over the same ranks. `device`: Where the
    full tensors are made. By default, on the device of each ShardTensor. Use the CPU to save device memory. `wanted`:
    Whether this rank needs the results. If False, it takes part in the all-gather and yields empty lists.
    """
    # One buffer serves all batches. It takes about as much memory as the full tensors of the largest batch.
    # The elements [start, end) of each tensor of each batch: batch → member of the replica → tensor.
    bounds = [
        [[part.shard_spec.bounds(slot) for part in batch] for slot in batch[0].shard_spec.replica.slots]
        for batch in batches
    ]
    longest = [max(sum(end - start for start, end in each) for each in members) for members in bounds]
    shapes = [(len(members), length) for members, length in zip(bounds, longest, strict=True)]
    needed = [prod(shape) * batch[0].itemsize for shape, batch in zip(shapes, batches, strict=True)]
    memory = torch.empty(max(needed, default=0), dtype=torch.uint8, device=batches[0][0].device if batches else None)
    for batch, members, shape, nbytes in zip(batches, bounds, shapes, needed, strict=True):
        gathered = memory[:nbytes].view(batch[0].dtype).view(shape)
        yield _gathered(batch, members, gathered, device, wanted)


def _gathered(
    batch: Sequence[ShardTensor],
    members: Sequence[Sequence[tuple[int, int]]],
    gathered: torch.Tensor,
    device: torch.device | None,
    wanted: bool,
) -> list[torch.Tensor]:
    replica = batch[0].shard_spec.replica
    mine = replica.slots.index(batch[0].shard_spec.slot)
    for place, part in zip(_divided(gathered[mine], members[mine]), batch, strict=True):
        place.copy_(part.local.detach())
    if replica.group is not None:
        # Ranks note the call in their logs, so that a rank that makes it alone gets an error in place of a hang.
        assert replica.program is not None
        names = ", ".join(repr(part.shard_spec.name) for part in batch[:3]) + (" …" if len(batch) > 3 else "")
        with replica.program.shared(f"full_tensor() of {names}", replica.call):
            on_host = not gathered.is_cuda
            replica.program.wait(all_gather_single(gathered.view(-1), gathered[mine], replica.group, async_op=on_host))
    parallel = any(part.shard_spec.parallel is not None for part in batch)
    if not (wanted or parallel):
        return []
    # On `device`, often the host: the buffer of the gather is all that the device has to hold.
    wholes = [torch.empty(part.shard_spec.shape, dtype=part.dtype, device=device or part.device) for part in batch]
    for row, each in zip(gathered, members, strict=True):
        for whole, (start, end), piece in zip(wholes, each, _divided(row, each), strict=True):
            whole.view(-1)[start:end].copy_(piece)
    # On a tensor-parallel mesh, the replica holds only a part of the full tensor.
    return [
        whole
        if part.shard_spec.parallel is None
        else part.shard_spec.parallel.wrap(whole.to(part.device)).full_tensor().to(whole.device)
        for part, whole in zip(batch, wholes, strict=True)
    ]


def _divided(row: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> Sequence[torch.Tensor]:
    lengths = [end - start for start, end in bounds]
    return row[: sum(lengths)].split(lengths)
