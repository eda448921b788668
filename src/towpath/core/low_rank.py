"""Matrices that travel as products of two thin ones (PowerSGD, Optimus-CC), in elements.

Of a matrix X of `rows` × `columns` there are P (rows × rank, orthonormal) and Q (columns × rank), so that P Qᵀ is near
X. One starts from the last Q, and adds what P Qᵀ has missed to what is sent next: so the codec has to know the matrix's
shape, and keeps state. From one rank to another P and Q travel in one message. A sum over ranks takes two: P, which all
must have before they can make their parts of Q, and Q.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from towpath.core.units import BucketSpec
from towpath.errors import StrategyError

LOW_RANK = "low-rank"


@dataclass(frozen=True, slots=True)
class LowRank:
    """`rank`: how many columns P and Q have. What they do not make `rate` times smaller travels as it is."""

    rank: int
    rate: float = 1.0

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise StrategyError(f"LowRank: rank is a whole number of at least 1; got {self.rank!r}.")
        if not 1 <= self.rate < float("inf"):
            raise StrategyError(f"LowRank: rate is a number of at least 1; got {self.rate!r}.")

    @staticmethod
    def parse(text: str) -> LowRank:
        match = re.fullmatch(rf"{LOW_RANK}:(\d+)(?:\+rate:(\d+(?:\.\d+)?))?", text)
        if match is None:
            raise StrategyError(
                f"not a codec: {text!r}. Write '{LOW_RANK}:' and the rank, as in '{LOW_RANK}:16', and if need be by how many "
                f"times the factors must be smaller to be worth while: '{LOW_RANK}:16+rate:2'."
            )
        return LowRank(int(match[1]), float(match[2] or 1))

    def __str__(self) -> str:
        return f"{LOW_RANK}:{self.rank}" + (f"+rate:{self.rate:g}" if self.rate != 1 else "")

    def pays(self, shape: Sequence[int]) -> bool:
        """Whether P and Q are smaller than what they stand for; else that travels as it is."""
        rows, columns = matrix_of(shape)
        return self.rank * (rows + columns) * self.rate < rows * columns

    def encoded_elements(self, shape: Sequence[int]) -> int:
        """Of one message."""
        return self.rank * sum(matrix_of(shape)) if self.pays(shape) else prod(shape)

    def kept_elements(self, shape: Sequence[int], feedback: bool) -> int:
        """What the sender keeps: Q, and with `feedback` what was missed."""
        if not self.pays(shape):
            return 0
        return self.rank * matrix_of(shape)[1] + (prod(shape) if feedback else 0)


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """As which matrix a tensor is seen: all dimensions but the last are rows."""
    *rows, columns = shape or (1,)
    return prod(rows), columns


@dataclass(frozen=True, slots=True)
class Matrix:
    """`rows` × `columns` elements of a flat buffer, from `start` on."""

    start: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Factored:
    """How the sum of a flat buffer over ranks travels: of `matrices` their factors, of the rest, which lies from start
    to end of each of `plain`, what is there. The first message has P and the rest, the second Q."""

    codec: LowRank
    matrices: tuple[Matrix, ...]
    plain: tuple[tuple[int, int], ...]

    @staticmethod
    def of(codec: LowRank, bucket: BucketSpec) -> Factored | None:
        """Nothing, where none of its parameters gets smaller."""
        matrices: list[Matrix] = []
        plain: list[tuple[int, int]] = []
        for start, numel, shape in zip(bucket.offsets, bucket.numels, bucket.matrices, strict=False):
            if shape is not None and codec.pays(shape):
                matrices.append(Matrix(start, *shape))
            else:
                plain.append((start, start + numel))
        return Factored(codec, tuple(matrices), tuple(plain)) if matrices else None

    @property
    def messages(self) -> tuple[int, int]:
        """Elements of each."""
        rank = self.codec.rank
        first = rank * sum(m.rows for m in self.matrices) + sum(end - start for start, end in self.plain)
        return first, rank * sum(m.columns for m in self.matrices)

    @property
    def elements(self) -> int:
        """Of the matrices."""
        return sum(m.rows * m.columns for m in self.matrices)

    def kept_elements(self, feedback: bool) -> int:
        """What each rank keeps: Q, and with `feedback` what its messages have missed."""
        return self.messages[1] + (self.elements if feedback else 0)
