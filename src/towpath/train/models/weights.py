"""Weights in safetensors files, mapped into memory and never read but for the elements that are asked for.

    model.safetensors                     all in one file
    model.safetensors.index.json          {"weight_map": {name: file}}, and the files beside it

The safetensors library's slices are of rows, so flat ranges are cut here. What is wrong with a file is a
`CheckpointError`; weights of another model are a `ConfigError`.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from towpath.checkpoint.disk.files import TORCH_DTYPES
from towpath.checkpoint.disk.headers import INDEX, Held, check_names, read_header, read_index
from towpath.checkpoint.disk.safe_open import hub_file, is_folder, named_file, reading
from towpath.errors import ConfigError

SINGLE = "model.safetensors"

# The tensors of a model, each by all the names it has: their shapes.
Expected = Mapping[tuple[str, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies."""

    file: mmap.mmap
    held: Held


class Safetensors:
    """The tensors of a file, or of a folder with `model.safetensors` or with its index and the files that names."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stored: dict[str, _Stored] = {}
        for file, names in _files(self.path).items():
            found = _opened(file, names)
            self._stored |= {name: found[name] for name in names} if names else found

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.held.shape for name, stored in self._stored.items()}

    def values(self, name: str, start: int, end: int) -> Tensor:
        """The elements [start, end) of a tensor in row-major order, in the file's dtype: a view of the mapped file."""
        stored = self._stored[name]
        count, dtype = prod(stored.held.shape), TORCH_DTYPES[stored.held.dtype]
        if not 0 <= start <= end <= count:
            raise ConfigError(f"{self.path}: {name} has {count} elements; [{start}, {end}) was asked for.")
        if start == end:
            return torch.empty(0, dtype=dtype)
        offset = stored.held.start + start * dtype.itemsize
        return torch.frombuffer(stored.file, dtype=dtype, count=end - start, offset=offset)

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
    if path.name != INDEX and not is_folder(path) and os.path.lexists(path):
        return {named_file(path): []}
    folder = path.parent if path.name == INDEX else path
    if os.path.lexists(folder / INDEX):
        return {folder / file: names for file, names in read_index(folder).items()}
    if os.path.lexists(folder / SINGLE):
        return {folder / SINGLE: []}
    raise ConfigError(f"no safetensors at {path}: expected a file, or a folder with {SINGLE} or {INDEX}.")


def _opened(path: Path, names: Sequence[str]) -> dict[str, _Stored]:
    with reading(hub_file(path)) as file:
        held = read_header(file, path)
        check_names(names, held, path)
        # Private, though nothing writes: torch warns of memory that is read-only.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _Stored(mapped, entry) for name, entry in held.items()}


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
