"""JSON lines as a corpus: on each line an object, one of whose fields is the text of a document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

from towpath.errors import ConfigError
from towpath.train.data.text_pieces import Text

SUFFIXES = frozenset((".jsonl", ".ndjson"))

# A line is held whole. What is longer is no such file.
LONGEST_LINE_BYTES = 1 << 26

_BOM = b"\xef\xbb\xbf"
# To tell such a file by its beginning: so many lines, of so many bytes each at most.
_LINES_LOOKED_AT = 8
_LOOKED_AT_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20


def texts(content: bytes, column: str, path: str, start: int) -> list[Text]:
    """Of the whole lines `content`, which begin at byte `start` of the file at `path`. Without a text: left out."""
    found: list[Text] = []
    for number, line in enumerate(_without_bom(content, start).split(b"\n")):
        if not line.strip():
            continue
        try:
            text = _text(line, column)
        except ValueError as error:
            raise refused(path, start, number, column, str(error)) from None
        if text:
            # A lone surrogate is text to JSON and Python, but has no bytes in UTF-8.
            found.append(Text(text.encode("utf-8", errors="replace"), True))
    return found


def refused(path: str, start: int, number: int, column: str, got: str) -> ConfigError:
    """`number`: lines between byte `start` and the one that is meant."""
    line = _line_ends(path, start) + number + 1
    return ConfigError(
        f"{path}, line {line}: got {got}; expected a JSON object with the text in its field {column!r} (data.column, "
        "or --column). To train on the lines as they are, braces and all, set that to ''."
    )


def looks_like_it(opened: BinaryIO) -> bool:
    """Whether a file of another name, from its beginning, holds objects on its first lines, and more than one."""
    if not opened.read(64).removeprefix(_BOM).lstrip().startswith(b"{"):
        return False
    opened.seek(0)
    lines = [opened.readline(_LOOKED_AT_BYTES).removeprefix(_BOM) for _ in range(_LINES_LOOKED_AT)]
    lines = [line for line in lines if line.strip()]
    return len(lines) > 1 and all(map(_is_object, lines))


def _without_bom(content: bytes, start: int) -> bytes:
    return content if start else content.removeprefix(_BOM)


def _text(line: bytes, column: str) -> str | None:
    """A ValueError says what the line holds instead."""
    try:
        row: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"what is not UTF-8 ({error.reason})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{line[:40]!r}, which is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(_named(row))
    fields: dict[str, Any] = row
    if column not in fields:
        raise ValueError(f"an object with {', '.join(map(repr, list(fields)[:8])) or 'no fields'}")
    text = fields[column]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"an object whose field {column!r} is {_named(text)}")
    return text


def _named(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    return json.dumps(value)[:40]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _line_ends(path: str, before: int) -> int:
    """Counted only when there is something to tell."""
    count = 0
    with Path(path).open("rb") as file:
        while before > 0 and (block := file.read(min(before, _BLOCK_BYTES))):
            count += block.count(b"\n")
            before -= len(block)
    return count
