"""What travels, in bytes: the size of an element of each dtype."""

from __future__ import annotations

from towpath.errors import StrategyError

_ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "uint8": 1,
}

# Their sums are taken in float32: a narrow sum loses what is small against it.
NARROW = ("bfloat16", "float16")

FLOATING = ("bfloat16", "float16", "float32", "float64")


def item_bytes(dtype: str) -> int:
    try:
        return _ITEM_BYTES[dtype]
    except KeyError:
        raise StrategyError(
            f"dtype {dtype!r} cannot travel; parameters may be {', '.join(FLOATING)}. "
            "Keep tensors of other dtypes in buffers, or convert them before shard()."
        ) from None


def dtype_name(dtype: object) -> str:
    """'float32' for torch.float32 and for 'float32': dtypes by name, so that torch stays out of here."""
    return str(dtype).removeprefix("torch.")
