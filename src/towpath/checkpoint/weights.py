"""The weights of a model in safetensors files, such as a Hugging Face folder. Only requested elements are read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from towpath.checkpoint.safe_files import DamagedError, hub_file, is_plain, map_tensors, read_object, shown
from towpath.core.formats import shape_text
from towpath.errors import ConfigError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def files_of(path: Path) -> dict[Path, list[str]]:
    """Return the safetensors files at a path, each with the names that an index lists for it, if there is one."""
    if path.name != INDEX and os.path.lexists(path) and not path.is_dir():
        return {path.resolve(): []}  # the user named it, so a link may be followed
    folder = path.parent if path.name == INDEX else path
    if not os.path.lexists(folder / INDEX):
        single = folder / SINGLE
        return {file: [] for file in ([single] if os.path.lexists(single) else sorted(folder.glob("*.safetensors")))}
    path, found = folder / INDEX, dict[Path, list[str]]()
    named = read_object(hub_file(path), "an index of safetensors").get("weight_map")
    if not isinstance(named, dict) or not named:
        raise DamagedError(f"{path} is not an index of safetensors: expected a weight_map, got {shown(named)}.")
    for name, file in cast(dict[str, Any], named).items():
        if not is_plain(file):
            raise DamagedError(
                f"{path} (weight_map[{shown(name)}]) names the file {shown(file)}; expected the plain name of one in "
                "its folder."
            )
        found.setdefault(folder / file, []).append(name)
    return dict(sorted(found.items()))


def tensors_in(file: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, as views of it. It must have the `names` that an index lists."""
    held = map_tensors(hub_file(file))
    if missing := sorted({*names} - held.keys()):
        raise DamagedError(f"{file.parent / INDEX}: {missing[0]} is to be in {file.name}, which does not hold it.")
    return held


class Safetensors:
    """The tensors of a safetensors file, or of a folder with such files, as `files_of` finds them.

    The files are mapped into memory, and only the requested elements are read. A damaged file is a `CheckpointError`;
    weights of another model are a `ConfigError`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._tensors: dict[str, Tensor] = {}
        for file, names in files_of(self.path).items():
            held = tensors_in(file, names)
            self._tensors |= {name: held[name] for name in names or held}
        if not self._tensors:
            raise ConfigError(f"no safetensors at {path}: expected a file, or a folder with {SINGLE} or {INDEX}.")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def values(self, name: str, start: int, end: int) -> Tensor:
        """Return the elements [start, end) of a tensor in row-major order, as a view of the file in its dtype."""
        tensor = self._tensors[name]
        if not 0 <= start <= end <= tensor.numel():
            raise ConfigError(f"{self.path}: {name} has {tensor.numel()} elements; [{start}, {end}) was asked for.")
        return tensor.view(-1)[start:end]

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


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
