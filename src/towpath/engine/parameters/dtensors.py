"""Parameters that are DTensors on a tensor-parallel mesh, whose local part `shard()` shards, and boxes of tensors.

Importing DTensor or torch.distributed.checkpoint takes up to a second, so this module imports them where it uses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from towpath.errors import ShardError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


# The elements [start, end) of a tensor with n dimensions are at most 2n − 1 boxes, none of them empty. They are the
# end of a row, then complete rows, then the start of a row. The two incomplete rows are split in the same way.


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: `sizes` elements in each dimension, from `offsets` on.

    It holds the elements [start, end) of the flattened tensor. For this rank's part of a DTensor, `offsets` refer to
    the full tensor, while `start` and `end` refer to the flattened part.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    end: int


def boxes_of(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Yield the elements [start, end) of a flattened tensor of `shape` as boxes, in order."""
    if start >= end:
        return
    if not shape:
        yield Box((), (), 0, 1)
        return
    row, rest = prod(shape[1:]), tuple(shape[1:])
    # The first start of a row, and the last end of one. All elements may be inside one row, and then neither is inside.
    borders = -(-start // row) * row, end // row * row
    for first, last in pairwise(sorted({start, end, *(at for at in borders if start < at < end)})):
        index = first // row
        if first % row == last % row == 0:
            yield Box((index, *(0 for _ in rest)), ((last - first) // row, *rest), first, last)
            continue
        for box in boxes_of(rest, first - index * row, last - index * row):
            yield Box((index, *box.offsets), (1, *box.sizes), index * row + box.start, index * row + box.end)


def ranges_of(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the elements of `box` in order, as ranges [start, end) of the flattened tensor of `shape`."""
    # The box covers all of each dimension from `rest` on. Its elements in dimension `rest - 1` are thus contiguous.
    rest = next((dim for dim in range(len(shape), 0, -1) if box.sizes[dim - 1] != shape[dim - 1]), 0)
    if rest == 0:
        yield 0, prod(shape)
        return
    row = prod(shape[rest:])
    places = [range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)]
    for index in product(*places[: rest - 1]):
        first = 0
        for at, length in zip((*index, box.offsets[rest - 1]), shape[:rest], strict=True):
            first = first * length + at
        yield first * row, (first + box.sizes[rest - 1]) * row


def chunks_of(boxes: Sequence[Box]) -> list[ChunkStorageMetadata]:
    """Return `boxes` as torch.distributed.checkpoint describes them: the offsets and sizes of each chunk."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in boxes]


def write_items(fqn: str, local: torch.Tensor, shape: torch.Size, boxes: Sequence[Box]) -> list[WriteItem]:
    """Return DCP's write items for `boxes`. `local` holds this rank's elements of the tensor of `shape`."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(local)
    chunks = [(MetadataIndex(fqn, c.offsets), TensorWriteData(c, properties, shape)) for c in chunks_of(boxes)]
    return [WriteItem(index, WriteItemType.SHARD, tensor_data=data) for index, data in chunks]


def box_at(index: MetadataIndex, local: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
    """Return the box that starts at the offsets of `index`, as a view of `local`, which holds all of `boxes`."""
    box = next((b for b in boxes if b.offsets == tuple(index.offset or ())), None)
    if box is None:
        raise ShardError(f"{index.fqn}: this rank has no box that begins at {index.offset}. Plan the load anew.")
    start = box.start - boxes[0].start
    return local[start : start + box.end - box.start].view(box.sizes)


class PickledShard(torch.Tensor):
    """A ShardTensor in another process, without process groups. DCP can save it, and nothing else works."""

    # `dcp.async_save(…, async_checkpointer_type=AsyncCheckpointerType.PROCESS)` sends it.

    _local: torch.Tensor
    _boxes: Sequence[Box]

    @staticmethod
    def __new__(cls: type[PickledShard], shape: torch.Size, local: torch.Tensor, boxes: Sequence[Box]) -> PickledShard:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made._local, made._boxes = local, boxes
        return made

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return write_items(fqn, self._local, self.shape, self._boxes)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return box_at(index, self._local, self._boxes)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ShardError(
            f"{func}: a ShardTensor that was sent to another process can only be saved there. Send to_local(), or let "
            "every rank call full_tensor() and send that."
        )


@dataclass(frozen=True, slots=True, eq=False)
class MeshPlacements:
    """Mesh and placements of a parameter that was a DTensor when `shard` got it. `ShardSpec` and the layout hold it."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size  # shape of the full tensor
    stride: tuple[int, ...]

    @property
    def ranks(self) -> list[int]:
        return self.mesh.mesh.flatten().tolist()

    @property
    def is_split(self) -> bool:
        """True if no two ranks of the mesh hold the same part."""
        return all(placement.is_shard() for placement in self.placements)

    def first(self) -> tuple[int, ...]:
        """Return the offsets in the full tensor at which this rank's part starts."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if any(type(placement) not in (Shard, Replicate) for placement in self.placements):
            raise ShardError(
                f"a parameter {self.describe()} is no rectangle on each rank, and checkpoints are made of those. Place "
                "it with Shard(dim) or Replicate()."
            )
        return tuple(compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)[1])

    def wrap(self, local: torch.Tensor) -> DTensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `whole`: a DTensor, or a full tensor with the same values on the entire mesh."""
        from torch.distributed.tensor import DTensor, Replicate

        if isinstance(whole, DTensor):
            return whole.redistribute(self.mesh, self.placements).to_local()
        everywhere = DTensor.from_local(whole, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return everywhere.redistribute(placements=self.placements).to_local()

    def describe(self) -> str:
        return f"of {'×'.join(map(str, self.shape))} as {', '.join(map(str, self.placements))}"


def boxes_in_whole(part: Sequence[int], parallel: MeshPlacements | None, start: int, end: int) -> list[Box]:
    """Return the elements [start, end) of this rank's flattened part, of shape `part`, as boxes of the parameter."""
    boxes = boxes_of(part, start, end)
    if parallel is None:
        return list(boxes)
    first = parallel.first()
    return [replace(box, offsets=tuple(map(sum, zip(box.offsets, first, strict=True)))) for box in boxes]


def parallel_of(parameter: nn.Parameter) -> MeshPlacements | None:
    """Return mesh and placements of `parameter` if it is a DTensor, otherwise None."""
    # Decided without importing DTensor, which takes up to a second.
    if type(parameter) is nn.Parameter:
        return None
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return None
    return MeshPlacements(parameter.device_mesh, tuple(parameter.placements), parameter.shape, parameter.stride())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of `tensor` if it is a DTensor parameter, otherwise `tensor` itself."""
    parallel = isinstance(tensor, nn.Parameter) and parallel_of(tensor) is not None
    placed: Any = tensor
    return placed.detach().to_local() if parallel else tensor


@dataclass(frozen=True, slots=True)
class TensorParallelMesh:
    """The tensor-parallel mesh of a model's DTensors, over which norms are combined, too. Without any, no groups."""

    groups: tuple[dist.ProcessGroup, ...] = ()
    coordinate: tuple[int, ...] = ()

    def copies(self, parallel: MeshPlacements | None) -> list[dist.ProcessGroup]:
        """Return the process groups of the mesh whose ranks hold the same part of a parameter."""
        if parallel is None:
            return list(self.groups)
        placed = zip(self.groups, parallel.placements, strict=True)
        return [group for group, placement in placed if placement.is_replicate()]

    def counts(self, parallel: MeshPlacements | None) -> bool:
        """Return whether this rank's copy counts in norms. A plain parameter is replicated on the entire mesh."""
        if parallel is None:
            return not any(self.coordinate)
        split = (placement.is_shard() for placement in parallel.placements)
        return not any(at for at, is_split in zip(self.coordinate, split, strict=True) if not is_split)


def mesh_of(parameters: list[MeshPlacements]) -> TensorParallelMesh:
    """Return the mesh of a model's DTensors, which all share one."""
    if not parameters:
        return TensorParallelMesh()
    mesh = parameters[0].mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds no DTensor on it"
    return TensorParallelMesh(tuple(mesh.get_all_groups()), tuple(coordinate))
