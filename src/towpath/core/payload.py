"""What a transfer moves."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Range:
    """Of a bucket's parameters, or of their gradients: as much as one group shares.

    `factored`: the elements of the matrices of which it has factors, instead of what they are. `encoded`: each rank's
    part rests in the wire's codec, and is sent as it rests.
    """

    unit: str
    bucket: str
    elements: int
    dtype: str
    factored: int = 0
    encoded: bool = False

    def __str__(self) -> str:
        return f"{self.unit or 'root'} [{self.bucket}]" if self.bucket else "all units"


@dataclass(frozen=True, slots=True)
class Activation:
    """Of one micro-batch, what a pipeline stage hands to the next: an output; or, on its way back, its gradient."""

    stage: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def unit(self) -> str:
        return f"stage {self.stage}"

    @property
    def bucket(self) -> str:
        return ""

    def __str__(self) -> str:
        return f"{self.unit} [{' × '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter that one rank of each copy of the optimizer states steps whole: the one that holds slice `owner`.

    `pieces`: by slice, in order, how many of its elements lie there.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[int, ...]
    owner: int

    @property
    def numel(self) -> int:
        return sum(self.pieces)

    @property
    def stays(self) -> bool:
        """Whether its owner holds all of it, and none of it travels."""
        return self.pieces[self.owner] == self.numel

    def bounds(self, slot: int) -> tuple[int, int]:
        """Which of its elements lie in that slice."""
        start = sum(self.pieces[:slot])
        return start, start + self.pieces[slot]


@dataclass(frozen=True, slots=True)
class Matrices:
    """Whole parameters, or their gradients, as their slices travel between the ranks that hold these and the owners."""

    matrices: tuple[Matrix, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Those at their owners from the start among them."""
        return sum(matrix.numel for matrix in self.matrices)

    @property
    def unit(self) -> str:
        return ", ".join(matrix.name for matrix in self.matrices)

    @property
    def bucket(self) -> str:
        return ""

    def __str__(self) -> str:
        return self.unit


Payload = Range | Activation | Matrices
