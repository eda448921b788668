"""Safetensors files of others: nothing that a header says is believed before it fits the file.

A file is eight bytes with the length of its header, the header (JSON: for each name its dtype, its shape and where its
bytes lie), and the bytes, of which each belongs to one tensor. Several files have an index beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

from towpath.checkpoint.disk.fields import MAX_INT, WrongFieldError, integers, member, table, text, wrong
from towpath.checkpoint.disk.safe_open import (
    MAX_JSON_BYTES,
    DamagedError,
    beside,
    fill,
    hub_file,
    parse_json,
    read_json,
    shown,
    size_of,
)
from towpath.checkpoint.disk.stored import BYTES_OF, check_shape, gap

INDEX = "model.safetensors.index.json"
_METADATA = "__metadata__"
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor in a file, from its byte `start` on."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * BYTES_OF[self.dtype]


def read_header(file: FileIO, path: Path) -> dict[str, Held]:
    """What is in the file, by name."""
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
    try:
        held = _entries(parse_json(data, where), base)
    except WrongFieldError as error:
        raise error.of(where) from None
    at = gap(((tensor.start, tensor.start + tensor.bytes) for tensor in held.values()), base, size)
    if at is not None:
        raise DamagedError(
            f"{where}: data_offsets do not hold each of the {size - base:,} bytes after it once: see byte "
            f"{at - base:,}. Is the file whole?"
        )
    return held


def _entries(header: Any, base: int) -> dict[str, Held]:
    held: dict[str, Held] = {}
    for name, value in table(header, "the whole").items():
        try:
            if name == _METADATA:
                table(value, "")
            else:
                held[text(name, "name")] = _held(table(value, ""), base)
        except WrongFieldError as error:
            raise error.inside(f"[{shown(name)}]") from None
    return held


def _held(entry: dict[str, Any], base: int) -> Held:
    dtype, shape = member(entry, "dtype"), integers(member(entry, "shape"), "shape")
    if not isinstance(dtype, str) or dtype not in BYTES_OF:
        raise wrong("dtype", dtype, f"one of {', '.join(BYTES_OF)}")
    check_shape(shape, BYTES_OF[dtype])
    start, end = integers(member(entry, "data_offsets"), "data_offsets", 2)
    held = Held(dtype, shape, base + start)
    if end - start != held.bytes or end > MAX_INT - base:
        raise wrong("data_offsets", [start, end], f"{held.bytes:,} bytes, as {dtype} of {list(shape)} takes")
    return held


def read_index(folder: Path) -> dict[str, list[str]]:
    """The names that are to be taken from each of the files that the index in `folder` names."""
    path = folder / INDEX
    try:
        homes = table(
            member(table(read_json(hub_file(path), "an index of safetensors"), "the whole"), "weight_map"), "weight_map"
        )
    except WrongFieldError as error:
        raise DamagedError(f"{path} is not an index of safetensors: {error}") from None
    if not homes:
        raise DamagedError(f"{path} is not an index of safetensors: its weight_map is empty.")
    found: dict[str, list[str]] = {}
    for name, file in homes.items():
        found.setdefault(beside(folder, file, f"{path} (weight_map[{shown(name)}])").name, []).append(name)
    return found


def check_names(names: Iterable[str], held: Mapping[str, Held], path: Path) -> None:
    """That the file at `path` holds what the index beside it says."""
    absent = next((name for name in names if name not in held), None)
    if absent is not None:
        raise DamagedError(f"{path.parent / INDEX}: {absent} is to be in {path.name}, which does not hold it.")
