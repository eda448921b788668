"""Files that another program or a stranger may have written, opened with care, and safetensors files of our own.

Only regular files are opened: no link is followed, and nobody waits for a pipe. The `safetensors` library reads and
checks the files with tensors. Every problem raises `DamagedError`, which names the file.
"""

from __future__ import annotations

import errno
import json
import os
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

from towpath.errors import CheckpointError

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
