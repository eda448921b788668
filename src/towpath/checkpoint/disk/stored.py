"""Tensors of a checkpoint, and where they lie: boxes cover each tensor once, and boxes cover each file once.

So no tensor is larger than the files, and no byte of a file is two things.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from towpath.checkpoint.disk.fields import MAX_INT, WrongFieldError, wrong
from towpath.checkpoint.disk.safe_open import shown

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


_MOST_COMPARED = 300_000  # rectangles of one tensor, two by two: half a second


@dataclass(frozen=True, slots=True)
class File:
    bytes: int
    header_bytes: int
    header_crc32: int


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A rectangle of a tensor: `sizes` elements from `offsets` on."""

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

    def place(self, box: StoredBox) -> int | None:
        """Which element of the flattened tensor is the first of the box, if its elements follow one another there."""
        if not _in_one_piece(box, self.shape):
            return None
        position = 0
        for offset, length in zip(box.offsets, self.shape, strict=True):
            position = position * length + offset
        return position


def check_shape(shape: tuple[int, ...], itemsize: int) -> None:
    """Also a tensor without elements must have strides that a tensor can have."""
    if prod(max(length, 1) for length in shape) * itemsize > MAX_INT:
        raise wrong("shape", list(shape), "a tensor of less than 2^63 bytes")


def check_boxes(stored: Stored) -> None:
    check_shape(stored.shape, stored.itemsize)
    for number, box in enumerate(stored.boxes):
        if not all(o + n <= length for o, n, length in zip(box.offsets, box.sizes, stored.shape, strict=True)):
            place = [list(box.offsets), list(box.sizes)]
            raise wrong(f"boxes[{number}]", place, f"elements of {list(stored.shape)}")
    firsts = [stored.place(box) for box in stored.boxes]
    ranges = [(at, at + box.numel) for at, box in zip(firsts, stored.boxes, strict=True) if at is not None]
    if len(ranges) < len(firsts):
        _check_rectangles(stored)
        return
    at = gap(ranges, 0, prod(stored.shape))
    if at is not None or not ranges:
        raise WrongFieldError("boxes", f"do not hold each element of {list(stored.shape)} once: see element {at or 0}.")


def _check_rectangles(stored: Stored) -> None:
    """They hold each element once if they hold as many as there are, and no two hold the same."""
    if sum(box.numel for box in stored.boxes) != prod(stored.shape):
        raise WrongFieldError("boxes", f"do not hold each element of {list(stored.shape)} once.")
    beside: list[StoredBox] = []  # those that share rows with the next one
    compared = 0
    for box in sorted((box for box in stored.boxes if box.numel), key=lambda box: box.offsets[0]):
        beside = [other for other in beside if other.offsets[0] + other.sizes[0] > box.offsets[0]]
        compared += len(beside)
        if compared > _MOST_COMPARED:
            raise wrong("boxes", len(stored.boxes), "fewer that lie beside each other")
        for other in beside:
            if _overlap(box, other):
                both = " and ".join(str([list(each.offsets), list(each.sizes)]) for each in (other, box))
                raise WrongFieldError("boxes", f"hold elements of {list(stored.shape)} twice: see {both}.")
        beside.append(box)


def _overlap(one: StoredBox, other: StoredBox) -> bool:
    places = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + n and b < a + m for a, m, b, n in places)


def _in_one_piece(box: StoredBox, shape: tuple[int, ...]) -> bool:
    """Ones, a range, and then whole dimensions."""
    broken = False
    for size, length in zip(box.sizes, shape, strict=True):
        if broken and size != length:
            return False
        broken = broken or size != 1
    return True


def check_files(files: Mapping[str, File], tensors: Mapping[str, Stored]) -> None:
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
    """Where the ranges do not follow one another from `start` to `end`; None if they do."""
    at = start
    for first, last in sorted(ranges):
        if first != at:
            return min(first, at)
        at = last
    return None if at == end else min(at, end)
