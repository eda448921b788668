"""Weights in safetensors files, mapped into memory and never read but for the elements that are asked for.

    model.safetensors                     all in one file
    model.safetensors.index.json          {"weight_map": {name: file}}, and the files beside it

A file is eight bytes with the length of its header, the header (JSON: for each name its dtype, its shape and where its
bytes lie), and the bytes. The safetensors library checks a file; its slices are of rows, so flat ranges are cut here.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from towpath.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


# The tensors of a model, each by all the names it has: their shapes.
Expected = Mapping[tuple[str, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies."""

    file: mmap.mmap
    start_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Safetensors:
    """The tensors of a file, or of a folder with `model.safetensors` or with its index and the files that names."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stored: dict[str, _Stored] = {}
        for file, names in _files(self.path).items():
            found = _opened(file)
            absent = [name for name in names if name not in found]
            if absent:
                raise ConfigError(f"{self.path / INDEX}: {absent[0]} is to be in {file.name}, which does not hold it.")
            self._stored |= {name: found[name] for name in names} if names else found

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._stored.items()}

    def values(self, name: str, start: int, end: int) -> Tensor:
        """The elements [start, end) of a tensor in row-major order, in the file's dtype: a view of the mapped file."""
        stored = self._stored[name]
        count = prod(stored.shape)
        if not 0 <= start <= end <= count:
            raise ConfigError(f"{self.path}: {name} has {count} elements; [{start}, {end}) was asked for.")
        if start == end:
            return torch.empty(0, dtype=stored.dtype)
        offset = stored.start_bytes + start * stored.dtype.itemsize
        return torch.frombuffer(stored.file, dtype=stored.dtype, count=end - start, offset=offset)

    def check(self, expected: Expected, ignored: re.Pattern[str] | None = None) -> None:
        """Refuse to be the weights of another model. `ignored`: names that may be there besides."""
        shapes = self.shapes
        for names, shape in expected.items():
            here = next((name for name in names if name in shapes), None)
            if here is None:
                raise ConfigError(
                    f"{self.path} holds no {' or '.join(names)}, which the model has; it holds "
                    f"{_few(sorted(shapes))}. Names must be the model's own."
                )
            if shapes[here] != shape:
                raise ConfigError(f"{self.path}: {here} has shape {_shape(shapes[here])}; the model's {_shape(shape)}.")
        known = {name for names in expected for name in names}
        more = [n for n in sorted(set(shapes) - known) if ignored is None or not ignored.search(n)]
        if more:
            raise ConfigError(f"{self.path} holds {_few(more)}, which the model has not. Is it of another model?")


def _files(path: Path) -> dict[Path, list[str]]:
    """The files, and the names to take from each; none means all."""
    if path.is_file() and path.name != INDEX:
        return {path: []}
    folder = path.parent if path.is_file() else path
    index = folder / INDEX
    if not index.is_file():
        if (folder / SINGLE).is_file():
            return {folder / SINGLE: []}
        raise ConfigError(f"no safetensors at {path}: expected a file, or a folder with {SINGLE} or {INDEX}.")
    files: dict[Path, list[str]] = {}
    for name, file in _weight_map(index).items():
        files.setdefault(folder / file, []).append(name)
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map: Any = json.loads(index.read_text())["weight_map"]
        pairs = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not an index of safetensors: {type(error).__name__}: {error}.") from None
    outside = [file for file in pairs.values() if Path(file).name != file]
    if outside:
        raise ConfigError(f"{index} names the file {outside[0]!r}; expected one beside it.")
    return pairs


def _opened(path: Path) -> dict[str, _Stored]:
    try:
        with safe_open(path, framework="pt") as checked:  # refuses a header that does not fit its file
            names = list(checked.keys())
        with path.open("rb") as file:
            # Private, though nothing writes: torch warns of memory that is read-only.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read the safetensors {path}: {error}.") from None
    length = int.from_bytes(mapped[:8], "little")
    header = json.loads(mapped[8 : 8 + length])
    return {name: _stored(path, mapped, 8 + length, name, header[name]) for name in names}


def _stored(path: Path, mapped: mmap.mmap, base: int, name: str, entry: Mapping[str, Any]) -> _Stored:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ConfigError(f"{path}: {name} is {entry['dtype']}; expected one of {', '.join(_DTYPES)}.")
    return _Stored(mapped, base + entry["data_offsets"][0], dtype, tuple(entry["shape"]))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
