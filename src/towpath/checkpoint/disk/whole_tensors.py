"""A whole tensor from its boxes in a checkpoint, for those who have no ranks."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

from towpath.checkpoint.disk import files
from towpath.checkpoint.disk.safe_open import DamagedError
from towpath.checkpoint.disk.stored import Stored, StoredBox


def whole_tensor(folder: Path, name: str, stored: Stored, into: torch.Tensor | None = None) -> torch.Tensor:
    """Read and checked. `into`: a contiguous tensor of its shape and dtype, to be filled."""
    whole = into if into is not None else files.empty(stored.shape, files.TORCH_DTYPES[stored.dtype], name)
    data = files.bytes_of(whole)
    for box in stored.boxes:
        place = stored.place(box)
        if place is not None:
            _read(folder, name, box, data[place * stored.itemsize : (place + box.numel) * stored.itemsize])
            continue
        rectangle = files.empty(box.sizes, whole.dtype, name)
        _read(folder, name, box, files.bytes_of(rectangle))
        whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] = rectangle
    return whole


def _read(folder: Path, name: str, box: StoredBox, into: memoryview) -> None:
    files.take(folder / box.file, box.start, into)
    if zlib.crc32(into) != box.crc32:
        raise DamagedError(f"{folder / box.file} is corrupted: {name} is not what was written.")
