"""Check whether a checkpoint is what was written: every byte of it, or what several ranks have read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from towpath.checkpoint import folders, safetensors
from towpath.checkpoint.dcp import ReadRange
from towpath.checkpoint.manifest import Manifest, read_manifest
from towpath.checkpoint.safe_open import DamagedError
from towpath.checkpoint.safetensors import corrupted
from towpath.logs import logger

_LOG = logger("checkpoint")

Progress = Callable[[int], None]  # receives the number of bytes that were read


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of `verify`.

    Attributes:
        path: The folder of the checkpoint.
        problem: What is damaged, or None.
    """

    path: Path
    problem: str | None

    @property
    def ok(self) -> bool:
        """Whether every byte is what was written."""
        return self.problem is None


def latest(root: str | Path, *, quiet: bool = False) -> Path | None:
    """Return the newest checkpoint in a folder whose manifest is valid and whose files are complete.

    It reads only manifests and sizes. Use `verify` to read the files.

    Args:
        root: The folder of checkpoints, or of a `towpath train` run.
        quiet: Do not log which checkpoints are damaged.

    Returns:
        The folder of the checkpoint, or None if there is none.

    Raises:
        CheckpointError: The folder cannot be searched.
    """
    for path in folders.checkpoints(folders.search_folder(Path(root))):
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
    """Read every byte of a checkpoint and compare it with its checksum.

    Args:
        path: The folder of the checkpoint.
        progress: Called with the number of bytes in each part that was read.

    Returns:
        The verdict, with the file that is damaged if any.
    """
    folder = Path(path)

    def receive(part: memoryview) -> None:
        if progress is not None:
            progress(len(part))

    try:
        manifest = read_manifest(folder)
        manifest.check_sizes(folder)
        for name, file in manifest.files.items():
            if safetensors.checksum(folder / name, 0, file.header_bytes, receive) != file.header_crc32:
                raise DamagedError(f"{folder / name} is corrupted: its header is not what was written.")
        for name, stored in manifest.tensors.items():
            for box in stored.boxes:
                size = box.numel * stored.itemsize
                if safetensors.checksum(folder / box.file, box.start, size, receive) != box.crc32:
                    raise DamagedError(corrupted(folder, box, name))
    except DamagedError as error:
        return Verdict(folder, str(error))
    return Verdict(folder, None)


def check_ranges(folder: Path, manifest: Manifest, by_rank: Iterable[Iterable[ReadRange]]) -> str | None:
    """Return the first problem with what several ranks have read, or None.

    Nodes that read the same bytes must get the same checksum. A box that was not read completely is not checked.
    """
    read: dict[tuple[str, int], dict[tuple[int, int], int]] = {}
    for ranges in by_rank:
        for r in ranges:
            before = read.setdefault((r.name, r.box), {}).setdefault((r.start, r.end), r.crc32)
            if before != r.crc32:
                box = manifest.tensors[r.name].boxes[r.box]
                return f"{corrupted(folder, box, r.name)} Two nodes read different bytes."
    for (name, number), parts in read.items():
        stored = manifest.tensors[name]
        box = stored.boxes[number]
        crc = _combined(parts, box.numel * stored.itemsize)
        if crc is not None and crc != box.crc32:
            return corrupted(folder, box, name)
    return None


def _combined(parts: Mapping[tuple[int, int], int], count_bytes: int) -> int | None:
    """Return the checksum of all bytes, or None if the parts do not join from the first byte to the last."""
    at, crc = 0, 0
    for (start, end), part in sorted(parts.items()):
        if start != at:
            return None
        at, crc = end, safetensors.combine(crc, part, end - start)
    return crc if at == count_bytes else None
