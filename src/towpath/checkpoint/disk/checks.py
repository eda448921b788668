"""Whether a checkpoint is still what was written: in full, or as far as it was read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from towpath.checkpoint.dcp.storage import Range
from towpath.checkpoint.disk import files, folders
from towpath.checkpoint.disk.crc import combine
from towpath.checkpoint.disk.manifest import Manifest, read_manifest
from towpath.checkpoint.disk.safe_open import DamagedError
from towpath.checkpoint.disk.stored import StoredBox
from towpath.logs import logger

_LOG = logger("checkpoint")

Progress = Callable[[int], None]  # told how many bytes were read


@dataclass(frozen=True, slots=True)
class Verdict:
    path: Path
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.problem is None


def latest(root: str | Path, *, quiet: bool = False) -> Path | None:
    """The newest checkpoint in `root` whose manifest is sound and whose files are there and as long as they were.

    Those that it passes over it logs, unless `quiet`.
    """
    for path in folders.checkpoints(folders.home(Path(root))):
        try:
            folders.refuse_link(path)
            read_manifest(path).check_sizes(path)
        except DamagedError as error:
            if not quiet:
                _LOG.warning("%s was passed over: %s", path.name, error)
            continue
        return path
    return None


def verify(path: str | Path, progress: Progress | None = None) -> Verdict:
    """Read every byte of one checkpoint."""
    folder = Path(path)

    def told(part: memoryview) -> None:
        if progress is not None:
            progress(len(part))

    try:
        manifest = read_manifest(folder)
        manifest.check_sizes(folder)
        for name, file in manifest.files.items():
            if files.checksum(folder / name, 0, file.header_bytes, told) != file.header_crc32:
                raise DamagedError(f"{folder / name} is corrupted: its header is not what was written.")
        for name, stored in manifest.tensors.items():
            for box in stored.boxes:
                size = box.numel * stored.itemsize
                if files.checksum(folder / box.file, box.start, size, told) != box.crc32:
                    raise DamagedError(_corrupted(folder, box, name))
    except DamagedError as error:
        return Verdict(folder, str(error))
    return Verdict(folder, None)


def _corrupted(folder: Path, box: StoredBox, name: str) -> str:
    return f"{folder / box.file} is corrupted: {name} is not what was written."


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
