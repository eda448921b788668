"""Parquet files as text: each row is a document, the text of one column. A piece is a row group, read whole."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from towpath.errors import ConfigError
from towpath.train.data.text_pieces import Read, Text

SUFFIX = ".parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    path: str
    column: str
    number: int
    size: int  # its share of the file's bytes

    def read(self) -> Read:
        try:
            table = _opened(self.path, self.column).read_row_group(self.number, columns=[self.column])
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error}.") from None
        rows: list[str | None] = table.column(0).to_pylist()
        return Read(texts=[Text(row.encode("utf-8", errors="replace"), True) for row in rows if row])


def row_groups(path: str, column: str, size_bytes: int) -> Iterator[RowGroup]:
    count = _opened(path, column).num_row_groups
    for number in range(count):
        size = size_bytes * (number + 1) // count - size_bytes * number // count
        yield RowGroup(path=path, column=column, number=number, size=size)


@functools.lru_cache(maxsize=4)
def _opened(path: str, column: str) -> Any:
    """The file, which has such a column with text."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{path} needs a library: pip install 'towpath[hf]'.") from None
    try:
        file: Any = parquet.ParquetFile(path)
    except (OSError, arrow.ArrowException) as error:
        raise ConfigError(f"{path} is no Parquet file that can be read: {' '.join(str(error).split())}.") from None
    names = file.schema_arrow.names
    if column not in names:
        raise ConfigError(f"{path} has no column {column!r}; it has {', '.join(names)}. Set data.column, or --column.")
    kind = file.schema_arrow.field(column).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise ConfigError(f"column {column!r} of {path} holds {kind}, not text.")
    return file
