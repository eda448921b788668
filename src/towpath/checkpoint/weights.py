"""The weights of a model in safetensors files, such as a Hugging Face folder. Only requested elements are read."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from towpath.checkpoint.manifest import TORCH_DTYPES
from towpath.checkpoint.safe_open import hub_file, is_folder, named_file, reading
from towpath.checkpoint.safetensors import INDEX, HeaderEntry, check_names, read_header, read_index
from towpath.core.formats import shape_text
from towpath.errors import ConfigError

SINGLE = "model.safetensors"


class Safetensors:
    """The tensors of a safetensors file, or of a folder with `model.safetensors` or an index of several files.

    The files are mapped into memory, and only the requested elements are read. The slices of the safetensors library
    are rows, so flat ranges are read here. A damaged file is a `CheckpointError`; weights of another model are a
    `ConfigError`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._tensors: dict[str, tuple[mmap.mmap, HeaderEntry]] = {}
        for file, names in self._files().items():
            with reading(hub_file(file)) as opened:
                held = read_header(opened, file)
                check_names(names, held, file)
                # A private mapping, though nothing writes: torch warns of memory that is read-only.
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            self._tensors |= {name: (mapped, held[name]) for name in names or held}

    def _files(self) -> Mapping[Path, Sequence[str]]:
        """Return the files, and the names to take from each. No names mean all."""
        path = self.path
        if path.name != INDEX and not is_folder(path) and os.path.lexists(path):
            return {named_file(path): ()}
        folder = path.parent if path.name == INDEX else path
        if os.path.lexists(folder / INDEX):
            return {folder / file: names for file, names in read_index(folder).items()}
        if os.path.lexists(folder / SINGLE):
            return {folder / SINGLE: ()}
        raise ConfigError(f"no safetensors at {path}: expected a file, or a folder with {SINGLE} or {INDEX}.")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors by name."""
        return {name: held.shape for name, (_, held) in self._tensors.items()}

    def values(self, name: str, start: int, end: int) -> Tensor:
        """Return the elements [start, end) of a tensor in row-major order, as a view of the file in its dtype."""
        mapped, held = self._tensors[name]
        count, dtype = prod(held.shape), TORCH_DTYPES[held.dtype]
        if not 0 <= start <= end <= count:
            raise ConfigError(f"{self.path}: {name} has {count} elements; [{start}, {end}) was asked for.")
        if start == end:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(mapped, dtype=dtype, count=end - start, offset=held.start + start * dtype.itemsize)

    def check(
        self, expected: Mapping[tuple[str, ...], tuple[int, ...]], ignored: re.Pattern[str] | None = None
    ) -> None:
        """Check that these are the weights of a model.

        Args:
            expected: The shape of each tensor of the model, by all names of the tensor.
            ignored: Names that the files may hold in addition.

        Raises:
            ConfigError: A tensor is missing, has another shape, or is not the model's.
        """
        shapes = self.shapes
        for names, shape in expected.items():
            name = next((name for name in names if name in shapes), None)
            if name is None:
                raise ConfigError(
                    f"{self.path} holds no {' or '.join(names)}, which the model has; it holds "
                    f"{_few(sorted(shapes))}. Names must be the model's own."
                )
            if shapes[name] != shape:
                there, here = shape_text(shapes[name]), shape_text(shape)
                raise ConfigError(f"{self.path}: {name} has shape {there}; the model's {here}.")
        known = {name for names in expected for name in names}
        more = [n for n in sorted(set(shapes) - known) if ignored is None or not ignored.search(n)]
        if more:
            raise ConfigError(f"{self.path} holds {_few(more)}, which the model has not. Is it of another model?")


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
