"""Safetensors files, written and read tensor by tensor, so that no file is ever in memory as a whole.

A file has eight bytes with the length of its header, the header, and the bytes of the tensors. The header is JSON: for
each name the dtype, the shape, and where the bytes are. Each byte belongs to one tensor. If a model has several files,
an index names the file of each tensor. Files may come from strangers, so headers are checked.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from towpath.checkpoint.manifest import TORCH_DTYPES, StoredBox, StoredFile, StoredTensor, check_shape, gap
from towpath.checkpoint.safe_open import (
    MAX_INT,
    MAX_JSON_BYTES,
    Check,
    DamagedError,
    WrongFieldError,
    file_next_to,
    fill,
    hub_file,
    integers,
    map_of,
    one_of,
    parse_json,
    read_json,
    reading,
    record,
    shown,
    size_of,
    table,
    wrong,
)
from towpath.errors import CheckpointError

DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
INDEX = "model.safetensors.index.json"

_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_CHUNK_BYTES = 8 << 20  # small enough to be in a cache when the checksum is computed


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """Return the name of `dtype` in safetensors files, or raise CheckpointError that names the tensor `what`."""
    if dtype not in DTYPES:
        raise CheckpointError(f"{what} is {dtype}, which safetensors files cannot hold: cast it before it is saved.")
    return DTYPES[dtype]


def empty(shape: Sequence[int], dtype: torch.dtype, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return an uninitialized tensor of a size that a checkpoint demands, or raise DamagedError.

    Sizes are checked against the files, but a file can be sparse and larger than all memory.
    """
    try:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        raise DamagedError(f"{name} has shape {list(shape)}, for which there is no memory ({error}).") from error


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor, or a box of one, that is written into a file."""

    name: str
    dtype: str
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The size in bytes."""
        return prod(self.sizes) * TORCH_DTYPES[self.dtype].itemsize


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries in the order of their bytes in a file. Wider elements come first, so that all are aligned."""
    return sorted(entries, key=lambda e: (-TORCH_DTYPES[e.dtype].itemsize, e.name))


class FileWriter:
    """Writes a safetensors file: a header of `entries`, then their bytes in the same order.

    Call `write` for each entry, then `close`. Call `abandon` in any case.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: dict[str, str]) -> None:
        header = self._header(entries, metadata)
        self._path, self._bytes = path, len(header) + sum(e.bytes for e in entries)
        self._header_bytes, self._header_crc32 = len(header), zlib.crc32(header)
        self._file = path.open("xb", buffering=0)
        self.at = 0
        try:
            self._put(memoryview(header))
        except OSError:
            self._file.close()
            raise

    @staticmethod
    def _header(entries: Sequence[Entry], metadata: dict[str, str]) -> bytes:
        described: dict[str, object] = {_METADATA: metadata} if metadata else {}
        end = 0
        for entry in entries:
            if entry.name in described or entry.name == _METADATA:
                raise CheckpointError(
                    f"{entry.name!r} cannot be the name of a tensor here: safetensors files have it taken."
                )
            start, end = end, end + entry.bytes
            described[entry.name] = {"dtype": entry.dtype, "shape": list(entry.sizes), "data_offsets": [start, end]}
        header = json.dumps(described, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _LENGTH_BYTES)
        return len(header).to_bytes(_LENGTH_BYTES, "little") + header

    def write(self, data: memoryview) -> int:
        """Write the bytes of the next entry, or a part of them. Return their CRC-32."""
        crc = 0
        for start in range(0, len(data), _CHUNK_BYTES):
            part = data[start : start + _CHUNK_BYTES]
            crc = zlib.crc32(part, crc)
            self._put(part)
        return crc

    def _put(self, data: memoryview) -> None:
        self.at += len(data)
        put(self._file, data)

    def close(self) -> StoredFile:
        """Wait until the file is on the disk, and return what a manifest says of it."""
        assert self.at == self._bytes, (self._path, self.at, self._bytes)
        os.fsync(self._file.fileno())
        self._file.close()
        return StoredFile(self._bytes, self._header_bytes, self._header_crc32)

    def abandon(self) -> None:
        """Close the file if it is open."""
        self._file.close()


def put(file: BinaryIO, data: memoryview) -> None:
    """Write all of `data`. A raw file may write less in one call."""
    while data:
        data = data[file.write(data) :]


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Raise CheckpointError with `path` for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror}).") from error


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor in a file, from its byte `start` on."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        """The size in bytes."""
        return prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize


_ENTRY = record(dtype=one_of(TORCH_DTYPES), shape=integers(), data_offsets=integers(2))


def read_header(file: FileIO, path: Path) -> dict[str, HeaderEntry]:
    """Return the tensors of a safetensors file by name, or raise DamagedError if the header does not fit the file."""
    size = size_of(file)
    if size < _LENGTH_BYTES:
        raise DamagedError(f"{path} has {size} bytes; expected a safetensors file, which has 8 and more.")
    prefix = bytearray(_LENGTH_BYTES)
    fill(file, path, 0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > min(size - _LENGTH_BYTES, MAX_JSON_BYTES):
        raise DamagedError(
            f"{path} (header): its length is {length:,} bytes in a file of {size:,}; expected at most "
            f"{MAX_JSON_BYTES:,}, and less than the file."
        )
    data = bytearray(length)
    fill(file, path, _LENGTH_BYTES, memoryview(data))
    where = f"{path} (header)"
    base = _LENGTH_BYTES + length

    def entry(value: object) -> HeaderEntry:
        found = _ENTRY(value)
        check_shape(found["shape"], TORCH_DTYPES[found["dtype"]].itemsize)
        start, end = found["data_offsets"]
        entry = HeaderEntry(found["dtype"], found["shape"], base + start)
        if end - start != entry.bytes or end > MAX_INT - base:
            expected = f"{entry.bytes:,} bytes, as {entry.dtype} of {list(entry.shape)} takes"
            raise wrong("data_offsets", [start, end], expected)
        return entry

    def member(name: str) -> Check:
        return table if name == _METADATA else entry

    try:
        held = map_of(member)(parse_json(data, where))
    except WrongFieldError as error:
        raise error.of(where) from None
    held.pop(_METADATA, None)
    at = gap(((tensor.start, tensor.start + tensor.bytes) for tensor in held.values()), base, size)
    if at is not None:
        raise DamagedError(
            f"{where}: data_offsets do not hold each of the {size - base:,} bytes after it once: see byte "
            f"{at - base:,}. Is the file whole?"
        )
    return held


def read_index(folder: Path) -> dict[str, list[str]]:
    """Return the names of the files that the index in `folder` names, and the tensors to take from each."""
    path = folder / INDEX
    try:
        index = record(weight_map=table)(read_json(hub_file(path), "an index of safetensors"))
    except WrongFieldError as error:
        raise error.of(f"{path} is not an index of safetensors") from None
    if not index["weight_map"]:
        raise DamagedError(f"{path} is not an index of safetensors: its weight_map is empty.")
    found: dict[str, list[str]] = {}
    for name, file in index["weight_map"].items():
        found.setdefault(file_next_to(folder, file, f"{path} (weight_map[{shown(name)}])").name, []).append(name)
    return found


def check_names(names: Iterable[str], held: Mapping[str, HeaderEntry], path: Path) -> None:
    """Raise DamagedError unless the file at `path` holds the tensors that the index next to it says."""
    absent = next((name for name in names if name not in held), None)
    if absent is not None:
        raise DamagedError(f"{path.parent / INDEX}: {absent} is to be in {path.name}, which does not hold it.")


def take(path: Path, start: int, into: memoryview) -> None:
    """Fill `into` with the bytes of a file from byte `start` on."""
    with reading(path) as file:
        fill(file, path, start, into)


def checksum(path: Path, start: int, count: int, receive: Callable[[memoryview], object]) -> int:
    """Return the CRC-32 of `count` bytes of a file from byte `start` on. `receive` is called with each part of them."""
    crc, buffer = 0, memoryview(bytearray(min(count, _CHUNK_BYTES)))
    with reading(path) as file:
        for at in range(start, start + count, _CHUNK_BYTES):
            part = buffer[: start + count - at]
            fill(file, path, at, part)
            crc = zlib.crc32(part, crc)
            receive(part)
    return crc


def corrupted(folder: Path, box: StoredBox, name: str) -> str:
    """Return the message for a box of the tensor `name` with a wrong checksum."""
    return f"{folder / box.file} is corrupted: {name} is not what was written."


def full_tensor(folder: Path, name: str, stored: StoredTensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """Read a tensor of a checkpoint and check its bytes. `into` is a contiguous tensor to fill, if given."""
    full = into if into is not None else empty(stored.shape, TORCH_DTYPES[stored.dtype], name)
    for box in stored.boxes:
        first = stored.first_element(box)
        part = full.view(-1)[first : first + box.numel] if first is not None else empty(box.sizes, full.dtype, name)
        data = bytes_of(part)
        take(folder / box.file, box.start, data)
        if zlib.crc32(data) != box.crc32:
            raise DamagedError(corrupted(folder, box, name))
        if first is None:
            full[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] = part
    return full


# --- checksums of parts -----------------------------------------------------------------------------------------------
#
# Several ranks may read parts of one box. The CRC-32 of the box follows from those of its parts:
#
#     crc(a + b) = (crc(a) · x^(8·len(b)) mod p) xor crc(b)
#
# These are polynomials over two elements, and p is the polynomial of CRC-32. Bits are reversed, as everywhere in zlib.

_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000  # x^0


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two parts, one after the other, from the CRC-32 of each."""
    return _times(_shift(second_bytes), first) ^ second


def _times(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _shift(count_bytes: int) -> int:
    """Return x^(8·count) mod p."""
    result, square = _ONE, _times(_ONE >> 4, _ONE >> 4)  # x^8
    while count_bytes:
        if count_bytes & 1:
            result = _times(result, square)
        square = _times(square, square)
        count_bytes >>= 1
    return result
