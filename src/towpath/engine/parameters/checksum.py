"""A checksum of a tensor that a device computes in one pass, to compare values between ranks."""

from __future__ import annotations

import torch

_COLUMNS = 1021
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on each bit of a flat tensor, and on the order of the bits."""
    # The tensor is read once, as a matrix whose columns are summed. Work on the sums takes negligible time. The number
    # of columns is prime, so that a column does not match a dimension of a parameter. The number of rows is odd, so
    # that equal changes in all rows do not cancel.
    width = next(width for width in _INTEGERS if values.nbytes % width == 0 and width >= values.element_size())
    words = values.view(_INTEGERS[width])
    rows = words.numel() // _COLUMNS
    rows -= rows > 0 and rows % 2 == 0
    matrix, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    sums = torch.cat([matrix.sum(0, dtype=torch.int64), rest.long()])
    weights = torch.arange(1, 2 * sums.numel(), 2, device=sums.device)
    return ((sums ^ (sums >> 29)) * weights).sum()
