"""The manifest of a checkpoint, `manifest.json`: where the tensors are, and every value that is not a tensor.

    format, crc32        of the content, so that the manifest detects its own changes
    content
      step, written_by, seconds, world, strategy
      files              name → bytes in all, bytes of the header, CRC-32 of the header
      tensors            name → dtype (as in safetensors files), shape, boxes
                                each box: offsets, sizes, file, first byte in it, CRC-32
      values             name → everything that is not a tensor (`to_json`)

The files are safetensors files, one for each rank that wrote. A box is called `name@offsets` in its file. The boxes of
a tensor cover each element once, and the boxes in a file cover each byte after its header once. So no tensor is larger
than the files, and no byte belongs to two tensors.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from towpath.checkpoint.json_state import from_json
from towpath.checkpoint.safe_open import (
    MAX_INT,
    MAX_JSON_BYTES,
    Check,
    DamagedError,
    WrongFieldError,
    integer,
    integers,
    is_plain,
    list_of,
    map_of,
    one_of,
    parse_json,
    read_json,
    reading,
    record,
    row,
    shown,
    size_of,
    table,
    text,
    within,
    wrong,
)
from towpath.errors import CheckpointError
from towpath.files import sync_folder

NAME = "manifest.json"
FORMAT = "towpath checkpoint 1"
_WHAT = "a whole manifest"

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}

_MOST_COMPARED = 300_000  # pairs of boxes of one tensor: half a second


# --- contents ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A safetensors file of a checkpoint."""

    bytes: int
    header_bytes: int
    header_crc32: int


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A rectangular part of a tensor: `sizes` elements in each dimension, from `offsets` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # its first byte in the file
    crc32: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.sizes)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, and the boxes that it is stored in."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return TORCH_DTYPES[self.dtype].itemsize

    @property
    def bytes(self) -> int:
        """The size of the tensor in bytes."""
        return prod(self.shape) * self.itemsize

    def first_element(self, box: StoredBox) -> int | None:
        """Return the index of the box's first element in the flattened tensor, or None if the box has gaps there."""
        # A box without gaps has sizes of one, then a range, then complete dimensions.
        position, ranged = 0, False
        for offset, size, length in zip(box.offsets, box.sizes, self.shape, strict=True):
            if ranged and size != length:
                return None
            ranged = ranged or size != 1
            position = position * length + offset
        return position


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint's manifest.

    Args:
        step: The number of optimizer steps.
        written_by: The version of Towpath that wrote it.
        seconds: When it was written, in seconds since 1970.
        world: The number of ranks that wrote it.
        strategy: Their strategy in TOML, or None if it was imported.
        files: The size and checksum of each file, by name.
        tensors: The dtype, shape and place of each tensor, by name.
        values: Everything that is not a tensor.
    """

    step: int
    written_by: str
    seconds: float
    world: int
    strategy: str | None
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def bytes(self) -> int:
        """The size of all files in bytes."""
        return sum(f.bytes for f in self.files.values())

    @property
    def aliases(self) -> dict[str, str]:
        """The other names of tied parameters, each with the name that the tensor is stored under."""
        return self.values.get("model", {"aliases": {}})["aliases"]

    def to_text(self) -> str:
        """Return the text of the manifest's file."""
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
        """Return the manifest of a file's text. `where` is the file, for errors."""
        data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        return Manifest.from_json(parse_json(data, str(where), _WHAT), where)

    @staticmethod
    def from_json(whole: Any, where: Path) -> Manifest:
        """Return the manifest of parsed JSON, or raise DamagedError with the field that is wrong."""
        try:
            record(format=_format)(whole)  # first, because other formats may have other members
            head = record(crc32=lambda value: value, content=table)(whole)
            if zlib.crc32(_canonical(head["content"]).encode()) != head["crc32"]:
                raise DamagedError(f"{where}: its checksum does not match its content: the file was changed.")
            return Manifest(**within("content", _content, head["content"]))
        except WrongFieldError as error:
            raise error.of(str(where)) from None

    def check_sizes(self, folder: Path) -> None:
        """Raise DamagedError unless every file is in `folder` with its size. This reads no file, so it is quick."""
        for name, file in self.files.items():
            path = folder / name
            with reading(path) as opened:
                found = size_of(opened)
            if found != file.bytes:
                what = "truncated" if found < file.bytes else "longer than it was"
                raise DamagedError(f"{path} is {what}: {found:,} bytes, expected {file.bytes:,}.")


def _canonical(content: Any) -> str:
    """Return the text that the checksum is of. JSON keeps the order of keys, and floats bit for bit."""
    return json.dumps(content, separators=(",", ":"))


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Args:
        folder: The folder of the checkpoint, such as "runs/a/step-000100".

    Returns:
        The checked manifest: which tensors, files and values the checkpoint has.

    Raises:
        CheckpointError: The manifest is missing or damaged.
    """
    path = Path(folder) / NAME
    return Manifest.from_json(read_json(path, _WHAT), path)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into `folder`, or raise CheckpointError if it could not be read again."""
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


def _content(value: object) -> dict[str, Any]:
    found = record(**_CONTENT)(value)
    _check_files(found["files"], found["tensors"])
    shapes = {name: stored.shape for name, stored in found["tensors"].items()}
    within("values", lambda values: _check_islands(values, shapes), found["values"])
    return found


# --- the schema -------------------------------------------------------------------------------------------------------


def _format(value: object) -> object:
    if value != FORMAT:
        raise wrong("", value, f"{FORMAT!r}, which this version of Towpath reads")
    return value


def _visible_text(value: object) -> str:
    if not text(value).strip():
        raise wrong("", value, "a text that says something")
    return text(value)


def _seconds(value: object) -> float:
    """Check for a time up to the year 9999, the last that Python's dates can have."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 253_000_000_000:
        raise wrong("", value, "a time, in seconds since 1970")
    return value


def _file_name(value: object) -> str:
    if not isinstance(value, str):
        raise wrong("", value, "the name of a file")
    return value


def _file(name: str) -> Check:
    if not is_plain(name) or name == NAME:
        raise WrongFieldError("", f"is no file of this folder: expected a plain name, other than {NAME}.")

    def check(value: object) -> StoredFile:
        file = StoredFile(*_FILE(value))
        if file.header_bytes > file.bytes:
            raise wrong("[1] (bytes of its header)", file.header_bytes, f"an integer from 0 to {file.bytes}")
        return file

    return check


@cache
def _box(dims: int) -> Check:
    return row(offsets=integers(dims), sizes=integers(dims), file=_file_name, start=integer(), crc32=_CRC)


def _tensor(value: object) -> StoredTensor:
    found = _TENSOR(value)
    boxes = record(boxes=list_of(_box(len(found["shape"]))))(value)["boxes"]
    stored = StoredTensor(found["dtype"], found["shape"], tuple(StoredBox(*box) for box in boxes))
    check_boxes(stored)
    return stored


# The schema. Relations between fields are checked by the functions above, and by `_check_files` and `_check_values`.
_CRC = integer(high=0xFFFFFFFF)
_FILE = row(
    **{"[0] (bytes)": integer(), "[1] (bytes of its header)": integer(), "[2] (CRC-32 of its header)": _CRC},
)
_TENSOR = record(dtype=one_of(TORCH_DTYPES), shape=integers())
_CONTENT: dict[str, Check] = {
    "files": map_of(_file),
    "tensors": map_of(lambda _: _tensor),
    "values": table,  # see `_check_values`, which needs the shapes of the tensors
    "strategy": lambda value: value if value is None else _visible_text(value),
    "step": integer(),
    "written_by": _visible_text,
    "seconds": _seconds,
    "world": integer(low=1),
}


class _References:
    """The tensors that the values in a manifest refer to, by name.

    Each reference must be to a tensor of the part of the checkpoint that contains it, and each tensor has at most one
    reference. So no part of a checkpoint reaches into another part.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._referred: set[str] = set()

    def _tensor(self, path: Any, part: str) -> str:
        if not isinstance(path, str) or path not in self._shapes or not f"{path}.".startswith(f"{part}."):
            raise wrong("", path, f"a tensor of {shown(part)} that the checkpoint holds")
        if path in self._referred:
            raise wrong("", path, "each tensor once")
        self._referred.add(path)
        return path

    def tree(self, part: str) -> Check:
        """Return a check for what `to_json` makes of a part."""

        def check(value: Any) -> Any:
            paths: list[Any] = []
            try:
                made = from_json(value, lambda path: paths.append(path) or object())
            except (ValueError, TypeError) as error:
                raise WrongFieldError("", f"cannot be what was written ({error}).") from None
            for path in paths:
                self._tensor(path, part)
            return made

        return check

    def alias(self, name: str) -> Check:
        """Return a check for the name that a tied parameter is stored under."""

        def check(value: object) -> None:
            if f"model.{text(value)}" not in self._shapes:
                raise wrong("", value, "a tensor of the model")
            if f"model.{name}" in self._shapes:
                raise WrongFieldError("", "is a tensor of its own, too.")

        return check

    def optimizer_state(self, name: str) -> Check:
        """Return a check for the optimizer states of a parameter."""
        shape = self._shapes.get(f"model.{name}")
        if shape is None:
            raise WrongFieldError("", "is the state of no parameter in the checkpoint.")

        def like(value: object) -> None:
            path = self._tensor(f"optimizer.{name}.{text(value)}", "optimizer")
            if self._shapes[path] != shape:
                raise WrongFieldError("", f"has shape {list(self._shapes[path])}; its parameter has {list(shape)}.")

        def rest(value: object) -> None:
            if not isinstance(self.tree("optimizer")(value), dict):
                raise wrong("", value, "an object")

        return record(like=list_of(like), rest=rest)

    def options(self, value: object) -> None:
        """Check the options of a group of an optimizer."""
        if "params" in table(value):
            raise WrongFieldError("params", "is no option.")
        map_of(lambda _: self.tree("optimizer"))(value)


def _adapter(value: object) -> None:
    if "problem" in table(value):
        record(problem=text)(value)
    else:
        record(config=table, tensors=map_of(lambda _: text))(value)


def _check_islands(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check everything that is not a tensor: that of the job, and that of each island by itself."""
    island = re.compile(r"(island\.\d+\.)(.+)", re.DOTALL)
    parts: dict[str, dict[str, Any]] = {"": {}}
    for name, value in values.items():
        found = island.fullmatch(name)
        prefix, plain = (found[1], found[2]) if found else ("", name)
        parts.setdefault(prefix, {})[plain] = value
    for prefix, mine in parts.items():
        own = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
        check = partial(_check_values, shapes={**shapes, **own})
        within(prefix.rstrip("."), check, mine) if prefix else check(mine)


def _check_values(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check everything that is not a tensor. `shapes` are those of the checkpoint's tensors, by name."""
    references = _References(shapes)
    group = record(names=list_of(text), options=references.options)
    checks: dict[str, Check] = {
        "model": record(aliases=map_of(references.alias)),
        "optimizer": record(kind=text, states=map_of(references.optimizer_state), groups=list_of(group)),
        "engine": record(step=integer(), fingerprint=text),
        "rng": record(seed=integer(low=-(2**63), high=2**64 - 1)),
        "names": map_of(lambda _: text),
        "config": table,
        "peft": map_of(lambda _: _adapter),
        "islands": record(
            count=integer(low=1),
            done=integer(),
            under_way=map_of(lambda _: integer()),
            every=integer(low=1),
            fragments=integer(low=1),
            delay=integer(),
        ),
    }
    for name, value in values.items():
        within(name if name in checks else shown(name), checks.get(name) or references.tree(name), value)


# --- boxes and files that fit together --------------------------------------------------------------------------------


def check_shape(shape: tuple[int, ...], itemsize: int) -> None:
    """Raise WrongFieldError if PyTorch cannot have a tensor of this shape. Its strides count even if it is empty."""
    if prod(max(length, 1) for length in shape) * itemsize > MAX_INT:
        raise wrong("shape", list(shape), "a tensor of less than 2^63 bytes")


def check_boxes(stored: StoredTensor) -> None:
    """Raise WrongFieldError unless the boxes of a tensor cover each of its elements once."""
    check_shape(stored.shape, stored.itemsize)
    for number, box in enumerate(stored.boxes):
        if not all(o + n <= length for o, n, length in zip(box.offsets, box.sizes, stored.shape, strict=True)):
            place = [list(box.offsets), list(box.sizes)]
            raise wrong(f"boxes[{number}]", place, f"elements of {list(stored.shape)}")
    firsts = [stored.first_element(box) for box in stored.boxes]
    ranges = [(at, at + box.numel) for at, box in zip(firsts, stored.boxes, strict=True) if at is not None]
    if len(ranges) < len(firsts):
        _check_rectangles(stored)
        return
    at = gap(ranges, 0, prod(stored.shape))
    if at is not None or not ranges:
        raise WrongFieldError("boxes", f"do not hold each element of {list(stored.shape)} once: see element {at or 0}.")


def _check_rectangles(stored: StoredTensor) -> None:
    """Raise WrongFieldError if boxes with gaps have too few elements together, or if two of them overlap."""
    if sum(box.numel for box in stored.boxes) != prod(stored.shape):
        raise WrongFieldError("boxes", f"do not hold each element of {list(stored.shape)} once.")
    in_same_rows: list[StoredBox] = []
    compared = 0
    for box in sorted((box for box in stored.boxes if box.numel), key=lambda box: box.offsets[0]):
        in_same_rows = [other for other in in_same_rows if other.offsets[0] + other.sizes[0] > box.offsets[0]]
        compared += len(in_same_rows)
        if compared > _MOST_COMPARED:
            raise wrong("boxes", len(stored.boxes), "fewer that lie beside each other")
        for other in in_same_rows:
            if _overlap(box, other):
                both = " and ".join(str([list(each.offsets), list(each.sizes)]) for each in (other, box))
                raise WrongFieldError("boxes", f"hold elements of {list(stored.shape)} twice: see {both}.")
        in_same_rows.append(box)


def _overlap(one: StoredBox, other: StoredBox) -> bool:
    places = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + n and b < a + m for a, m, b, n in places)


def _check_files(files: Mapping[str, StoredFile], tensors: Mapping[str, StoredTensor]) -> None:
    """Raise WrongFieldError unless the boxes in each file cover each byte after its header once."""
    places: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for name, stored in tensors.items():
        for number, box in enumerate(stored.boxes):
            if box.file not in files:
                expected = "one of the manifest's files"
                raise wrong(f"tensors[{shown(name)}].boxes[{number}].file", box.file, expected)
            places[box.file].append((box.start, box.start + box.numel * stored.itemsize))
    for name, file in files.items():
        at = gap(places[name], file.header_bytes, file.bytes)
        if at is not None:
            raise WrongFieldError(
                f"files[{shown(name)}]",
                f"has {file.bytes:,} bytes, {file.header_bytes:,} of them its header; expected boxes that hold each of "
                f"the others once: see byte {at:,}.",
            )


def gap(ranges: Iterable[tuple[int, int]], start: int, end: int) -> int | None:
    """Return the first place where the sorted ranges do not join from `start` to `end`, or None if they do."""
    at = start
    for first, last in sorted(ranges):
        if first != at:
            return min(first, at)
        at = last
    return None if at == end else min(at, end)
