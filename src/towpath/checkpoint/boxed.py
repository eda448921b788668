"""A whole tensor from its boxes in a checkpoint, for those who have no ranks."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

from towpath.checkpoint import files
from towpath.checkpoint.manifest import Stored
from towpath.errors import CheckpointError


def whole_tensor(folder: Path, name: str, stored: Stored, into: torch.Tensor | None = None) -> torch.Tensor:
    """Read and checked. `into`: a contiguous tensor of its shape and dtype, to be filled."""
    dtype = files.TORCH_DTYPES[stored.dtype]
    whole = into if into is not None else torch.empty(stored.shape, dtype=dtype)
    if sum(box.numel for box in stored.boxes) != whole.numel():
        raise CheckpointError(f"{folder}: {name} is not whole in it.")
    for box in stored.boxes:
        place = whole
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            place = place.narrow(dim, offset, size)
        buffer = place if place.is_contiguous() else torch.empty(box.sizes, dtype=dtype)
        data = files.bytes_of(buffer)
        files.take(folder / box.file, box.start, data)
        if zlib.crc32(data) != box.crc32:
            raise CheckpointError(f"{folder / box.file} is corrupted: {name} is not what was written.")
        if buffer is not place:
            place.copy_(buffer)
    return whole
