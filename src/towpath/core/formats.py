"""The dtypes and codecs of transfers, and the number of bytes that their elements take.

A message of a block codec contains its scales (float32, one per block) and then its codes, in contiguous memory:

    int8, int4      scale = max|x| / 127 or 7; code = x / scale, rounded to nearest, or stochastically
    e4m3, e5m2      scale = max|x| / 448 or 57344; code = x / scale as an 8-bit float
    bf16            x as bfloat16, without scales
    registered      as given to `towpath.codecs.register`: a scale per block, and a code of 1, 2, 4 or 8 bits

`Precision` says in which dtypes parameters compute, and gradients are reduced and accumulated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from towpath.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

# Collectives send integers and pipeline stages masks, too. Parameters are floating (`BucketSpec`).
_ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

# Sums of these dtypes are computed in float32. A sum in a narrow dtype would lose small terms.
NARROW = ("bfloat16", "float16")

# Codecs accept these dtypes. They compute in float32.
ENCODED = ("float32", "bfloat16", "float16")

FLOATING = ("bfloat16", "float16", "float32", "float64")


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype that can be sent."""
    return _ITEM_BYTES[dtype]


def wide(dtype: str) -> str:
    """Return the dtype for computations on values of `dtype` that must not lose precision."""
    return "float32" if dtype in NARROW else dtype


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape for a message, such as 4×8."""
    return "×".join(map(str, shape)) or "scalar"


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype: 'float32' for both torch.float32 and 'float32'. This avoids an import of torch."""
    return str(dtype).removeprefix("torch.")


# The values are the bits of a code and the largest code. For registered codecs, only their own functions know the
# largest.
_CODES: dict[str, tuple[int, float | None]] = {
    "bf16": (16, None),
    "int8": (8, 127.0),
    "int4": (4, 7.0),
    "e4m3": (8, 448.0),
    "e5m2": (8, 57344.0),
}
CODECS = tuple(_CODES)  # built-in codecs
_registered: dict[str, int] = {}  # bits of a code, by name of a registered codec
CODE_BITS = (1, 2, 4, 8)  # allowed for registered codecs, so that no code spans two bytes
SCALE_BYTES = 4

# Cells of the wire buffer start at multiples of these bytes. Backends copy bytes one by one where messages start
# elsewhere. Large cells fill whole lines of a GPU's memory.
CELL_ALIGNMENT, _LARGE_CELL_ALIGNMENT = 16, 128
_LARGE_CELL_BYTES = 8192

WHOLE = "whole"  # this block size lets all elements of a message share one scale
SMALLEST_BLOCK, _LARGEST_BLOCK = 32, 4096
_DEFAULT_BLOCK = 256
ROTATED = 32  # number of elements that a rotation mixes


def add_format(name: str, bits: int) -> None:
    """Add `name` to the codecs of blocks. `codecs/kernels/plain.py` registers the functions that compute it."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in (*CODECS, "none"):
        raise ConfigError(
            f"codec {name!r}: expected a name of small letters, digits and underscores that is not one of "
            f"{', '.join(CODECS)}, none."
        )
    if bits not in CODE_BITS:
        raise ConfigError(f"codec {name!r}: a code has {', '.join(map(str, CODE_BITS))} bits; got {bits!r}.")
    if _registered.get(name, bits) != bits:
        raise ConfigError(f"codec {name!r} is registered already, with codes of {_registered[name]} bits.")
    _registered[name] = bits


def registered_formats() -> dict[str, int]:
    """Return the bits of a code for each registered codec."""
    return dict(_registered)


def codec_names() -> tuple[str, ...]:
    return (*CODECS, *_registered)


@dataclass(frozen=True, slots=True)
class Codec:
    """The format in which the elements of a message are written.

    As text it is for example 'int4:64+hadamard+stochastic', 'int8', 'int8:whole' or 'bf16'.
    """

    name: str
    # How many elements share a scale. With 0, all elements of a message share one.
    block: int = _DEFAULT_BLOCK
    # Rotate each 32 elements before encoding. A single large value then costs the other elements less precision.
    hadamard: bool = False
    # Round up with a probability that preserves the mean. Available for int8 and int4.
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.name not in codec_names():
            raise ConfigError(f"Codec: unknown codec {self.name!r}; known are {', '.join(codec_names())}.")
        if type(self.block) is not int:
            raise ConfigError(f"Codec: block is a whole number of elements, or 0 for all; got {self.block!r}.")
        if self.block and not (SMALLEST_BLOCK <= self.block <= _LARGEST_BLOCK and self.block & (self.block - 1) == 0):
            raise ConfigError(
                f"Codec: a block has {SMALLEST_BLOCK} to {_LARGEST_BLOCK} elements, a power of two, "
                f"or is {WHOLE!r}; got {self.block}."
            )
        if self.stochastic and self.name not in ("int8", "int4"):
            raise ConfigError(f"Codec: stochastic rounding is for int8 and int4, not for {self.name}.")
        if self.name == "bf16" and (self.hadamard or self.block != _DEFAULT_BLOCK):
            raise ConfigError("Codec: bf16 has no scales: it takes neither a block nor a rotation.")

    @staticmethod
    def parse(text: str) -> Codec:
        """Return the codec that `text` names. Raise ConfigError if it names none."""
        match = re.fullmatch(r"(\w+)(?::(\w+))?((?:\+\w+)*)", text)
        options = match[3].split("+")[1:] if match else []
        block = (match[2] or str(_DEFAULT_BLOCK)) if match else ""
        known = len({"hadamard", "stochastic"}.intersection(options)) == len(options)  # also refuses duplicates
        if match is None or not (block.isdecimal() or block == WHOLE) or not known:
            raise ConfigError(
                f"not a codec: {text!r}. Write its name ({', '.join(codec_names())}), and if need be its block and "
                f"options: 'int4:64+hadamard+stochastic', 'int8:{WHOLE}'."
            )
        number = 0 if block == WHOLE else int(block)
        if block != WHOLE and number == 0:
            raise ConfigError(f"not a codec: {text!r}: a block of no elements.")
        return Codec(match[1], number, "hadamard" in options, "stochastic" in options)

    def __str__(self) -> str:
        block = "" if self.name == "bf16" else f":{self.block or WHOLE}"
        return self.name + block + "+hadamard" * self.hadamard + "+stochastic" * self.stochastic

    @property
    def largest(self) -> float | None:
        """The largest code. None for a codec without scales, and for a registered codec."""
        return _CODES[self.name][1] if self.name in _CODES else None

    @property
    def scaled(self) -> bool:
        """True if each block has a scale."""
        return self.name != "bf16"

    @property
    def bits(self) -> int:
        return _CODES[self.name][0] if self.name in _CODES else _registered[self.name]

    @property
    def grain(self) -> int:
        """Encoded buffers are cut only at multiples of this many elements, so that no cut splits a block."""
        return self.block if self.block and self.scaled else 1

    def within(self, alignment: int) -> Codec:
        """Return the codec with blocks no longer than `alignment`, so that no block spans two parameters."""
        return replace(self, block=min(self.block, alignment)) if self.grain > 1 else self

    def scales(self, elements: int) -> int:
        if not self.scaled or elements == 0:
            return 0
        return ceil(elements / self.block) if self.block else 1

    def encoded_bytes(self, elements: int) -> int:
        return SCALE_BYTES * self.scales(elements) + ceil(elements * self.bits / 8)

    def cell_bytes(self, elements: int) -> int:
        """Return the size on the wire of a message of `elements` elements, rounded up to the alignment of cells."""
        nbytes = self.encoded_bytes(elements)
        alignment = cell_alignment(nbytes)
        return ceil(nbytes / alignment) * alignment


def cell_alignment(nbytes: int) -> int:
    """Return the bytes that the starts of cells of `nbytes` bytes are a multiple of."""
    return _LARGE_CELL_ALIGNMENT if nbytes >= _LARGE_CELL_BYTES else CELL_ALIGNMENT


_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}


class TorchDtype(Protocol):
    """The part of a `torch.dtype` that this package reads. It is a protocol, because torch is not imported here."""

    is_floating_point: bool
    itemsize: int


DtypeName = Literal[
    "bf16", "fp16", "fp32", "fp64", "half", "float", "double", "bfloat16", "float16", "float32", "float64"
]
Dtype = DtypeName | TorchDtype


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a sharded model, given as torch dtypes or their names.

    The user's parameters and `.grad` keep the model's own dtype. They are the masters.

    Attributes:
        params: The dtype in which parameters are gathered and compute. None keeps each parameter's own dtype.
        reduce: The dtype in which gradients are sent. None uses the dtype of the computation.
        accumulate: The dtype of the sum over micro-steps. None uses the dtype in which gradients are sent. A sum never
            uses fewer bytes than that: for float64 gradients it is float64.
        keep: Modules that compute in their own dtype all the same, such as norms with running statistics. Give classes,
            names of classes, or names of modules. Their inputs are cast to that dtype, and their outputs back.
    """

    params: str | None = None
    reduce: str | None = None
    accumulate: str | None = "float32"
    keep: tuple[str, ...] = ()

    if TYPE_CHECKING:  # the argument types; `__post_init__` converts them to names

        def __init__(
            self,
            params: Dtype | None = None,
            reduce: Dtype | None = None,
            accumulate: Dtype | None = "float32",
            keep: str | type | Sequence[str | type] = (),
        ) -> None: ...

    @staticmethod
    def of(given: Precision | Dtype | MixedPrecisionPolicy | None) -> Precision:
        """Return the precision that an argument `shard(precision=)` stands for.

        A single dtype becomes `params`. FSDP2's policy gives `params` and `reduce`.

        Raises:
            ConfigError: If the argument is no such value, or the policy requires what a sharded model does not do.
        """
        if given is None or isinstance(given, Precision):
            return given or Precision()
        policy: Any = given
        if type(policy).__name__ == "MixedPrecisionPolicy":
            if policy.output_dtype is not None:
                raise ConfigError(
                    f"precision=MixedPrecisionPolicy(output_dtype={policy.output_dtype}): a sharded model does not "
                    "cast its outputs. Leave output_dtype out, and cast where you use the output, as in "
                    f"model(x).to({policy.output_dtype})."
                )
            if policy.param_dtype is not None and not policy.cast_forward_inputs:
                raise ConfigError(
                    f"precision=MixedPrecisionPolicy(param_dtype={policy.param_dtype}, cast_forward_inputs=False): "
                    "each unit casts its floating inputs to the dtype it computes in. Leave cast_forward_inputs out. "
                    "To keep the dtype of an input, pass it inside a list or a dict, which are handed on as they are."
                )
            return Precision(policy.param_dtype, policy.reduce_dtype)
        if _full_name(policy) not in FLOATING:
            raise ConfigError(
                f"precision={given!r}: expected the dtype to compute in, such as torch.bfloat16 or 'bf16', a "
                f"towpath.Precision, or FSDP2's MixedPrecisionPolicy. The dtypes are {', '.join(FLOATING)}."
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
                raise ConfigError(
                    f"Precision({field}={value}): expected one of {', '.join(FLOATING)}, or None for the model's own."
                )
            object.__setattr__(self, field, name)
        if self.accumulate in NARROW and self.reduce not in (None, self.accumulate):
            raise ConfigError(
                f"Precision(reduce={self.reduce}, accumulate={self.accumulate}): the sum over micro-steps would lose "
                f"what was sent. Pass accumulate={self.reduce}, or a wider dtype."
            )

    def compute_dtype(self, own: str) -> str:
        """Return the dtype in which a parameter of the dtype `own` computes."""
        return self.params or own

    def dtypes(self, own: str) -> tuple[str, str, str]:
        """Return the compute, reduce and accumulate dtypes of a parameter of the dtype `own`."""
        compute, wanted = self.compute_dtype(own), self.accumulate
        reduce = self.reduce or compute
        wider = wanted is not None and item_bytes(wanted) > item_bytes(reduce)
        return compute, reduce, wanted if wanted is not None and wider else reduce

    def keeps(self, name: str, kind: type) -> bool:
        """Return whether the module `name`, of class `kind`, computes in its own dtype."""
        lowers = self.params is not None or self.reduce is not None
        names = {name, *(c.__name__ for c in kind.__mro__), *map(_kept_name, kind.__mro__)}
        return lowers and not names.isdisjoint(self.keep)


def _full_name(dtype: object) -> str:
    name = dtype_name(dtype)
    return _SHORT.get(name, name)


def _kept_name(module: Any) -> str:
    if isinstance(module, type):
        return f"{module.__module__}.{module.__qualname__}"
    if not isinstance(module, str):
        raise ConfigError(f"Precision(keep=({module!r},)): expected module classes, their names, or names of modules.")
    return module


# Exact transport: values in fewer bytes, and the same bits. A parameter sync sends differences to the values that its
# receivers hold. Reductions send exponents relative to the largest of their block. Both are lossless: a strategy with
# exact transports trains as the same strategy without them, to the bit. `codecs/exact/` encodes and decodes.

# The dtypes that can be encoded exactly. Others are sent as they are.
EXACT = ("bfloat16", "float16", "float32")

# A message has a header, and a table with an entry for each block.
HEADER_BYTES, BLOCK, ENTRY_BYTES = 40, 512, 4

# The names of the two exact codecs. A parameter sync sends differences, and reductions send values.
DIFFERENCES, VALUES = "exact differences", "exact values"

# The expected bits of an element: about those of a GPT that trained on text (benchmarks/LOG.md). Those of float16 and
# float32 are estimates.
_EXPECTED_BITS = {
    DIFFERENCES: {"bfloat16": 5.0, "float16": 7.0, "float32": 18.0},
    VALUES: {"bfloat16": 11.5, "float16": 14.0, "float32": 27.4},
}


class Coding(NamedTuple):
    """An encoding whose messages are as long as their values need: the exact codec, and the dtype of the values."""

    codec: str
    dtype: str

    @property
    def share(self) -> float:
        """The expected bytes of its messages, as a share of their values."""
        return _EXPECTED_BITS[self.codec][self.dtype] / (8 * item_bytes(self.dtype))


# The names of measured shares in the metrics of a run, such as "exact_values_bfloat16", with their codings.
METRICS = {f"{codec.replace(' ', '_')}_{dtype}": Coding(codec, dtype) for codec in _EXPECTED_BITS for dtype in EXACT}


def in_bits(shares: Mapping[tuple[str, str], float]) -> str:
    """Return shares as text: 'differences of bfloat16 take 5 of 16 bits'."""
    found: list[str] = []
    for (codec, dtype), share in sorted(shares.items()):
        bits = 8 * item_bytes(dtype)
        found.append(f"{codec.removeprefix('exact ')} of {dtype} take {share * bits:.3g} of {bits} bits")
    return ", ".join(found)


def message_bound(elements: int, dtype: str) -> int:
    """Return the bytes of the longest message that `elements` elements can become, a multiple of 8."""
    longest = HEADER_BYTES + ENTRY_BYTES * ceil(elements / BLOCK) + elements * item_bytes(dtype)
    return ceil(longest / 8) * 8


def message_cell(elements: int, dtype: str) -> int:
    """Return the bytes of a cell of the wire buffer for a message of `elements` elements."""
    return ceil(message_bound(elements, dtype) / CELL_ALIGNMENT) * CELL_ALIGNMENT
