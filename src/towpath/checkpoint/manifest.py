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
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from towpath.durable import sync_folder
from towpath.errors import CheckpointError

NAME = "manifest.json"
FORMAT = "towpath checkpoint 1"

BYTES_OF = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "BOOL": 1,
    "C64": 8,
    **{f"{sign}{bits}": bits // 8 for sign in "IU" for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True, slots=True)
class File:
    bytes: int
    header_bytes: int
    header_crc32: int


@dataclass(frozen=True, slots=True)
class StoredBox:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # its first byte in the file
    crc32: int

    @property
    def numel(self) -> int:
        return prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]

    @property
    def itemsize(self) -> int:
        return BYTES_OF[self.dtype]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize


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
    def from_text(text: str, where: Path) -> Manifest:
        try:
            whole = json.loads(text)
            if whole["format"] != FORMAT:
                raise CheckpointError(
                    f"{where}: written as {whole['format']!r}, and this version of Towpath reads {FORMAT!r}."
                )
            content = whole["content"]
            if zlib.crc32(_canonical(content).encode()) != whole["crc32"]:
                raise CheckpointError(f"{where}: its checksum does not match its content: the file was changed.")
            return _manifest(content)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{where}: not a whole manifest ({type(error).__name__}: {error}).") from error

    def check_sizes(self, folder: Path) -> None:
        """Every file is there and as long as it was: a matter of milliseconds."""
        for name, file in self.files.items():
            path = folder / name
            try:
                found = path.stat().st_size
            except OSError as error:
                raise CheckpointError(f"{path} is missing ({error.strerror}).") from error
            if found != file.bytes:
                raise CheckpointError(f"{path} is truncated: {found:,} bytes, expected {file.bytes:,}.")


def _manifest(content: dict[str, Any]) -> Manifest:
    outside = [name for name in content["files"] if Path(name).name != name]
    if outside:
        raise ValueError(f"{outside[0]!r} is no file of this folder")
    return Manifest(
        step=content["step"],
        written_by=content["written_by"],
        seconds=content["seconds"],
        world=content["world"],
        strategy=content["strategy"],
        files={name: File(*facts) for name, facts in content["files"].items()},
        tensors={
            name: Stored(
                t["dtype"],
                tuple(t["shape"]),
                tuple(StoredBox(tuple(o), tuple(s), *rest) for o, s, *rest in t["boxes"]),
            )
            for name, t in content["tensors"].items()
        },
        values=content["values"],
    )


def _canonical(content: Any) -> str:
    """Alike for what was written and what was read: JSON keeps the order of keys, and floats to the bit."""
    return json.dumps(content, separators=(",", ":"))


def read_manifest(folder: Path) -> Manifest:
    path = folder / NAME
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from error
    return Manifest.from_text(text, path)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    with (folder / NAME).open("x") as file:
        file.write(manifest.to_text())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
