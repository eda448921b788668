"""What a model is to a schedule: units, and in each unit one flat buffer (bucket) per dtype and trainability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from towpath.core.formats import SMALLEST_BLOCK, Codec, item_bytes

# Each parameter starts on 16 elements (32 bytes or more), so that vector loads stay aligned in every dtype; where a
# codec encodes them, on a block.
PARAMETER_ALIGNMENT = 16
# Each slice of a cut is a multiple of this many elements, 64 bytes of bf16.
SLICE_ALIGNMENT = 32


# Elements. In messages of smaller units, starting one takes about as long as the bytes it carries.
SMALL_UNIT = 1 << 20
# How many units small ones are made into at least: while one of them computes, others travel.
FEWEST_UNITS = 3


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def overlap(offset: int, numel: int, cut: int, slot: int) -> tuple[int, int]:
    """Which elements [start, end) of a parameter that begins at `offset` lie in slice `slot` of length `cut`."""
    low = slot * cut - offset
    return min(max(low, 0), numel), min(max(low + cut, 0), numel)


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """The parameters of a unit that lie in one flat buffer: one dtype, all trainable or all frozen.

    `exact`: they compute and travel in their own dtype, whatever the precision. `matrices`: by parameter, its rows and
    columns, if its gradient may travel in low rank; or nothing, of none of them.
    """

    numels: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    exact: bool = False
    alignment: int = PARAMETER_ALIGNMENT
    matrices: tuple[tuple[int, int] | None, ...] = ()

    def __post_init__(self) -> None:
        item_bytes(self.dtype)  # refuses a dtype that cannot travel
        assert len(self.matrices) in (0, len(self.numels))

    @property
    def name(self) -> str:
        return self.dtype + (" exact" if self.exact else "") + ("" if self.trainable else " frozen")

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts; one more entry than parameters: the end of the last."""
        return (0, *accumulate(round_up(n, self.alignment) for n in self.numels))

    def padded(self, slices: int) -> int:
        """The length of the flat buffer when its finest cut has `slices` slices."""
        return round_up(max(self.offsets[-1], 1), slices * max(SLICE_ALIGNMENT, self.alignment))

    def in_blocks(self, codecs: Sequence[Codec], slices: int) -> BucketSpec:
        """So laid out that no block of `codecs` spans parameters or slices: a small parameter beside a large one would
        else be rounded to nothing.

        All begin at a multiple of the largest block. Where parameters are short, padding costs more than scales: of all
        powers of two up to that block, it is the one with which what travels is shortest.
        """
        largest = max((codec.grain for codec in codecs), default=1)
        if largest == 1:
            return self

        def travelling(spec: BucketSpec) -> int:
            return sum(codec.within(spec.alignment).encoded_bytes(spec.padded(slices)) for codec in codecs)

        halved = range(largest.bit_length() - 1, SMALLEST_BLOCK.bit_length() - 2, -1)
        return min((replace(self, alignment=1 << power) for power in halved), key=travelling)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Parameters that are gathered together. A `kept` unit (the root) stays gathered from forward to backward."""

    name: str
    buckets: tuple[BucketSpec, ...]
    kept: bool = False


def together(elements: Sequence[int]) -> list[list[int]]:
    """Which neighbouring units become one, so that their messages travel together: as many as stay small, and are no
    more than the largest unit or a third of all.
    """
    room = min(max(*elements, sum(elements) // FEWEST_UNITS, 0), SMALL_UNIT)
    batches: list[list[int]] = []
    filled = room
    for i, count in enumerate(elements):
        if filled + count <= room:
            batches[-1].append(i)
            filled += count
        else:
            batches.append([i])
            filled = count
    return batches


def units_from_numels(numels: Sequence[int] | Mapping[str, int], dtype: str = "float32") -> tuple[UnitSpec, ...]:
    """Units of the given sizes, in forward order; in a mapping the name "" is the root unit."""
    named = numels if isinstance(numels, Mapping) else {str(i): n for i, n in enumerate(numels)}
    units = [UnitSpec(name, (BucketSpec((n,), dtype),), kept=name == "") for name, n in named.items()]
    return tuple(sorted(units, key=lambda u: not u.kept))
