"""In which dtypes weights and gradients travel, compute and are summed, while the user keeps the masters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from towpath.core.formats import FLOATING, NARROW, dtype_name, item_bytes
from towpath.errors import StrategyError

_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}


# Protocols, because torch is not imported here.


class TorchDtype(Protocol):
    """A `torch.dtype`."""

    is_floating_point: bool
    itemsize: int


class MixedPrecisionPolicy(Protocol):
    """FSDP2's `torch.distributed.fsdp.MixedPrecisionPolicy`."""

    @property
    def param_dtype(self) -> TorchDtype | None: ...
    @property
    def reduce_dtype(self) -> TorchDtype | None: ...
    @property
    def output_dtype(self) -> TorchDtype | None: ...
    @property
    def cast_forward_inputs(self) -> bool: ...


DtypeName = Literal[
    "bf16", "fp16", "fp32", "fp64", "half", "float", "double", "bfloat16", "float16", "float32", "float64"
]
Dtype = DtypeName | TorchDtype


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

    params: str | None = None
    reduce: str | None = None
    accumulate: str | None = "float32"
    keep: tuple[str, ...] = ()

    if TYPE_CHECKING:  # what may be passed; the fields then hold names

        def __init__(
            self,
            params: Dtype | None = None,
            reduce: Dtype | None = None,
            accumulate: Dtype | None = "float32",
            keep: str | type | Sequence[str | type] = (),
        ) -> None: ...

    @staticmethod
    def of(given: Precision | Dtype | MixedPrecisionPolicy | None) -> Precision:
        """Return what `shard(precision=)` stands for: a dtype is that of `params`, and so is FSDP2's `param_dtype`."""
        if given is None or isinstance(given, Precision):
            return given or Precision()
        policy: Any = given
        if type(policy).__name__ == "MixedPrecisionPolicy":
            _check_policy(policy)
            return Precision(policy.param_dtype, policy.reduce_dtype)
        if _full_name(policy) not in FLOATING:
            raise StrategyError(
                f"precision={given!r}: expected the dtype to compute in, such as torch.bfloat16 or 'bf16', a "
                "towpath.Precision, or FSDP2's MixedPrecisionPolicy. The dtypes are "
                f"{', '.join(FLOATING)}."
            )
        return Precision(policy)

    def __post_init__(self) -> None:
        keep: Any = self.keep
        keep = (keep,) if isinstance(keep, (str, type)) else keep
        object.__setattr__(self, "keep", tuple(map(_kept_name, keep)))
        for field in ("params", "reduce", "accumulate"):
            value = getattr(self, field)
            if value is None:
                continue
            name = _full_name(value)
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


def _full_name(dtype: object) -> str:
    name = dtype_name(dtype)
    return _SHORT.get(name, name)


def _check_policy(policy: MixedPrecisionPolicy) -> None:
    """Raise for what FSDP2 would do and a sharded model does not."""
    if policy.output_dtype is not None:
        raise StrategyError(
            f"precision=MixedPrecisionPolicy(output_dtype={policy.output_dtype}): a sharded model does not cast its "
            "outputs. Leave output_dtype out, and cast where you use the output, as in "
            f"model(x).to({policy.output_dtype})."
        )
    if policy.param_dtype is not None and not policy.cast_forward_inputs:
        raise StrategyError(
            f"precision=MixedPrecisionPolicy(param_dtype={policy.param_dtype}, cast_forward_inputs=False): each unit "
            "casts its floating inputs to the dtype it computes in. Leave cast_forward_inputs out. To keep the dtype "
            "of an input, pass it inside a list or a dict, which are handed on as they are."
        )


def _kept_name(module: Any) -> str:
    if isinstance(module, type):
        return f"{module.__module__}.{module.__qualname__}"
    if not isinstance(module, str):
        raise StrategyError(
            f"Precision(keep=({module!r},)): expected module classes, their names, or names of modules."
        )
    return module
