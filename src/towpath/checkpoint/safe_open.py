"""Open files that another program or a stranger may have written, and check the JSON in them.

This is the only module that opens such files: checkpoints, indices, safetensors and JSON.

A file name inside a file must be plain, so that the file is in the same folder (`file_next_to`). Only regular files
are opened. Links, pipes and devices are refused without waiting for them (`reading`). JSON is limited in size and
depth, and no key appears twice in an object (`read_json`). A schema checks the values in JSON (`record`).

Every problem raises `DamagedError`, which names the file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import reprlib
import stat
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, cast

from towpath.errors import CheckpointError

# For a manifest, an index or a header. Parsed JSON takes up to 20 times as much memory.
MAX_JSON_BYTES = 64 << 20
MAX_JSON_DEPTH = 100
MAX_INT = 2**63 - 1
MAX_DIMS = 64  # of a tensor, as in PyTorch

_NAME_BYTES = 255  # the limit of common file systems
# O_NONBLOCK: opening a pipe returns at once.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW | os.O_NONBLOCK
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
    """A file is not what was written. An older checkpoint may still be usable."""

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


def visible(text: str) -> str:
    """Return `text` in one line, without control sequences that a terminal would obey."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """Return a short representation of `value` for an error message."""
    return _short.repr(value)


# --- names and paths --------------------------------------------------------------------------------------------------


def is_plain(name: object) -> bool:
    """Return whether `name` can be the name of a file in a folder, and cannot lead out of that folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable() or "/" in name or "\\" in name:
        return False
    return len(name.encode()) <= _NAME_BYTES  # printable text can always be encoded


def file_next_to(folder: Path, name: object, where: str) -> Path:
    """Return the path of the file `name` in `folder`, or raise DamagedError. `where` says who names the file."""
    if not isinstance(name, str) or not is_plain(name):
        raise DamagedError(f"{where} names the file {shown(name)}; expected the plain name of one in its folder.")
    return folder / name


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder; False if this process may not look."""
    return os.path.isdir(path)  # noqa: PTH112 (Path.is_dir raises where it may not look)


def named_file(path: Path) -> Path:
    """Return the target of a path that the user named. Such a link may be followed."""
    return Path(os.path.realpath(path))


def hub_file(path: Path) -> Path:
    """Return `path`, or the blob that it links to in the cache of Hugging Face's hub.

    These links lead from snapshots/REVISION/NAME to ../../blobs/HASH. No other link is followed.
    """
    try:
        match = _HUB_LINK.fullmatch(str(path.readlink()))
    except (OSError, ValueError):  # not a link, or one that cannot be read: opening it gives the reason
        return path
    revision = path.parent.resolve()
    blobs = revision.parent.parent / "blobs"
    if match is None or revision.parent.name != "snapshots" or blobs.is_symlink():
        return path
    return blobs / match[1]


# --- opening and reading ----------------------------------------------------------------------------------------------


@contextmanager
def reading(path: Path) -> Generator[FileIO]:
    """Open a regular file. A failure to open or to read it raises DamagedError."""
    with _opened(path) as file:
        try:
            yield file
        except OSError as error:
            raise DamagedError(f"{path} cannot be read ({error.strerror}).") from error


def _opened(path: Path) -> FileIO:
    try:
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:  # ValueError: not a possible path
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
    """Return the size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def fill(file: FileIO, path: Path, start: int, into: memoryview) -> None:
    """Fill `into` with the bytes of a file from byte `start` on, or raise DamagedError if the file is too short."""
    file.seek(start)
    while into:
        count = file.readinto(into)
        if not count:
            raise DamagedError(f"{path} is truncated: {len(into):,} bytes are missing at its end.")
        into = into[count:]


def read_json(path: Path, what: str = "JSON") -> Any:
    """Return the parsed content of a JSON file. `what` names the expected content in an error."""
    with reading(path) as file:
        size = size_of(file)
        if size > MAX_JSON_BYTES:
            raise DamagedError(f"{path} has {size:,} bytes; {what} has at most {MAX_JSON_BYTES:,}.")
        data = bytearray(size)
        fill(file, path, 0, memoryview(data))
    return parse_json(data, str(path), what)


def parse_json(data: bytes | bytearray, where: str, what: str = "JSON") -> Any:
    """Return the parsed JSON of `data`, or raise DamagedError. `where` and `what` describe it in an error."""
    try:
        parsed: Any = json.loads(data.decode(), object_pairs_hook=_object)
        level, depth = [parsed], 0
        while level:
            if depth > MAX_JSON_DEPTH:
                raise RecursionError
            inside = (n.values() if isinstance(n, dict) else n for n in level if isinstance(n, (dict, list)))
            level = [child for nodes in inside for child in nodes if isinstance(child, (dict, list))]
            depth += 1
    except UnicodeDecodeError as error:
        raise DamagedError(f"{where}: not {what} (byte {error.start} is no UTF-8).") from None
    except RecursionError:
        raise DamagedError(f"{where}: not {what} (nested deeper than {MAX_JSON_DEPTH} levels).") from None
    except ValueError as error:
        raise DamagedError(f"{where}: not {what} ({error}).") from None
    return parsed


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"{shown(twice)} stands twice in one object")
    return found


# --- checks of JSON values --------------------------------------------------------------------------------------------
#
# A check takes a parsed value. It returns the value, with a fitting type, or raises `WrongFieldError`. The checks of
# objects and lists are made of the checks of their members, so a schema is an expression:
#
#     record(dtype=one_of(TORCH_DTYPES), shape=integers(), boxes=list_of(row(...)))

Check = Callable[[Any], Any]


class WrongFieldError(Exception):
    """A value does not fit. Each enclosing check adds its part of the path to `field`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field, self.problem = field, problem

    def inside(self, outer: str) -> WrongFieldError:
        """Return the same error with the path of the enclosing field in front."""
        inner = self.field if not outer or not self.field or self.field.startswith("[") else f".{self.field}"
        return WrongFieldError(f"{outer}{inner}", self.problem)

    def of(self, where: str) -> DamagedError:
        """Return the error for the user, who needs to know in which file (`where`) the value is."""
        return DamagedError(f"{where}: {self.field or 'the whole'} {self.problem}")


def wrong(field: str, got: object, expected: str) -> WrongFieldError:
    """Return the error for a value that is not what was expected."""
    return WrongFieldError(field, f"is {shown(got)}; expected {expected}.")


def within(field: str, check: Check, value: Any) -> Any:
    """Return `check(value)`. An error names `field`."""
    try:
        return check(value)
    except WrongFieldError as error:
        raise error.inside(field) from None


def integer(low: int = 0, high: int = MAX_INT) -> Check:
    """Return a check for integers from `low` to `high`."""

    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:  # isinstance would admit booleans
            raise wrong("", value, f"an integer from {low} to {high}")
        return value

    return check


def integers(length: int | None = None) -> Check:
    """Return a check for a shape, or for offsets in one: a list of at most `MAX_DIMS` integers."""

    def check(value: object) -> tuple[int, ...]:
        found = _list(value, length)
        if len(found) > MAX_DIMS:
            raise wrong("", found, f"at most {MAX_DIMS} dimensions")
        for number, entry in enumerate(found):
            if type(entry) is not int or not 0 <= entry <= MAX_INT:
                raise wrong(f"[{number}]", entry, f"an integer from 0 to {MAX_INT}")
        return tuple(found)

    return check


def text(value: object) -> str:
    """Check for text. Lone surrogates are refused, because no program can encode them."""
    if isinstance(value, str):
        try:
            value.encode()
            return value
        except UnicodeEncodeError:
            pass
    raise wrong("", value, "a text")


def one_of(choices: Mapping[str, Any]) -> Check:
    """Return a check for one of a few texts."""

    def check(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise wrong("", value, f"one of {', '.join(choices)}")
        return value

    return check


def table(value: object) -> dict[str, Any]:
    """Check for a JSON object with any members."""
    if not isinstance(value, dict):
        raise wrong("", value, "an object")
    return cast(dict[str, Any], value)


def record(**members: Check) -> Check:
    """Return a check for an object with these members. It may have more, which the result leaves out."""

    def check(value: object) -> dict[str, Any]:
        found = table(value)
        if missing := next((name for name in members if name not in found), None):
            raise WrongFieldError(missing, "is missing.")
        return {name: within(name, member, found[name]) for name, member in members.items()}

    return check


def map_of(member: Callable[[str], Check]) -> Check:
    """Return a check for an object with any keys. `member` returns the check for the value of a key."""

    def check(value: object) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, inside in table(value).items():
            field = f"[{shown(name)}]"
            within(f"{field}.name", text, name)
            made[name] = within(field, lambda value, name=name: member(name)(value), inside)
        return made

    return check


def list_of(member: Check) -> Check:
    """Return a check for a list of any length."""
    return lambda value: [within(f"[{n}]", member, inside) for n, inside in enumerate(_list(value))]


def row(**members: Check) -> Check:
    """Return a check for a list with one value for each of these names. The result is a tuple."""

    def check(value: object) -> tuple[Any, ...]:
        found = _list(value, len(members))
        pairs = zip(members.items(), found, strict=True)
        return tuple(within(name, member, inside) for (name, member), inside in pairs)

    return check


def _list(value: object, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(cast(list[Any], value)) != length):
        raise wrong("", value, "a list" if length is None else f"a list of {length}")
    return cast(list[Any], value)
