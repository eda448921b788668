"""The manifest of a checkpoint, `manifest.json`: which box of which tensor lies where, and all that is no tensor.

    format, crc32        of what follows, so that a manifest vouches for itself
    content
      step, written_by, seconds, world, strategy
      files              name → bytes in all, bytes of the header, CRC-32 of the header
      tensors            name → dtype (as safetensors calls it), shape, boxes
                                each box: offsets, sizes, file, first byte in it, CRC-32
      values             everything that is no tensor

The files are safetensors, one of each rank that wrote. A box's name in its file is `name@offsets`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from towpath.checkpoint.disk.fields import WrongFieldError, integer, integers, items, member, table, text, wrong
from towpath.checkpoint.disk.safe_open import (
    MAX_JSON_BYTES,
    DamagedError,
    is_plain,
    parse_json,
    read_json,
    reading,
    shown,
    size_of,
)
from towpath.checkpoint.disk.stored import BYTES_OF, File, Stored, StoredBox, check_boxes, check_files
from towpath.checkpoint.disk.values import check_values
from towpath.errors import CheckpointError
from towpath.files import sync_folder

NAME = "manifest.json"
FORMAT = "towpath checkpoint 1"
_WHAT = "a whole manifest"

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    step: int
    written_by: str
    seconds: float  # since 1970
    world: int
    strategy: str | None  # TOML
    files: Mapping[str, File]
    tensors: Mapping[str, Stored]
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def bytes(self) -> int:
        return sum(f.bytes for f in self.files.values())

    def to_text(self) -> str:
        content: dict[str, Any] = {
            "step": self.step,
            "written_by": self.written_by,
            "seconds": self.seconds,
            "world": self.world,
            "strategy": self.strategy,
            "files": {n: [f.bytes, f.header_bytes, f.header_crc32] for n, f in self.files.items()},
            "tensors": {
                name: {
                    "dtype": t.dtype,
                    "shape": list(t.shape),
                    "boxes": [[list(b.offsets), list(b.sizes), b.file, b.start, b.crc32] for b in t.boxes],
                }
                for name, t in self.tensors.items()
            },
            "values": self.values,
        }
        text = _canonical(content)
        head = json.dumps({"format": FORMAT, "crc32": zlib.crc32(text.encode())})
        return f'{head[:-1]},\n"content": {text}}}\n'

    @staticmethod
    def from_text(text: str | bytes | bytearray, where: Path) -> Manifest:
        data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        return Manifest.from_json(parse_json(data, str(where), _WHAT), where)

    @staticmethod
    def from_json(whole: Any, where: Path) -> Manifest:
        """Checked: what it says of tensors, boxes and files is whole, and fits together."""
        try:
            head = table(whole, "the whole")
            if member(head, "format") != FORMAT:
                raise wrong("format", head["format"], f"{FORMAT!r}, which this version of Towpath reads")
            content = table(member(head, "content"), "content")
            if zlib.crc32(_canonical(content).encode()) != member(head, "crc32"):
                raise DamagedError(f"{where}: its checksum does not match its content: the file was changed.")
            try:
                return _manifest(content)
            except WrongFieldError as error:
                raise error.inside("content") from None
        except WrongFieldError as error:
            raise error.of(str(where)) from None

    def check_sizes(self, folder: Path) -> None:
        """Every file is there and as long as it was: a matter of milliseconds."""
        for name, file in self.files.items():
            path = folder / name
            with reading(path) as opened:
                found = size_of(opened)
            if found != file.bytes:
                what = "truncated" if found < file.bytes else "longer than it was"
                raise DamagedError(f"{path} is {what}: {found:,} bytes, expected {file.bytes:,}.")


def _manifest(content: dict[str, Any]) -> Manifest:
    files = _each(table(member(content, "files"), "files"), "files", _file)
    tensors = _each(table(member(content, "tensors"), "tensors"), "tensors", _stored)
    check_files(files, tensors)
    values = table(member(content, "values"), "values")
    check_values(values, {name: stored.shape for name, stored in tensors.items()})
    strategy = member(content, "strategy")
    return Manifest(
        step=integer(member(content, "step"), "step"),
        written_by=_text(member(content, "written_by"), "written_by"),
        seconds=_seconds(member(content, "seconds")),
        world=integer(member(content, "world"), "world", low=1),
        strategy=None if strategy is None else _text(strategy, "strategy"),
        files=files,
        tensors=tensors,
        values=values,
    )


def _each(found: dict[str, Any], field: str, read: Callable[[str, Any], Made]) -> dict[str, Made]:
    made: dict[str, Made] = {}
    for name, value in found.items():
        try:
            made[text(name, "name")] = read(name, value)
        except WrongFieldError as error:
            raise error.inside(f"{field}[{shown(name)}]") from None
    return made


def _file(name: str, value: Any) -> File:
    if not is_plain(name) or name == NAME:
        raise WrongFieldError("", f"is no file of this folder: expected a plain name, other than {NAME}.")
    total, header, crc = items(value, "", 3)
    size = integer(total, "[0] (bytes)")
    return File(size, integer(header, "[1] (bytes of its header)", high=size), _crc(crc, "[2] (CRC-32 of its header)"))


def _stored(name: str, value: Any) -> Stored:
    entry = table(value, "")
    dtype = member(entry, "dtype")
    if not isinstance(dtype, str) or dtype not in BYTES_OF:
        raise wrong("dtype", dtype, f"one of {', '.join(BYTES_OF)}")
    stored = Stored(dtype, integers(member(entry, "shape"), "shape"), ())
    boxes = tuple(_box(stored, n, box) for n, box in enumerate(items(member(entry, "boxes"), "boxes")))
    stored = replace(stored, boxes=boxes)
    check_boxes(stored)
    return stored


def _box(stored: Stored, number: int, value: Any) -> StoredBox:
    try:
        offsets, sizes, file, start, crc = items(value, "", 5)
        if not isinstance(file, str):
            raise wrong("file", file, "the name of a file")
        return StoredBox(
            integers(offsets, "offsets", len(stored.shape)),
            integers(sizes, "sizes", len(stored.shape)),
            file,
            integer(start, "start"),
            _crc(crc, "crc32"),
        )
    except WrongFieldError as error:
        raise error.inside(f"boxes[{number}]") from None


def _crc(value: object, field: str) -> int:
    return integer(value, field, high=0xFFFFFFFF)


def _text(value: object, field: str) -> str:
    if not text(value, field).strip():
        raise wrong(field, value, "a text that says something")
    return text(value, field)


def _seconds(value: object) -> float:
    """Up to the year 9999, which is as far as dates go."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 253_000_000_000:
        raise wrong("seconds", value, "a time, in seconds since 1970")
    return value


def _canonical(content: Any) -> str:
    """Alike for what was written and what was read: JSON keeps the order of keys, and floats to the bit."""
    return json.dumps(content, separators=(",", ":"))


def read_manifest(folder: Path) -> Manifest:
    return Manifest.from_json(read_json(folder / NAME, _WHAT), folder / NAME)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """What could not be read again is not written."""
    path, data = folder / NAME, manifest.to_text().encode()
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path} would have {len(data):,} bytes, and at most {MAX_JSON_BYTES:,} are read. Are there long lists in "
            "the state of an extra? Give them as tensors."
        )
    Manifest.from_text(data, path)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
