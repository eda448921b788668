"""Exact transport: values in fewer bytes, and the same bits. Which transfers use it, and what it saves.

A parameter sync sends differences to the values that its receivers hold. Reductions send exponents relative to the
largest of their block. Both are lossless, so a strategy with exact transports trains as the same strategy without them,
to the bit. `codecs/exact/` encodes and decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from towpath.core.formats import CELL_ALIGNMENT, item_bytes
from towpath.core.routes import Form, Grid, Op

# The dtypes that can be encoded exactly. Others are sent as they are.
EXACT = ("bfloat16", "float16", "float32")

# Smaller regions are sent as they are: the time of their messages is mostly latency.
SMALLEST_BYTES = 1 << 16

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


def coding_of(op: Op, grid: Grid, elements: int, dtype: str, form: Form) -> Coding | None:
    """Return how an exact transport encodes a collective, or None if it is sent as it is.

    Only what crosses nodes is encoded. Collectives of the backend add values, so they can only gather encoded ones.
    """
    large = elements * item_bytes(dtype) >= SMALLEST_BYTES
    gathers_equal_slices = op is Op.ALL_GATHER and elements % (grid.nodes * grid.width) == 0
    if not (form is Form.MESSAGES or gathers_equal_slices) or grid.nodes == 1 or dtype not in EXACT or not large:
        return None
    # The only all-gather that can be exact is a parameter sync.
    return Coding(DIFFERENCES if op is Op.ALL_GATHER else VALUES, dtype)


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
