"""Files that another program or a stranger may have written, opened with care: JSON, and weights in safetensors.

Only regular files are opened: no link is followed, and nobody waits for a pipe. The `safetensors` library reads and
checks the files with tensors. Every problem raises `DamagedError`, which names the file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import reprlib
import stat
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from towpath.core.formats import shape_text
from towpath.errors import CheckpointError, ConfigError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"  # in a folder of Hugging Face
MAX_JSON_BYTES = 64 << 20  # parsed JSON takes up to 20 times as much memory

# O_NONBLOCK: opening a pipe returns at once.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW | os.O_NONBLOCK
_CHUNK_BYTES = 8 << 20

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlong = 24
_short.maxlevel = 3


class DamagedError(CheckpointError):
    """A file is not what was written. An older checkpoint may still be usable."""

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


def visible(text: str) -> str:
    """Return `text` in one line, without control sequences that a terminal would obey."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """Return a short representation of `value` for an error message."""
    return _short.repr(value)


def is_plain(name: object) -> bool:
    """Return whether `name` can be the name of a file in a folder, and cannot lead out of that folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable():
        return False
    return "/" not in name and "\\" not in name


def hub_file(path: Path) -> Path:
    """Return `path`, or the blob that it links to in the cache of Hugging Face's hub.

    These links lead from snapshots/REVISION/NAME to ../../blobs/HASH. No other link is followed.
    """
    snapshot, target = path.parent.resolve(), path.resolve()
    is_blob = snapshot.parent.name == "snapshots" and target.parent == snapshot.parent.parent / "blobs"
    return target if is_blob else path


# --- reading ----------------------------------------------------------------------------------------------------------


@contextmanager
def opened(path: Path) -> Generator[FileIO]:
    """Open a regular file. A failure to open or to read it raises DamagedError."""
    try:
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:  # ValueError: not a possible path
        if isinstance(error, OSError) and error.errno == errno.ENOENT:
            raise DamagedError(f"{path} is missing ({error.strerror}).") from error
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            raise DamagedError(
                f"{path} is a symbolic link, which is not followed; expected a regular file. Put the file itself there."
            ) from error
        raise DamagedError(f"{path} cannot be read ({error}).") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedError(f"{path} is a folder, a pipe or a device; expected a regular file.")
    with FileIO(descriptor) as file:
        try:
            yield file
        except OSError as error:
            raise DamagedError(f"{path} cannot be read ({error.strerror}).") from error


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in a file. `what` names the expected content in an error."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_JSON_BYTES:
            raise DamagedError(f"{path} has {size:,} bytes; {what} has at most {MAX_JSON_BYTES:,}.")
        data = file.readall()
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: not {what} ({error}).") from None
    if not isinstance(found, dict):
        raise DamagedError(f"{path}: {shown(found)} is not {what}; expected an object.")
    return cast(dict[str, Any], found)


def checksum(path: Path, *, flush: bool = False) -> tuple[int, int]:
    """Return the size and the CRC-32 of a file. `flush` first waits until its bytes are on the disk."""
    count = crc = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with opened(path) as file:
        if flush:
            os.fsync(file.fileno())
        while read := file.readinto(buffer):
            count, crc = count + read, zlib.crc32(buffer[:read], crc)
    return count, crc


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file as views of the mapped file, so only elements in use are read."""
    with opened(path) as file:
        try:
            # The library would follow a link. The path of the descriptor is the file that was checked.
            with safe_open(f"/dev/fd/{file.fileno()}", "pt") as held:
                return {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118 (it is no dict)
        except (SafetensorError, ValueError, RuntimeError, TypeError, MemoryError) as error:
            raise DamagedError(f"{path}: not a whole safetensors file ({error}).") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> tuple[int, int]:
    """Write a safetensors file, wait until it is on the disk, and return its size and its CRC-32."""
    try:
        save_file(_separate(tensors), path, metadata)
        path.chmod(path.parent.stat().st_mode & 0o666)  # the library lets only the owner read it
    except (SafetensorError, KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be written ({error}).") from error
    return checksum(path, flush=True)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as safetensors takes them: contiguous, on the CPU, and none with memory of another one."""
    # Conjugate and negative views keep a bit beside their memory. Tied weights and views of a tensor share memory.
    separate = {name: t.detach().cpu().resolve_conj().resolve_neg().contiguous() for name, t in tensors.items()}
    end = 0
    for name, tensor in sorted(separate.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            separate[name] = tensor.clone()
        else:
            end = tensor.data_ptr() + tensor.nbytes
    return separate


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Raise CheckpointError with `path` for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror}).") from error


# --- weights ----------------------------------------------------------------------------------------------------------


def _files_at(path: Path) -> dict[Path, list[str]]:
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


def weights_at(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of a folder with some and perhaps an index, as views of the files.

    With an index, these are the tensors that it lists. The result is empty if there is no file.
    """
    found: dict[str, Tensor] = {}
    for file, names in _files_at(path).items():
        held = map_tensors(hub_file(file))
        if missing := sorted({*names} - held.keys()):
            raise DamagedError(f"{file.parent / INDEX}: {missing[0]} is to be in {file.name}, which does not hold it.")
        for name in names or held:
            if name in found:
                raise CheckpointError(f"{name} is in {file} and in a file before it.")
            found[name] = held[name]
    return found


class Safetensors:
    """The tensors of `weights_at`. The files are mapped into memory, and only the requested elements are read.

    A damaged file is a `CheckpointError`; weights of another model are a `ConfigError`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._tensors = weights_at(self.path)
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
        """Raise ConfigError unless these are a model's tensors, with the `expected` shape for all names of each one.

        `ignored`: Names that the files may hold in addition.
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
