"""Parameters that are split over a tensor-parallel mesh besides: of such a DTensor, its local part is what we shard.

DTensor costs a second to import, so that happens only for a model that has some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from towpath.engine.boxes import Box, boxes_of
from towpath.errors import ShardTensorError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


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
