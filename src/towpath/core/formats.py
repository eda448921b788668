"""What travels, in bytes: the size of an element of each dtype, and what each codec makes of n elements.

A message of a block codec is its scales (float32, one a block), then its codes, in one piece of memory:

    int8, int4      scale = max|x| / 127 or 7; code = x / scale, rounded to nearest (or at random, fairly)
    e4m3, e5m2      scale = max|x| / 448 or 57344; code = x / scale as an 8-bit float
    bf16            x as bfloat16, without scales
    of your own     as `towpath.codecs.register` was told: a scale for each block, and a code of 1, 2, 4 or 8 bits
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import ceil

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

# What codecs take: they compute in float32.
ENCODED = ("float32", "bfloat16", "float16")

FLOATING = ("bfloat16", "float16", "float32", "float64")


def item_bytes(dtype: str) -> int:
    try:
        return _ITEM_BYTES[dtype]
    except KeyError:
        raise StrategyError(
            f"dtype {dtype!r} cannot travel; parameters may be {', '.join(FLOATING)}. "
            "Keep tensors of other dtypes in buffers, or convert them before shard()."
        ) from None


def wide(dtype: str) -> str:
    """In which what is of `dtype` is computed with, where sums must not lose anything."""
    return "float32" if dtype in NARROW else dtype


def dtype_name(dtype: object) -> str:
    """'float32' for torch.float32 and for 'float32': dtypes by name, so that torch stays out of here."""
    return str(dtype).removeprefix("torch.")


# Bits of a code, and the largest one in use; of registered codecs only their own functions know the largest.
_CODES: dict[str, tuple[int, float | None]] = {
    "bf16": (16, None),
    "int8": (8, 127.0),
    "int4": (4, 7.0),
    "e4m3": (8, 448.0),
    "e5m2": (8, 57344.0),
}
CODECS = tuple(_CODES)  # those that Towpath has itself
_registered: dict[str, int] = {}  # bits of a code
CODE_BITS = (1, 2, 4, 8)  # of registered codecs: whole codes in each byte
SCALE_BYTES = 4

WHOLE = "whole"  # as a block: all elements of a message share one scale
SMALLEST_BLOCK, _LARGEST_BLOCK = 32, 4096
_DEFAULT_BLOCK = 256
ROTATED = 32  # elements that a rotation mixes


def add_format(name: str, bits: int) -> None:
    """Make `name` a codec of blocks. What computes it is registered beside it (`codecs/registered.py`)."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in (*CODECS, "none"):
        raise StrategyError(
            f"codec {name!r}: expected a name of small letters, digits and underscores that is not one of "
            f"{', '.join(CODECS)}, none."
        )
    if bits not in CODE_BITS:
        raise StrategyError(f"codec {name!r}: a code has {', '.join(map(str, CODE_BITS))} bits; got {bits!r}.")
    if _registered.get(name, bits) != bits:
        raise StrategyError(f"codec {name!r} is registered already, with codes of {_registered[name]} bits.")
    _registered[name] = bits


def registered_formats() -> dict[str, int]:
    """Of each registered codec the bits of a code."""
    return dict(_registered)


def codec_names() -> tuple[str, ...]:
    return (*CODECS, *_registered)


@dataclass(frozen=True, slots=True)
class Codec:
    """How the elements of a message are written. As text: 'int4:64+hadamard+stochastic', 'int8', 'int8:whole', 'bf16'.

    `block`: how many elements share a scale (0: all of the message's). `stochastic`: round up with the probability that
    keeps the mean. `hadamard`: rotate each 32 elements first, so that one large value does not cost the others' bits.
    """

    name: str
    block: int = _DEFAULT_BLOCK
    hadamard: bool = False
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.name not in codec_names():
            raise StrategyError(f"Codec: unknown codec {self.name!r}; known are {', '.join(codec_names())}.")
        if type(self.block) is not int:
            raise StrategyError(f"Codec: block is a whole number of elements, or 0 for all; got {self.block!r}.")
        if self.block and not (SMALLEST_BLOCK <= self.block <= _LARGEST_BLOCK and self.block & (self.block - 1) == 0):
            raise StrategyError(
                f"Codec: a block has {SMALLEST_BLOCK} to {_LARGEST_BLOCK} elements, a power of two, "
                f"or is {WHOLE!r}; got {self.block}."
            )
        if self.stochastic and self.name not in ("int8", "int4"):
            raise StrategyError(f"Codec: stochastic rounding is for int8 and int4, not for {self.name}.")
        if self.name == "bf16" and (self.hadamard or self.block != _DEFAULT_BLOCK):
            raise StrategyError("Codec: bf16 has no scales: it takes neither a block nor a rotation.")

    @staticmethod
    def parse(text: str) -> Codec:
        match = re.fullmatch(r"(\w+)(?::(\w+))?((?:\+\w+)*)", text)
        options = match[3].split("+")[1:] if match else []
        block = (match[2] or str(_DEFAULT_BLOCK)) if match else ""
        known = len({"hadamard", "stochastic"}.intersection(options)) == len(options)  # and none is there twice
        if match is None or not (block.isdecimal() or block == WHOLE) or not known:
            raise StrategyError(
                f"not a codec: {text!r}. Write its name ({', '.join(codec_names())}), and if need be its block and "
                f"options: 'int4:64+hadamard+stochastic', 'int8:{WHOLE}'."
            )
        number = 0 if block == WHOLE else int(block)
        if block != WHOLE and number == 0:
            raise StrategyError(f"not a codec: {text!r}: a block of no elements.")
        return Codec(match[1], number, "hadamard" in options, "stochastic" in options)

    def __str__(self) -> str:
        block = "" if self.name == "bf16" else f":{self.block or WHOLE}"
        return self.name + block + "+hadamard" * self.hadamard + "+stochastic" * self.stochastic

    @property
    def largest(self) -> float | None:
        """The largest code; None for a codec without scales, and for one that is registered."""
        return _CODES[self.name][1] if self.name in _CODES else None

    @property
    def scaled(self) -> bool:
        """Whether each block has a scale."""
        return self.name != "bf16"

    @property
    def bits(self) -> int:
        """Of a code."""
        return _CODES[self.name][0] if self.name in _CODES else _registered[self.name]

    @property
    def grain(self) -> int:
        """What is encoded is cut at multiples of this many elements: no cut changes which ones share a block."""
        return self.block if self.block and self.scaled else 1

    def within(self, alignment: int) -> Codec:
        """In blocks that do not span parameters which begin at multiples of `alignment` elements."""
        return replace(self, block=min(self.block, alignment)) if self.grain > 1 else self

    def scales(self, elements: int) -> int:
        if not self.scaled or elements == 0:
            return 0
        return ceil(elements / self.block) if self.block else 1

    def encoded_bytes(self, elements: int) -> int:
        """Of one message."""
        return SCALE_BYTES * self.scales(elements) + ceil(elements * self.bits / 8)
