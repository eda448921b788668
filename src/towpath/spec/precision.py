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
    `keep`: modules that compute in their own dtype all the same, as norms with running statistics want: their classes,
    the classes' names, or the modules' names. Their inputs are cast to it, and their outputs back.
    """

    params: Any = None
    reduce: Any = None
    keep: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        keep = (self.keep,) if isinstance(self.keep, (str, type)) else self.keep
        object.__setattr__(self, "keep", tuple(map(_kept_name, keep)))
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
