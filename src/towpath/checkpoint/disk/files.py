"""One file of a checkpoint: safetensors, written and read box by box, so that nobody ever holds a file in memory."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from towpath.checkpoint.disk.safe_open import DamagedError, fill, reading
from towpath.checkpoint.disk.stored import BYTES_OF, File
from towpath.errors import CheckpointError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

_METADATA = "__metadata__"
_AT_ONCE = 8 << 20  # bytes between two looks at the checksum: they are still in a cache then


def dtype_name(dtype: torch.dtype, what: str) -> str:
    if dtype not in DTYPES:
        raise CheckpointError(f"{what} is {dtype}, which safetensors files cannot hold: cast it before it is saved.")
    return DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor, or a box of one, in a file."""

    name: str
    dtype: str
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.sizes) * BYTES_OF[self.dtype]


def header_of(entries: Sequence[Entry], metadata: dict[str, str]) -> bytes:
    """What a safetensors file begins with. `entries` in order: those of wider elements first, to lie aligned."""
    table: dict[str, object] = {_METADATA: metadata} if metadata else {}
    end = 0
    for entry in entries:
        if entry.name in table or entry.name == _METADATA:
            raise CheckpointError(
                f"{entry.name!r} cannot be the name of a tensor here: safetensors files have it taken."
            )
        start, end = end, end + entry.bytes
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.sizes), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda e: (-BYTES_OF[e.dtype], e.name))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class FileWriter:
    """Writes `entries` one after the other; `close()` makes them durable and says what was written."""

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: dict[str, str]) -> None:
        header = header_of(entries, metadata)
        self._path, self._bytes = path, len(header) + sum(e.bytes for e in entries)
        self._header_bytes, self._header_crc32 = len(header), zlib.crc32(header)
        self._file = path.open("xb", buffering=0)
        self.at = 0
        try:
            self._put(memoryview(header))
        except OSError:
            self._file.close()
            raise

    def write(self, data: memoryview) -> int:
        """Its CRC-32."""
        crc = 0
        for start in range(0, len(data), _AT_ONCE):
            part = data[start : start + _AT_ONCE]
            crc = zlib.crc32(part, crc)
            self._put(part)
        return crc

    def _put(self, data: memoryview) -> None:
        self.at += len(data)
        put(self._file, data)

    def close(self) -> File:
        assert self.at == self._bytes, (self._path, self.at, self._bytes)
        os.fsync(self._file.fileno())
        self._file.close()
        return File(self._bytes, self._header_bytes, self._header_crc32)

    def abandon(self) -> None:
        self._file.close()


def put(file: BinaryIO, data: memoryview) -> None:
    """All of `data`: a raw file may take less at once."""
    while data:
        data = data[file.write(data) :]


def take(path: Path, start: int, into: memoryview) -> None:
    """Fill `into` from the bytes of a file, from `start` on."""
    with reading(path) as file:
        fill(file, path, start, into)


def checksum(path: Path, start: int, count: int, told: Callable[[memoryview], object]) -> int:
    """The CRC-32 of `count` bytes of a file from `start` on; each part of them is shown to `told`."""
    crc, buffer = 0, memoryview(bytearray(min(count, _AT_ONCE)))
    with reading(path) as file:
        for at in range(start, start + count, _AT_ONCE):
            part = buffer[: start + count - at]
            fill(file, path, at, part)
            crc = zlib.crc32(part, crc)
            told(part)
    return crc


def empty(shape: Sequence[int], dtype: torch.dtype, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """For what a checkpoint says is so large. A file may be of holes, and larger than all memory."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        raise DamagedError(f"{name} has shape {list(shape)}, for which there is no memory ({error}).") from error


@contextmanager
def writing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror}).") from error
