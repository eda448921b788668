"""The folder of a run: which checkpoints are in it, how one is published, and which are let go.

step-000120                        a checkpoint; it was whole when it got this name
step-000120.partial-1f3a…          being written, or left by a run that died
step-000120.replaced-1f3a…         the one before, for the moment in which another takes its name
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from towpath.checkpoint.disk.manifest import NAME
from towpath.checkpoint.disk.safe_open import DamagedError, is_folder
from towpath.errors import CheckpointError
from towpath.files import sync_folder

IN_RUN = "checkpoints"  # where `towpath train` keeps them, in the folder of a run

_CHECKPOINT = re.compile(r"step-([0-9]+)")
_PARTIAL = re.compile(r"step-[0-9]+\.partial-\w+")
_REPLACED = re.compile(r"(step-[0-9]+)\.replaced-\w+")

_IN_USE: set[Path] = set()  # partial ones, being written by this process


def in_use(partial: Path) -> None:
    """Keep `sweep` of this process from it."""
    _IN_USE.add(partial.absolute())


def checkpoint_of(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def partial_of(root: Path, step: int, mark: str) -> Path:
    return root / f"step-{step:06d}.partial-{mark}"


def is_checkpoint(path: Path) -> bool:
    """By its name, or because it has a manifest."""
    return _CHECKPOINT.fullmatch(path.name) is not None or os.path.lexists(path / NAME)


def step_of(path: Path) -> int:
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else -1


def checkpoints(root: Path) -> list[Path]:
    """The newest first."""
    try:
        found = [p for p in root.iterdir() if _CHECKPOINT.fullmatch(p.name) and is_folder(p)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{root}: cannot be searched for checkpoints ({error}).") from error
    return sorted(found, key=step_of, reverse=True)


def refuse_link(checkpoint: Path) -> None:
    """One that was found, not named: where it leads to may be anything."""
    if checkpoint.is_symlink():
        raise DamagedError(
            f"{checkpoint} is a symbolic link, which the search does not follow. Name it, or its target."
        )


def home(where: Path) -> Path:
    """The folder that checkpoints are in: the one that was named, or, of a run's folder, the one in it."""
    inside = where / IN_RUN
    return inside if is_folder(inside) and not checkpoints(where) else where


def param_sync(partial: Path, final: Path) -> None:
    """Give a whole checkpoint its name, in one step. One that has it already goes when the new one is there."""
    before = final.with_name(f"{final.name}.replaced-{uuid.uuid4().hex[:8]}") if final.exists() else None
    if before is not None:
        final.rename(before)
    partial.rename(final)
    sync_folder(final.parent)
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)


def sweep(root: Path) -> list[Path]:
    """Take away what runs that died have left; nobody else may be writing. What they were replacing comes back."""
    swept: list[Path] = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        replaced = _REPLACED.fullmatch(path.name)
        if replaced is not None and not (root / replaced[1]).exists():
            path.rename(root / replaced[1])
        elif replaced is not None or (_PARTIAL.fullmatch(path.name) and path.absolute() not in _IN_USE):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def let_go(root: Path, step: int, keep_last: int | None, keep_every: int | None) -> list[Path]:
    """After `step` was published: the older ones go that nobody wants to keep. Later ones are none of our business."""
    gone: list[Path] = []
    for path in _superfluous(root, step, keep_last, keep_every):
        # Renamed first: one that is taken away half must not pass for a checkpoint.
        doomed = partial_of(root, step_of(path), uuid.uuid4().hex[:8])
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        gone.append(path)
    return gone


def _superfluous(root: Path, step: int, keep_last: int | None, keep_every: int | None) -> Iterator[Path]:
    if keep_last is None:
        return
    before = [p for p in checkpoints(root) if step_of(p) <= step]
    for path in before[max(keep_last, 1) :]:
        if not keep_every or step_of(path) % keep_every:
            yield path
