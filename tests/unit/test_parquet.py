"""Parquet files beside other texts: which rows are documents, in which order, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from towpath.errors import ConfigError
from towpath.train.config import DataConfig
from towpath.train.data import corpus


def _write(path: Path, columns: dict[str, list[Any]], rows_of_a_group: int = 2) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_of_a_group)


def _documents(*sources: Path, column: str = "text") -> list[bytes]:
    found = corpus.find(DataConfig(text=tuple(map(str, sources)), column=column))
    pieces = list(found.pieces())
    assert sum(piece.size for piece in pieces) == found.size  # what a progress bar counts
    return [text.content for piece in pieces for text in piece.read().texts]


def test_rows_are_documents_in_their_order_between_the_files_beside_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    _write(tmp_path / "b.parquet", {"text": ["one", "two", None, "", "fünf"], "id": [1, 2, 3, 4, 5]})
    (tmp_path / "c.jsonl").write_text('{"text": "last"}\n')
    assert _documents(tmp_path) == [b"first", b"one", b"two", "fünf".encode(), b"last"]


def test_the_column_is_part_of_what_a_cache_goes_by(tmp_path: Path) -> None:
    _write(tmp_path / "b.parquet", {"text": ["one"], "title": ["eins"]})
    assert _documents(tmp_path / "b.parquet", column="title") == [b"eins"]
    first, second = (
        corpus.find(DataConfig(text=(str(tmp_path),), column=column)).identity() for column in ("text", "title")
    )
    assert first != second


@pytest.mark.parametrize(
    ("column", "told"),
    [("nope", "has no column 'nope'; it has text, id"), ("id", "column 'id' of .* holds int64, not text")],
)
def test_a_column_that_is_not_there_or_no_text_is_refused(tmp_path: Path, column: str, told: str) -> None:
    _write(tmp_path / "b.parquet", {"text": ["one"], "id": [1]})
    with pytest.raises(ConfigError, match=told):
        _documents(tmp_path, column=column)


def test_what_only_has_the_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.parquet").write_text("not at all")
    with pytest.raises(ConfigError, match="no Parquet file that can be read"):
        _documents(tmp_path)
