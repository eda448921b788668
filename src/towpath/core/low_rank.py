"""A matrix that travels as the product of two thin ones (PowerSGD, Optimus-CC), in bytes.

Of a matrix X of `rows` × `columns` the sender makes P (rows × rank, orthonormal) and Q (columns × rank), so that P Qᵀ
is near X. Both travel in one message, in the dtype of X. The sender starts from its last Q, and adds what P Qᵀ has
missed to what it sends next: so the codec has to know the matrix's shape, and keeps state.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from towpath.errors import StrategyError

NAME = "low-rank"


@dataclass(frozen=True, slots=True)
class LowRank:
    """`rank`: how many columns P and Q have."""

    rank: int

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise StrategyError(f"LowRank: rank is a whole number of at least 1; got {self.rank!r}.")

    @staticmethod
    def parse(text: str) -> LowRank:
        match = re.fullmatch(rf"{NAME}:(\d+)", text)
        if match is None:
            raise StrategyError(f"not a codec: {text!r}. Write '{NAME}:' and the rank, as in '{NAME}:16'.")
        return LowRank(int(match[1]))

    def __str__(self) -> str:
        return f"{NAME}:{self.rank}"

    def pays(self, shape: Sequence[int]) -> bool:
        """Whether P and Q are smaller than what they stand for; else that travels as it is."""
        rows, columns = matrix_of(shape)
        return self.rank * (rows + columns) < rows * columns

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
