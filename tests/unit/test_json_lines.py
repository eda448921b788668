"""JSON lines: each line's text is a document, in any file and however it is cut; what is no such line is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from towpath.errors import ConfigError
from towpath.train.config import DataConfig
from towpath.train.data import corpus
from towpath.train.data.corpus import Files
from towpath.train.data.loader import open_tokens
from towpath.train.data.prepare import prepare

ROWS = [{"id": i, "text": f"document {i}: ünïcode 文字\nin {'three' * (i % 7)}\r\nlines"} for i in range(300)]


def _file(path: Path, rows: list[Any], end: str = "\n") -> str:
    path.write_text(end.join(json.dumps(row, ensure_ascii=bool(i % 2)) for i, row in enumerate(rows)), newline="")
    return str(path)


def _documents(path: str, column: str = "text") -> list[str]:
    return [text.content.decode() for piece in Files.named([path], column).pieces() for text in piece.read().texts]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"], ids=["lines", "windows", "empty-lines"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.NDJSON"])
def test_each_line_s_text_is_a_document(tmp_path: Path, name: str, end: str) -> None:
    path = _file(tmp_path / name, ROWS, end)
    assert _documents(path) == [row["text"] for row in ROWS]
    prepare(Files.named([path]), "bytes", tmp_path / "tokens")
    expected = "".join(f"{row['text']}\0" for row in ROWS).encode()
    assert (tmp_path / "tokens" / "tokens-00000.bin").read_bytes() == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(texts=st.lists(st.text(max_size=60), max_size=20), piece=st.integers(1, 90), reach=st.integers(1, 40))
def test_no_cut_goes_through_a_line(tmp_path: Path, texts: list[str], piece: int, reach: int) -> None:
    path = _file(tmp_path / "rows.jsonl", [{"text": "first"}, *({"text": text} for text in texts)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE_BYTES", piece)
        patch.setattr(corpus, "_REACH_BYTES", reach)
        assert _documents(path) == ["first", *filter(None, texts)]


def test_rows_without_a_text_and_a_byte_order_mark_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": null}\n  \n{"text": ""}\n{"text": "\\ud800 two"}')
    assert _documents(str(path)) == ["one", "? two"]


def test_the_column_says_which_field_and_is_part_of_what_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = _file(tmp_path / "rows.jsonl", [{"text": "English. " * 9, "german": "Deutsch. " * 9}])

    def tokens(column: str) -> bytes:
        read = open_tokens(DataConfig(text=(path,), column=column, held_out=0.0), 8)
        return bytes(read.train.batch(0, 1)[0].flatten().tolist())

    assert b"Engl" in tokens("text") * 2 and b"Deut" in tokens("german") * 2
    assert b'{"text"' in _documents(path, "")[0].encode()


@pytest.mark.parametrize(
    ("line", "got"),
    [
        (b'{"body": "x", "id": 3}', "an object with 'body', 'id'"),
        (b"{}", "an object with no fields"),
        (b'{"text": 3}', "an object whose field 'text' is 3"),
        (b'{"text": ["x"]}', "an object whose field 'text' is an array"),
        (b'["x"]', "an array"),
        (b'"x"', '"x"'),
        (b'{"text": "x"', """b'{"text": "x"', which is not JSON"""),
        (b'{"text": "\xff"}', "what is not UTF-8"),
        (b'{"text": ' + b"[" * 100_000, "which is not JSON"),
        (b'{"text": ' + b"9" * 5000 + b"}", "which is not JSON"),
    ],
    ids=["field", "empty", "number", "array-in", "array", "string", "cut", "bytes", "deep", "long-number"],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, got: str) -> None:
    monkeypatch.setattr(corpus, "PIECE_BYTES", 100)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' * 40 + b"\n" + line + b'\n{"text": "fine"}\n')
    with pytest.raises(ConfigError) as caught:
        _documents(str(path))
    told = str(caught.value)
    assert told.startswith(f"{path}, line 42: got ") and got in told
    assert "expected a JSON object with the text in its field 'text' (data.column, or --column)" in told
    assert len(told) < 500 + len(str(path))


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE_BYTES", 100)
    monkeypatch.setattr(corpus, "_REACH_BYTES", 100)
    monkeypatch.setattr(corpus, "LONGEST_LINE_BYTES", 1000)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' * 3 + '{"text": "' + "x" * 2000)
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 4: got a line of more than 1100 bytes"):
        _documents(str(path))


@pytest.mark.parametrize("name", ["rows.txt", "rows.json", "rows"])
@pytest.mark.parametrize("within", [True, False], ids=["found", "named"])
def test_json_lines_by_another_name_are_not_trained_with_their_braces(tmp_path: Path, name: str, within: bool) -> None:
    path = _file(tmp_path / name, ROWS)
    source = str(tmp_path) if within else path
    with pytest.raises(ConfigError, match=r"got a JSON object on each of its first lines.*Call the file \.jsonl"):
        _documents(source)
    assert "".join(_documents(source, "")) == (tmp_path / name).read_bytes().decode()


@pytest.mark.parametrize(
    "text",
    [
        '{"one": "object"}',
        '{\n  "one": "object"\n}\n',
        "{}\nprose\n",
        "[1]\n[2]\n",
        "{x}\n{y}\n",
        '{"a": 1}\n' * 3 + "x",
    ],
    ids=["one", "indented", "prose", "arrays", "braces", "ends-otherwise"],
)
def test_other_texts_with_braces_are_texts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "text.json"
    path.write_text(text)
    assert _documents(str(path)) == [text]


def test_a_dataset_has_a_column() -> None:
    with pytest.raises(ConfigError, match=r"data.column = '': expected the name of the dataset's column"):
        DataConfig(dataset="folder", column="")
