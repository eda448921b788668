"""In which dtypes weights and gradients travel, compute and are summed, while the user keeps the masters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from towpath.core.formats import FLOATING, NARROW, dtype_name, item_bytes
from towpath.errors import StrategyError


@dataclass(frozen=True, slots=True)
class Precision:
    """`params`: what is gathered and computes; `reduce`: what gradients travel in; `accumulate`: what the sum over
    micro-steps is kept in.

    Torch dtypes or their names. None keeps the parameter's own dtype (`params`), the dtype it is computed in
    (`reduce`), or the dtype it travels in (`accumulate`). A sum is never kept in fewer bytes than it travels in: with
    gradients of float64 it is float64. The user's parameters and `.grad` keep the model's own dtype: they are the
    masters.
    `keep`: modules that compute in their own dtype all the same, as norms with running statistics want: their classes,
    the classes' names, or the modules' names. Their inputs are cast to it, and their outputs back.
    """

    params: Any = None
    reduce: Any = None
    accumulate: Any = "float32"
    keep: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        keep = (self.keep,) if isinstance(self.keep, (str, type)) else self.keep
        object.__setattr__(self, "keep", tuple(map(_kept_name, keep)))
        for field in ("params", "reduce", "accumulate"):
            value = getattr(self, field)
            if value is None:
                continue
            name = dtype_name(value)
            if name not in FLOATING:
                raise StrategyError(
                    f"Precision({field}={value}): expected one of {', '.join(FLOATING)}, or None for the model's own."
                )
            object.__setattr__(self, field, name)
        if self.accumulate in NARROW and self.reduce not in (None, self.accumulate):
            raise StrategyError(
                f"Precision(reduce={self.reduce}, accumulate={self.accumulate}): the sum over micro-steps would lose "
                f"what has travelled. Pass accumulate={self.reduce}, or a wider dtype."
            )

    def compute_dtype(self, own: str) -> str:
        return self.params or own

    def reduce_dtype(self, own: str) -> str:
        return self.reduce or self.compute_dtype(own)

    def accumulate_dtype(self, own: str) -> str:
        reduce, wanted = self.reduce_dtype(own), self.accumulate
        return wanted if wanted is not None and item_bytes(wanted) > item_bytes(reduce) else reduce

    def dtypes(self, own: str) -> tuple[str, str, str]:
        """In which parameters of the dtype `own` compute, and their gradients travel and are accumulated."""
        return self.compute_dtype(own), self.reduce_dtype(own), self.accumulate_dtype(own)

    def keeps(self, name: str, kind: type) -> bool:
        """Whether the module `name`, of class `kind`, stays in its own dtype."""
        lowers = self.params is not None or self.reduce is not None
        names = {name, *(c.__name__ for c in kind.__mro__), *map(_kept_name, kind.__mro__)}
        return lowers and not names.isdisjoint(self.keep)


def _kept_name(module: Any) -> str:
    if isinstance(module, type):
        return f"{module.__module__}.{module.__qualname__}"
    if not isinstance(module, str):
        raise StrategyError(
            f"Precision(keep=({module!r},)): expected module classes, their names, or names of modules."
        )
    return module
