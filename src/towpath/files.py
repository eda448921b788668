"""Files that a command writes: checks before the work begins, and folders that survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path

from towpath.errors import ConfigError


def check_output_file(option: str, path: Path | None) -> None:
    """Raise before a long computation if its result could not be written to `path`."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path}: that is a folder. Name a file in it.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {folder}. Make it first, or name another file.")


def write_output_file(option: str, path: Path | None, text: str) -> None:
    """Write `text` to the file that `option` names, if it names one."""
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}. Free space, or name another file.") from None


def make_folder(folder: Path) -> None:
    """Create `folder` and those above it that are missing, so that they survive a power failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush `folder` to disk, so that files created or renamed in it survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
