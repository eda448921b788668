"""Parameters that are split over a tensor-parallel mesh besides: of such a DTensor, its local part is what we shard.

DTensor costs a second to import, so that happens only for a model that has some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from towpath.errors import ShardTensorError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


# --- boxes ------------------------------------------------------------------------------------------------------------
#
# A slice of a flattened tensor as boxes of the tensor's own shape, which is what checkpoints are made of.
#
# Elements [start, end) of a tensor of n dimensions are at most 2n − 1 boxes, none of them empty: the rest of a row
# that has begun, whole rows, the beginning of another row; and so on inside each of the two broken rows.


@dataclass(frozen=True, slots=True)
class Box:
    """`sizes` elements from `offsets` on, which are the elements [start, end) of the flattened tensor; of one that is a
    part of another, whose `offsets` these are, of the flattened part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    end: int


def boxes_of(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The elements [start, end) of a flattened tensor of `shape`, in order."""
    if start >= end:
        return
    if not shape:
        yield Box((), (), 0, 1)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows
    if first > last:  # inside one row
        yield from _inside(shape, start, end)
        return
    if start < first * row:
        yield from _inside(shape, start, first * row)
    if first < last:
        rest = tuple(shape[1:])
        yield Box((first, *(0 for _ in rest)), (last - first, *rest), first * row, last * row)
    if last * row < end:
        yield from _inside(shape, last * row, end)


def _inside(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Elements of one row."""
    row = prod(shape[1:])
    index = start // row
    for box in boxes_of(shape[1:], start - index * row, end - index * row):
        yield Box((index, *box.offsets), (1, *box.sizes), index * row + box.start, index * row + box.end)


def ranges_of(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The elements of a box of a tensor of `shape`, in order, as ranges [start, end) of the flattened tensor."""
    # From here on the box has all of each dimension: what it has of the one before follows one another.
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


# --- dcp chunks -------------------------------------------------------------------------------------------------------
#
# This rank's boxes of a ShardTensor, in the words of torch.distributed.checkpoint (DCP).


def chunks_of(boxes: Sequence[Box]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in boxes]


def write_items(fqn: str, local: torch.Tensor, shape: torch.Size, boxes: Sequence[Box]) -> list[WriteItem]:
    """`local`: this rank's elements of the tensor of `shape`."""
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, shape),
        )
        for chunk in chunks_of(boxes)
    ]


def box_at(index: MetadataIndex, local: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
    """Return the box that begins at the index's offsets: a view of `local`, which holds the elements of `boxes`."""
    box = next((b for b in boxes if b.offsets == tuple(index.offset or ())), None)
    if box is None:
        raise ShardTensorError(f"{index.fqn}: this rank has no box that begins at {index.offset}. Plan the load anew.")
    start = box.start - boxes[0].start
    return local[start : start + box.end - box.start].view(box.sizes)


class SentShard(torch.Tensor):
    """A ShardTensor in another process, which has none of its process groups: DCP can save it, and no more.

    `dcp.async_save` sends it there with `async_checkpointer_type=AsyncCheckpointerType.PROCESS`.
    """

    _local: torch.Tensor
    _boxes: Sequence[Box]

    @staticmethod
    def __new__(cls: type[SentShard], shape: torch.Size, local: torch.Tensor, boxes: Sequence[Box]) -> SentShard:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made._local, made._boxes = local, boxes
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is done in __new__."""

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return write_items(fqn, self._local, self.shape, self._boxes)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return box_at(index, self._local, self._boxes)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ShardTensorError(
            f"{func}: a ShardTensor that was sent to another process can only be saved there. Send to_local(), or let "
            "every rank call full_tensor() and send that."
        )


@dataclass(frozen=True, slots=True, eq=False)
class Parallel:
    """How a parameter lies on its tensor-parallel mesh: as the DTensor did that `shard` was given."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size  # of the whole tensor
    stride: tuple[int, ...]

    @property
    def ranks(self) -> list[int]:
        """Of the mesh, as the whole job counts them."""
        return self.mesh.mesh.flatten().tolist()

    @property
    def is_split(self) -> bool:
        """Whether no two ranks of the mesh hold the same part."""
        return all(placement.is_shard() for placement in self.placements)

    def first(self) -> tuple[int, ...]:
        """The element of the whole tensor that this rank's part begins with."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if any(type(placement) not in (Shard, Replicate) for placement in self.placements):
            raise ShardTensorError(
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
        """This rank's part of a tensor that is whole and alike on every rank of the mesh."""
        from torch.distributed.tensor import DTensor, Replicate

        if isinstance(whole, DTensor):
            return whole.redistribute(self.mesh, self.placements).to_local()
        everywhere = DTensor.from_local(whole, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return everywhere.redistribute(placements=self.placements).to_local()

    def part_of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Autograd may leave a gradient placed otherwise, as a partial sum for instance."""
        placed: Any = gradient
        return placed.redistribute(placements=self.placements).to_local()

    def describe(self) -> str:
        return f"of {'×'.join(map(str, self.shape))} as {', '.join(map(str, self.placements))}"


def boxes_in_whole(part: Sequence[int], parallel: Parallel | None, start: int, end: int) -> list[Box]:
    """The elements [start, end) of this rank's `part` of a parameter, flattened, as boxes of the whole parameter."""
    boxes = boxes_of(part, start, end)
    if parallel is None:
        return list(boxes)
    first = parallel.first()
    return [replace(box, offsets=tuple(map(sum, zip(box.offsets, first, strict=True)))) for box in boxes]


def parallel_of(parameter: nn.Parameter) -> Parallel | None:
    """How `parameter` lies on its mesh, if it is a DTensor."""
    if type(parameter) is nn.Parameter:
        return None
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return None
    return Parallel(parameter.device_mesh, tuple(parameter.placements), parameter.shape, parameter.stride())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What of `tensor` lies on this rank: all of it, unless it is a DTensor."""
    parallel = isinstance(tensor, nn.Parameter) and parallel_of(tensor) is not None
    placed: Any = tensor
    return placed.detach().to_local() if parallel else tensor


@dataclass(frozen=True, slots=True)
class Mesh:
    """The mesh of a model's DTensors: norms are combined over it too, and what is replicated on it counts once."""

    groups: tuple[dist.ProcessGroup, ...] = ()
    coordinate: tuple[int, ...] = ()

    def copies(self, parallel: Parallel | None) -> list[dist.ProcessGroup]:
        """The groups whose ranks have the same of a parameter."""
        if parallel is None:
            return list(self.groups)
        placed = zip(self.groups, parallel.placements, strict=True)
        return [group for group, placement in placed if placement.is_replicate()]

    def counts(self, parallel: Parallel | None) -> bool:
        """Whether this rank's copy is the one that counts. A plain parameter is the same on the whole mesh."""
        if parallel is None:
            return not any(self.coordinate)
        split = (placement.is_shard() for placement in parallel.placements)
        return not any(at for at, is_split in zip(self.coordinate, split, strict=True) if not is_split)


def mesh_of(parameters: list[Parallel]) -> Mesh:
    if not parameters:
        return Mesh()
    mesh = parameters[0].mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds no DTensor on it"
    return Mesh(tuple(mesh.get_all_groups()), tuple(coordinate))
