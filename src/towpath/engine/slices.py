"""What of flat memory is a rank's own."""

from __future__ import annotations

import torch

from towpath.core.transitions import Cut


def slice_of(whole: torch.Tensor, cut: Cut, rank: int) -> torch.Tensor:
    """This rank's slice of `cut`."""
    return whole.view(cut.count, -1)[cut.slots[rank]]


def slice_within(outer: torch.Tensor, cut: Cut, inner: Cut, rank: int) -> torch.Tensor:
    """The part of `outer`, this rank's slice of `cut`, that is its slice of `inner`, cut as fine or finer."""
    ratio = inner.count // cut.count
    return outer.view(ratio, -1)[inner.slots[rank] % ratio]
