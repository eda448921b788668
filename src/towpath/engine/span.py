"""Which elements of a parameter a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from towpath.core.units import overlap
from towpath.engine.parallel import Parallel
from towpath.engine.partial_sums import Replica


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Which elements of a tensor each rank holds: the part of it that lies in the rank's cut of the flat buffer.

    Compared by identity: two ShardTensors match element by element only if they carry the same Span.
    """

    shape: torch.Size  # of what lies in the flat buffer: the tensor, or its part on a tensor-parallel mesh
    offset: int  # of the tensor in the flat buffer
    cut: int  # length of a slice of the flat buffer
    slot: int  # which slice of the flat buffer this rank holds
    replica: Replica
    parallel: Parallel | None = None
    counts: bool = True  # in norms and sums; of what is the same on a whole mesh, only one copy does
    holders: tuple[int, ...] = ()  # the ranks that hold the same slice, this one among them
    name: str = ""  # of the parameter
    unit: str = ""  # whose forward it is whole in; the root's has no name

    def __deepcopy__(self, memo: dict[int, Any]) -> Span:
        """Return itself: a copy of the tensor holds the same elements, and a process group cannot be copied."""
        return self

    @property
    def whole_shape(self) -> torch.Size:
        return self.shape if self.parallel is None else self.parallel.shape

    def counted(self, local: torch.Tensor) -> torch.Tensor:
        return local if self.counts else local[:0]

    def bounds(self, slot: int | None = None) -> tuple[int, int]:
        """The elements [start, end) of the flattened tensor that the holder of `slot` has."""
        return overlap(self.offset, self.shape.numel(), self.cut, self.slot if slot is None else slot)

    def describe(self) -> str:
        start, end = self.bounds()
        return (
            f"parameter {self.name!r} of shape {tuple(self.whole_shape)} in unit {self.unit or 'root'!r}, of which "
            f"rank {self.replica.rank} holds the elements [{start}:{end}]"
        )

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a tensor of the whole shape."""
        start, end = self.bounds()
        return (whole if self.parallel is None else self.parallel.part_of(whole)).reshape(-1)[start:end]

    def in_cut(self) -> tuple[int, int]:
        """The same elements, as positions in this rank's cut."""
        start, end = self.bounds()
        base = self.slot * self.cut - self.offset
        return (start - base, end - base) if end > start else (0, 0)
