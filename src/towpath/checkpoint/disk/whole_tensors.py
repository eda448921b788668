"""A whole tensor from its boxes in a checkpoint, for those who have no ranks."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

from towpath.checkpoint.disk import files
from towpath.checkpoint.disk.safe_open import DamagedError
from towpath.checkpoint.disk.stored import Stored


def whole_tensor(folder: Path, name: str, stored: Stored, into: torch.Tensor | None = None) -> torch.Tensor:
    """Read and checked. `into`: a contiguous tensor of its shape and dtype, to be filled."""
    whole = into if into is not None else files.empty(stored.shape, files.TORCH_DTYPES[stored.dtype], name)
    data = files.bytes_of(whole)
    for box in stored.boxes:
        start = stored.position(box) * stored.itemsize
        part = data[start : start + box.numel * stored.itemsize]
        files.take(folder / box.file, box.start, part)
        if zlib.crc32(part) != box.crc32:
            raise DamagedError(f"{folder / box.file} is corrupted: {name} is not what was written.")
    return whole
