"""The one place where files are opened that somebody else may have made: checkpoints, indices, safetensors, JSON.

A name that stands in a file is a plain name and stays in its folder (`beside`). What is opened is a regular file, never
a link, a pipe or a device, and to find that out nobody waits for one (`reading`). JSON is bounded in bytes and depth,
and says everything once (`read_json`). Whatever is wrong with a file is a `DamagedError` that names it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import reprlib
import stat
from collections.abc import Generator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from towpath.errors import CheckpointError

# Of a manifest, an index or a header. Parsed, JSON takes about 20 times as much memory at worst.
MAX_JSON_BYTES = 64 << 20
MAX_JSON_DEPTH = 100

_NAME_BYTES = 255  # as long as file systems allow
_FLAGS = (
    os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW | os.O_NONBLOCK
)  # the last, for pipes: they open at once
_HUB_LINK = re.compile(r"\.\./\.\./blobs/([0-9a-f]{40}|[0-9a-f]{64})")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlong = 24
_short.maxlevel = 3


class DamagedError(CheckpointError):
    """Not what was written: an older checkpoint may do."""

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


def visible(text: str) -> str:
    """One line, with nothing in it that a terminal would obey."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """For an error: short."""
    return _short.repr(value)


def is_plain(name: object) -> bool:
    """Whether it can be the name of a file in a folder and of nothing elsewhere."""
    if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable() or "/" in name or "\\" in name:
        return False
    return len(name.encode()) <= _NAME_BYTES  # what is printable can be encoded


def beside(folder: Path, name: object, where: str) -> Path:
    """The file of `folder` that is called `name` by `where`."""
    if not isinstance(name, str) or not is_plain(name):
        raise DamagedError(f"{where} names the file {shown(name)}; expected the plain name of a file beside it.")
    return folder / name


def is_folder(path: Path) -> bool:
    """Also where that cannot be asked."""
    return os.path.isdir(path)  # noqa: PTH112 (Path.is_dir raises where it may not look)


@contextmanager
def reading(path: Path) -> Generator[FileIO]:
    """A regular file."""
    with _opened(path) as file:
        try:
            yield file
        except OSError as error:
            raise DamagedError(f"{path} cannot be read ({error.strerror}).") from error


def _opened(path: Path) -> FileIO:
    try:
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:  # ValueError: what can be no path
        raise DamagedError(_refusal(path, error)) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise DamagedError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'no file')}; expected a regular file.")
    return FileIO(descriptor)


def _refusal(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, ValueError):
        return f"{shown(str(path))} can be no path ({error})."
    if error.errno == errno.ENOENT:
        return f"{path} is missing ({error.strerror})."
    if error.errno == errno.ELOOP:
        return f"{path} is a symbolic link, which is not followed; expected a regular file. Put the file itself there."
    return f"{path} cannot be read ({error.strerror})."


def size_of(file: FileIO) -> int:
    return os.fstat(file.fileno()).st_size


def fill(file: FileIO, path: Path, start: int, into: memoryview) -> None:
    """Fill `into` from the bytes of a file, from `start` on."""
    file.seek(start)
    while into:
        count = file.readinto(into)
        if not count:
            raise DamagedError(f"{path} is truncated: {len(into):,} bytes are missing at its end.")
        into = into[count:]


def read_json(path: Path, what: str = "JSON") -> Any:
    """`what` it should be, for the error."""
    with reading(path) as file:
        size = size_of(file)
        if size > MAX_JSON_BYTES:
            raise DamagedError(f"{path} has {size:,} bytes; {what} has at most {MAX_JSON_BYTES:,}.")
        data = bytearray(size)
        fill(file, path, 0, memoryview(data))
    return parse_json(data, str(path), what)


def parse_json(data: bytes | bytearray, where: str, what: str = "JSON") -> Any:
    try:
        parsed: Any = json.loads(data.decode(), object_pairs_hook=_once)
        _check_depth(parsed)
    except UnicodeDecodeError as error:
        raise DamagedError(f"{where}: not {what} (byte {error.start} is no UTF-8).") from None
    except RecursionError:
        raise DamagedError(f"{where}: not {what} (nested deeper than {MAX_JSON_DEPTH} levels).") from None
    except ValueError as error:
        raise DamagedError(f"{where}: not {what} ({error}).") from None
    return parsed


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"{shown(twice)} stands twice in one object")
    return found


def _check_depth(parsed: Any) -> None:
    level, depth = [parsed], 0
    while level:
        if depth > MAX_JSON_DEPTH:
            raise RecursionError
        inside = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, (dict, list)))
        level, depth = [child for nodes in inside for child in nodes if isinstance(child, (dict, list))], depth + 1


def named_file(path: Path) -> Path:
    """Where a path leads that the user named: such a link is theirs."""
    return Path(os.path.realpath(path))


def hub_file(path: Path) -> Path:
    """`path`, or what it is a link to in the cache of Hugging Face's hub: snapshots/REVISION/NAME → ../../blobs/HASH.

    No other link is followed.
    """
    try:
        match = _HUB_LINK.fullmatch(str(path.readlink()))
    except (OSError, ValueError):  # no link, or none that could be read: opening it says why
        return path
    revision = path.parent.resolve()
    blobs = revision.parent.parent / "blobs"
    if match is None or revision.parent.name != "snapshots" or blobs.is_symlink():
        return path
    return blobs / match[1]
