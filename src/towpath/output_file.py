"""Where a result is to be written: what a mistake there is found out before anything is computed."""

from __future__ import annotations

from pathlib import Path

from towpath.errors import ConfigError


def check_output_file(option: str, path: Path | None) -> None:
    """Refuse a `path`, if there is one, at which no file can be made. `option`: by which it was given."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path}: that is a folder. Name a file in it.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {folder}. Make it first, or name another file.")
