"""A Hugging Face dataset on disk, as a corpus: each row is a document, the text of one column."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towpath.errors import ConfigError
from towpath.train.data.text_pieces import Read, Text

_ROWS_OF_A_PIECE = 256
_SPLIT = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    folder: str
    column: str
    size: int
    skipped: int = 0

    @staticmethod
    def of(folder: str, column: str) -> Rows:
        rows = len(_column(folder, column))
        if not rows:
            raise ConfigError(f"the dataset {folder} has no rows.")
        return Rows(folder=folder, column=column, size=rows)

    @property
    def about(self) -> str:
        return f"column {self.column} of the dataset {self.folder}"

    def identity(self) -> list[object]:
        root = Path(self.folder).expanduser()
        files = sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith("cache-"))
        told = [(str(path.resolve()), path.stat()) for path in files]
        return [self.column, *((path, stat.st_size, stat.st_mtime_ns) for path, stat in told)]

    def pieces(self) -> Iterator[RowsPiece]:
        for first in range(0, self.size, _ROWS_OF_A_PIECE):
            size = min(_ROWS_OF_A_PIECE, self.size - first)
            yield RowsPiece(folder=self.folder, column=self.column, first=first, size=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPiece:
    folder: str
    column: str
    first: int
    size: int

    def read(self) -> Read:
        rows: list[str | None] = _column(self.folder, self.column)[self.first : self.first + self.size][self.column]
        # A lone surrogate is text to Arrow and Python, but has no bytes in UTF-8.
        return Read(texts=[Text(row.encode("utf-8", errors="replace"), True) for row in rows if row])


@functools.lru_cache(maxsize=1)
def _column(folder: str, column: str) -> Any:
    """The dataset, memory-mapped, with this column alone."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"the dataset {folder} needs a library: pip install 'towpath[hf]'.") from None
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ConfigError(f"the dataset {folder} is not there: expected a folder that save_to_disk() made.")
    try:
        dataset: Any = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError, OSError, KeyError) as error:
        raise ConfigError(f"{folder} is not a dataset on disk: {error}. Expected what save_to_disk() made.") from None
    if isinstance(dataset, datasets.DatasetDict):
        if _SPLIT not in dataset:
            raise ConfigError(f"the dataset {folder} has no split 'train': name one of {_splits(folder, dataset)}.")
        dataset = dataset[_SPLIT]
    if column not in dataset.column_names:
        raise ConfigError(f"the dataset {folder} has no column {column!r}; it has {', '.join(dataset.column_names)}.")
    kind: Any = dataset.features[column]
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        raise ConfigError(f"column {column!r} of the dataset {folder} holds {kind}, not text.")
    return dataset.select_columns(column).with_format(None)


def _splits(folder: str, dataset: Any) -> str:
    return ", ".join(f"{folder.rstrip('/')}/{name}" for name in dataset)
