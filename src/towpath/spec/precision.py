"""In which dtypes weights and gradients travel and compute, while the user keeps the masters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from towpath.errors import StrategyError
from towpath.spec.formats import FLOATING, dtype_name


@dataclass(frozen=True, slots=True)
class Precision:
    """`params`: what is gathered and computes; `reduce`: what gradients are summed in.

    Torch dtypes or their names. None keeps the parameter's own dtype (`params`), or the dtype it is
    computed in (`reduce`). The user's parameters and `.grad` keep the model's own dtype: they are the masters.
    """

    params: Any = None
    reduce: Any = None

    def __post_init__(self) -> None:
        for field in ("params", "reduce"):
            value = getattr(self, field)
            if value is None:
                continue
            name = dtype_name(value)
            if name not in FLOATING:
                raise StrategyError(
                    f"Precision({field}={value}): expected one of {', '.join(FLOATING)}, or None for the model's own."
                )
            object.__setattr__(self, field, name)

    def compute_dtype(self, own: str) -> str:
        return self.params or own

    def reduce_dtype(self, own: str) -> str:
        return self.reduce or self.compute_dtype(own)
