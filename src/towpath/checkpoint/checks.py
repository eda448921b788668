"""Whether a checkpoint is still what was written: in full, or as far as it was read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from towpath.checkpoint import files, folders
from towpath.checkpoint.crc import combine
from towpath.checkpoint.manifest import Manifest, StoredBox, read_manifest
from towpath.checkpoint.storage import Range
from towpath.errors import CheckpointError

_AT_ONCE = 8 << 20

Progress = Callable[[int], None]  # told how many bytes were read


@dataclass(frozen=True, slots=True)
class Verdict:
    path: Path
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.problem is None


def latest(root: str | Path) -> Path | None:
    """The newest checkpoint in `root` whose manifest is sound and whose files are there and as long as they were."""
    for path in folders.checkpoints(folders.home(Path(root))):
        try:
            read_manifest(path).check_sizes(path)
        except CheckpointError:
            continue
        return path
    return None


def verify(path: str | Path, progress: Progress | None = None) -> Verdict:
    """Read every byte of one checkpoint."""
    folder = Path(path)
    try:
        manifest = read_manifest(folder)
        manifest.check_sizes(folder)
        for name, file in manifest.files.items():
            if _crc32(folder / name, 0, file.header_bytes, progress) != file.header_crc32:
                raise CheckpointError(f"{folder / name} is corrupted: its header is not what was written.")
        for name, stored in manifest.tensors.items():
            for box in stored.boxes:
                if _crc32(folder / box.file, box.start, box.numel * stored.itemsize, progress) != box.crc32:
                    raise CheckpointError(_corrupted(folder, box, name))
    except CheckpointError as error:
        return Verdict(folder, str(error))
    return Verdict(folder, None)


def _corrupted(folder: Path, box: StoredBox, name: str) -> str:
    return f"{folder / box.file} is corrupted: {name} is not what was written."


def _crc32(path: Path, start: int, count: int, progress: Progress | None) -> int:
    crc, buffer = 0, memoryview(bytearray(min(count, _AT_ONCE)))
    while count:
        part = buffer[: min(count, _AT_ONCE)]
        files.take(path, start, part)
        crc = zlib.crc32(part, crc)
        start, count = start + len(part), count - len(part)
        if progress is not None:
            progress(len(part))
    return crc


def check_ranges(folder: Path, manifest: Manifest, by_rank: Iterable[Iterable[Range]]) -> str | None:
    """What several ranks read, put together: the first box that is not what was written.

    Nodes that read the same bytes must have read alike; a box that nobody read to the end is not judged.
    """
    read: dict[tuple[str, int], dict[tuple[int, int], int]] = {}
    for ranges in by_rank:
        for r in ranges:
            before = read.setdefault((r.name, r.box), {}).setdefault((r.start, r.end), r.crc32)
            if before != r.crc32:
                box = manifest.tensors[r.name].boxes[r.box]
                return f"{_corrupted(folder, box, r.name)} Two nodes read different bytes."
    for (name, number), parts in read.items():
        stored = manifest.tensors[name]
        box = stored.boxes[number]
        whole = _whole(parts, box.numel * stored.itemsize)
        if whole is not None and whole != box.crc32:
            return _corrupted(folder, box, name)
    return None


def _whole(parts: Mapping[tuple[int, int], int], count_bytes: int) -> int | None:
    """The checksum of all bytes, if the parts follow one another from the first to the last."""
    at, crc = 0, 0
    for (start, end), part in sorted(parts.items()):
        if start != at:
            return None
        at, crc = end, combine(crc, part, end - start)
    return crc if at == count_bytes else None
