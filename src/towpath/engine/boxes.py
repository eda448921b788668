"""A slice of a flattened tensor as boxes of the tensor's own shape, which is what checkpoints are made of.

Elements [start, end) of a tensor of n dimensions are at most 2n − 1 boxes, none of them empty: the rest of a row that
has begun, whole rows, the beginning of another row; and so on inside each of the two broken rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """`sizes` elements from `offsets` on, which are the elements [start, end) of the flattened tensor; of one that is a
    part of another, whose `offsets` these are, of the flattened part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    end: int


def boxes_of(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The elements [start, end) of a flattened tensor of `shape`, in order."""
    if start >= end:
        return
    if not shape:
        yield Box((), (), 0, 1)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows
    if first > last:  # inside one row
        yield from _inside(shape, start, end)
        return
    if start < first * row:
        yield from _inside(shape, start, first * row)
    if first < last:
        rest = tuple(shape[1:])
        yield Box((first, *(0 for _ in rest)), (last - first, *rest), first * row, last * row)
    if last * row < end:
        yield from _inside(shape, last * row, end)


def _inside(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Elements of one row."""
    row = prod(shape[1:])
    index = start // row
    for box in boxes_of(shape[1:], start - index * row, end - index * row):
        yield Box((index, *box.offsets), (1, *box.sizes), index * row + box.start, index * row + box.end)


def ranges_of(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The elements of a box of a tensor of `shape`, in order, as ranges [start, end) of the flattened tensor."""
    # From here on the box has all of each dimension: what it has of the one before follows one another.
    rest = next((dim for dim in range(len(shape), 0, -1) if box.sizes[dim - 1] != shape[dim - 1]), 0)
    if rest == 0:
        yield 0, prod(shape)
        return
    row = prod(shape[rest:])
    places = [range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)]
    for index in product(*places[: rest - 1]):
        first = 0
        for at, length in zip((*index, box.offsets[rest - 1]), shape[:rest], strict=True):
            first = first * length + at
        yield first * row, (first + box.sizes[rest - 1]) * row
