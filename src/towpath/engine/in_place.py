"""A tensor in a narrower dtype and back, in its own memory: a sum that travels needs no second buffer.

Element i is read at its old place and written at its new one, nearer to the start or further from it. Taken in spans
that double, no span is written over what has yet to be read, and a copy of any length is some thirty launches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


def narrowed(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of a contiguous 1-D tensor, rounded to `dtype`, where it begins. It holds nothing else afterwards."""
    if dtype == wide.dtype:
        return wide
    assert dtype.itemsize < wide.dtype.itemsize, (dtype, wide.dtype)
    narrow = wide.view(dtype)[: wide.numel()]
    for start, end in _spans(wide.numel()):
        narrow[start:end].copy_(_apart(wide, start, end))
    return narrow


def widen(narrow: torch.Tensor, wide: torch.Tensor) -> None:
    """Write the values of `narrow`, a slice of what `narrowed` gave, to `wide`, the same slice of what it was given."""
    if narrow.dtype != wide.dtype:
        for start, end in reversed(list(_spans(wide.numel()))):
            wide[start:end].copy_(_apart(narrow, start, end))


def _spans(elements: int) -> Iterator[tuple[int, int]]:
    """[0, 1), [1, 2), [2, 4), [4, 8) and so on."""
    start, end = 0, 1
    while start < elements:
        yield start, min(end, elements)
        start, end = end, 2 * end


def _apart(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """The first element alone is written where it is read."""
    return tensor[start:end].clone() if start == 0 else tensor[start:end]
