"""The texts of a corpus, in a fixed order: files, folders, globs, the rows of a dataset, or Python's standard library.

A file is a document; in JSON lines and Parquet each row is one. A corpus is read in pieces of about a MiB: many small
files, or a part of a large file that is cut at the end of a line. No file is held in memory as a whole. The pieces are
the same on every machine and for any number of workers.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from towpath.errors import ConfigError
from towpath.train.config import DataConfig

PIECE_BYTES = 1 << 20
LONGEST_LINE_BYTES = 1 << 26  # of JSON lines, which are held in memory one by one

# How far a cut looks for the end of a line.
_REACH_BYTES = 1 << 18
# The part of a file that is searched for NUL bytes, to tell whether it is text.
_BEGINNING_BYTES = 1 << 13
# The part of a file that tells whether it holds JSON lines under another name.
_LINES_LOOKED_AT, _LINE_BYTES_LOOKED_AT = 8, 1 << 20

_ROWS_OF_A_PIECE = 256
_BOM = b"\xef\xbb\xbf"

# The suffixes of text files in folders. Files without a suffix count too: README, Makefile, most corpora of one file.
_SUFFIXES = """
.adoc .asm .bash .bib .c .cc .cfg .cl .clj .cmake .cpp .cs .css .csv .cu .cuh .cxx .d .dart .el .erl .ex .exs .f .f90
.go .gradle .h .hh .hpp .hs .htm .html .ini .ipynb .java .jl .js .json .jsonl .jsx .kt .lisp .lua .m .markdown .md .ml
.mli .ndjson .nim .org .parquet .php .pl .pm .proto .py .pyi .pyx .r .rb .rs .rst .s .scala .scm .sh .sql .srt .swift
.tcl .tex .text .toml .ts .tsv .tsx .txt .v .vhd .vim .wiki .xml .yaml .yml .zig
"""
SUFFIXES = frozenset(_SUFFIXES.split())
JSON_LINES, PARQUET = frozenset((".jsonl", ".ndjson")), ".parquet"

# Parts of the standard library that differ between machines: distributions split packages off, and builds write files.
_WITHOUT = "site-packages dist-packages test tests idlelib lib2to3 distutils ensurepip tkinter turtledemo lib-dynload"
_STDLIB_WITHOUT = frozenset(_WITHOUT.split())
_STDLIB_WITHOUT_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize", "turtle")


@dataclass(frozen=True, slots=True)
class Text:
    """Text of a document. `ends`: whether it is the document's last part."""

    content: bytes
    ends: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceContent:
    """The texts of a piece, and how many files were left out because they hold NUL bytes."""

    texts: list[Text]
    binary: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a corpus. It names what it reads, so a worker process can receive it and read it there."""

    size: int
    read: Callable[[], PieceContent]


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of a corpus. `checked`: a binary file is left out; a file that is named itself is taken as it is."""

    path: str
    size_bytes: int
    changed_ns: int
    checked: bool
    column: str = ""  # the field of JSON lines, or column of Parquet, with the text; empty: the whole file is text

    @staticmethod
    def at(path: str, *, checked: bool, column: str = "") -> File:
        """Return the file at `path`, with its size and time."""
        try:
            status = Path(path).stat()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}. Check the path and its rights.") from None
        return File(path=path, size_bytes=status.st_size, changed_ns=status.st_mtime_ns, checked=checked, column=column)

    @property
    def json_lines(self) -> bool:
        """Whether each line is a JSON object whose field `column` is a document."""
        return bool(self.column) and Path(self.path).suffix.lower() in JSON_LINES

    @property
    def parquet(self) -> bool:
        """Whether each row is a document."""
        return Path(self.path).suffix.lower() == PARQUET

    def identity(self) -> tuple[object, ...]:
        """Return what changes when the texts of the file may have changed."""
        found = (os.path.realpath(self.path), self.size_bytes, self.changed_ns, self.checked)
        return (*found, self.column) if self.json_lines or self.parquet else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a file: from the end of the first line after `start` to the end of the first line after `stop`."""

    file: File
    start: int
    stop: int

    @property
    def ends(self) -> bool:
        """Whether it is the last part of its file."""
        return self.stop == self.file.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A corpus of files. `skipped`: how many files in its folders do not look like text by their names."""

    about: str
    files: tuple[File, ...]
    skipped: int = 0

    @staticmethod
    def named(sources: Sequence[str], column: str = "text") -> Files:
        """Return a corpus of files, folders and globs, in this order. The files of each are sorted.

        A file that several sources name is read once.

        Args:
            sources: Paths and globs.
            column: The field of JSON lines, or the column of Parquet files, with the text. If it is empty, JSON lines
                are read as text.

        Raises:
            ConfigError: A source does not exist, or there is no text.
        """
        found: dict[str, File] = {}
        skipped = 0
        for source in sources:
            paths, others, checked = _matches(source)
            skipped += others
            for path in paths:
                found.setdefault(os.path.realpath(path), File.at(path, checked=checked, column=column))
        about = ", ".join(sources)
        if not any(file.size_bytes for file in found.values()):
            raise ConfigError(f"no text in {about}: {len(found)} files, and {skipped} not text by their names.")
        return Files(about=about, files=tuple(found.values()), skipped=skipped)

    @staticmethod
    def of_python() -> Files:
        """Return the sources of Python's standard library."""
        root = sysconfig.get_path("stdlib")
        paths = [
            path
            for path in _walk(root, without=_STDLIB_WITHOUT)
            if path.endswith(".py") and not Path(path).name.startswith(_STDLIB_WITHOUT_FILES)
        ]
        if not paths:
            raise ConfigError(
                f"no sources of Python's standard library in {root}: name texts of your own in data.text."
            )
        about = "the sources of Python's standard library"
        return Files(about=about, files=tuple(File.at(path, checked=False) for path in paths))

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def identity(self) -> list[object]:
        """Return what changes when the texts may have changed."""
        return [file.identity() for file in self.files]

    def pieces(self) -> Iterator[Piece]:
        """Yield the corpus in pieces."""
        parts: list[Part] = []
        size = 0

        def gathered() -> Iterator[Piece]:
            nonlocal size
            if parts:
                yield Piece(size, partial(_read_parts, tuple(parts)))
                parts.clear()
                size = 0

        for file in self.files:
            if file.parquet:
                yield from gathered()
                yield from _row_groups(file)
                continue
            for start in range(0, file.size_bytes, PIECE_BYTES):
                stop = min(start + PIECE_BYTES, file.size_bytes)
                parts.append(Part(file=file, start=start, stop=stop))
                size += stop - start
                if size >= PIECE_BYTES:
                    yield from gathered()
        yield from gathered()


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRows:
    """A corpus of the rows of a Hugging Face dataset on disk. The text of one column is a document."""

    folder: str
    column: str
    size: int
    skipped: int = 0

    @staticmethod
    def of(folder: str, column: str) -> DatasetRows:
        """Open the dataset in `folder`, which `save_to_disk()` wrote."""
        rows = len(_dataset(folder, column))
        if not rows:
            raise ConfigError(f"the dataset {folder} has no rows.")
        return DatasetRows(folder=folder, column=column, size=rows)

    @property
    def about(self) -> str:
        """The name of the corpus in messages."""
        return f"column {self.column} of the dataset {self.folder}"

    def identity(self) -> list[object]:
        """Return what changes when the texts may have changed."""
        root = Path(self.folder).expanduser()
        files = sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith("cache-"))
        found = [(str(path.resolve()), path.stat()) for path in files]
        return [self.column, *((path, status.st_size, status.st_mtime_ns) for path, status in found)]

    def pieces(self) -> Iterator[Piece]:
        """Yield the corpus in pieces."""
        for first in range(0, self.size, _ROWS_OF_A_PIECE):
            size = min(_ROWS_OF_A_PIECE, self.size - first)
            yield Piece(size, partial(_read_rows, self.folder, self.column, first, size))


Corpus = Files | DatasetRows


def find(config: DataConfig) -> Corpus:
    """Return the corpus that `config` names, or the sources of the standard library."""
    if config.dataset:
        return DatasetRows.of(config.dataset, config.column)
    if config.text:
        return Files.named(config.text, config.column)
    return Files.of_python()


# Finding files --------------------------------------------------------------------------------------------------------


def _matches(source: str) -> tuple[list[str], int, bool]:
    """Return the files of a source, the number of files skipped by their names, and whether to check the files."""
    path = os.path.expanduser(source)  # noqa: PTH111 (a Path would lose a glob's last slash)
    if Path(path).is_dir():
        files = list(_walk(path))
        named = [(file, Path(file)) for file in files]
        texts = [
            file
            for file, name in named
            if not name.name.startswith(".") and (name.suffix.lower() in SUFFIXES or not name.suffix)
        ]
        return texts, len(files) - len(texts), True
    if Path(path).exists():
        return [path], 0, False
    matched = sorted(filter(os.path.isfile, glob.iglob(path, recursive=True)), key=_path_parts)  # noqa: PTH207
    if not matched:
        what = "matches no file" if glob.has_magic(path) else "is not there: expected a file, a folder or a glob"
        raise ConfigError(f"{source} {what} (looked in {Path.cwd()}).")
    return matched, 0, True


def _walk(root: str, without: Iterable[str] = ()) -> Iterator[str]:
    """Yield the files below `root`, sorted by folder and name, without hidden folders and links to folders."""

    def refuse(error: OSError) -> None:
        raise ConfigError(f"cannot read the folder {error.filename}: {error.strerror}.")

    found: list[str] = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        found += [os.path.join(folder, name) for name in names]  # noqa: PTH118 (a million of them)
    return iter(sorted(found, key=_path_parts))


def _path_parts(path: str) -> tuple[str, ...]:
    return Path(path).parts


# Text files and JSON lines --------------------------------------------------------------------------------------------


def _read_parts(parts: Sequence[Part]) -> PieceContent:
    texts: list[Text] = []
    binary = 0
    for part in parts:
        found = _content(part)
        if found is None:
            binary += part.ends
        elif part.file.json_lines:
            texts += _json_texts(part.file, *found)
        else:
            texts.append(Text(found[0], part.ends))
    return PieceContent(texts=texts, binary=binary)


def _content(part: Part) -> tuple[bytes, int] | None:
    """Return the bytes of a part and where they begin in its file, or None if the file is binary and checked."""
    file = part.file
    try:
        with Path(file.path).open("rb") as opened:
            if file.checked and b"\0" in opened.read(_BEGINNING_BYTES):
                return None
            if part.start == 0 and file.column and not file.json_lines and _looks_like_json_lines(opened):
                raise ConfigError(
                    f"{file.path}: got a JSON object on each of its first lines, expected text. Call the file .jsonl, "
                    f"and the field {file.column!r} of each line is read (data.column, or --column); or set that to "
                    "'', to train on the lines as they are, braces and all."
                )
            start, stop = (_cut(opened, place, file) for place in (part.start, part.stop))
            opened.seek(start)
            content = opened.read(stop - start)
    except OSError as error:
        raise ConfigError(f"cannot read {file.path}: {error.strerror}.") from None
    if len(content) < stop - start:
        raise ConfigError(f"{file.path} became shorter while it was read: {file.size_bytes} bytes before. Try again.")
    return content, start


def _cut(opened: BinaryIO, place: int, file: File) -> int:
    """Return the end of the first line that ends at `place` or after it.

    A line of text that ends too far away is cut between two characters. A line of JSON is never cut.
    """
    if place == 0 or place >= file.size_bytes:
        return min(place, file.size_bytes)
    opened.seek(place - 1)
    read = 0
    while window := opened.read(_REACH_BYTES):
        newline = window.find(b"\n")
        if newline >= 0:
            return place + read + newline
        if not file.json_lines:
            following = window[1:4]
            return place + next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))
        read += len(window)
        if read > LONGEST_LINE_BYTES:
            raise _bad_line(file, place, 0, f"a line of more than {read} bytes")
    return file.size_bytes if file.json_lines else place


def _looks_like_json_lines(opened: BinaryIO) -> bool:
    """Return whether each of the first lines, and more than one, is a JSON object."""
    opened.seek(0)
    if not opened.read(64).removeprefix(_BOM).lstrip().startswith(b"{"):
        return False
    opened.seek(0)
    lines = [opened.readline(_LINE_BYTES_LOOKED_AT).removeprefix(_BOM) for _ in range(_LINES_LOOKED_AT)]
    lines = [line for line in lines if line.strip()]
    try:
        return len(lines) > 1 and all(isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


def _json_texts(file: File, content: bytes, start: int) -> list[Text]:
    """Return the texts of whole lines that begin at byte `start` of `file`. Rows without a text are left out."""
    found: list[Text] = []
    lines = (content if start else content.removeprefix(_BOM)).split(b"\n")
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            text = _json_text(line, file.column)
        except ValueError as error:
            raise _bad_line(file, start, number, str(error)) from None
        if text:
            found.append(_document(text))
    return found


def _json_text(line: bytes, column: str) -> str | None:
    """Return the text of a line, or raise a ValueError that says what the line holds instead."""
    try:
        row: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"what is not UTF-8 ({error.reason})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{line[:40]!r}, which is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(_kind_of(row))
    fields: dict[str, Any] = row
    if column not in fields:
        raise ValueError(f"an object with {', '.join(map(repr, list(fields)[:8])) or 'no fields'}")
    text = fields[column]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"an object whose field {column!r} is {_kind_of(text)}")
    return text


def _kind_of(value: Any) -> str:
    return "an object" if isinstance(value, dict) else "an array" if isinstance(value, list) else json.dumps(value)[:40]


def _bad_line(file: File, start: int, number: int, got: str) -> ConfigError:
    """Return the error for the line that comes `number` lines after byte `start`."""
    line = number + 1
    with Path(file.path).open("rb") as opened:
        while start > 0 and (block := opened.read(min(start, 1 << 20))):
            line += block.count(b"\n")
            start -= len(block)
    return ConfigError(
        f"{file.path}, line {line}: got {got}; expected a JSON object with the text in its field {file.column!r} "
        "(data.column, or --column). To train on the lines as they are, braces and all, set that to ''."
    )


def _document(text: str) -> Text:
    # JSON, Arrow and Python allow lone surrogates in texts. They have no bytes in UTF-8.
    return Text(text.encode("utf-8", errors="replace"), True)


# Parquet and datasets -------------------------------------------------------------------------------------------------


def _row_groups(file: File) -> Iterator[Piece]:
    count = _parquet(file.path, file.column).num_row_groups
    for number in range(count):
        size = file.size_bytes * (number + 1) // count - file.size_bytes * number // count
        yield Piece(size, partial(_read_row_group, file.path, file.column, number))


def _read_row_group(path: str, column: str, number: int) -> PieceContent:
    try:
        table = _parquet(path, column).read_row_group(number, columns=[column])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}.") from None
    rows: list[str | None] = table.column(0).to_pylist()
    return PieceContent(texts=[_document(row) for row in rows if row])


@functools.lru_cache(maxsize=4)
def _parquet(path: str, column: str) -> Any:
    """Return the open file, which has such a column of text."""
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


def _read_rows(folder: str, column: str, first: int, size: int) -> PieceContent:
    rows: list[str | None] = _dataset(folder, column)[first : first + size][column]
    return PieceContent(texts=[_document(row) for row in rows if row])


@functools.lru_cache(maxsize=1)
def _dataset(folder: str, column: str) -> Any:
    """Return the dataset in `folder`, mapped into memory, with this column only."""
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
        if "train" not in dataset:
            splits = ", ".join(f"{folder.rstrip('/')}/{name}" for name in dataset)
            raise ConfigError(f"the dataset {folder} has no split 'train': name one of {splits}.")
        dataset = dataset["train"]
    if column not in dataset.column_names:
        raise ConfigError(f"the dataset {folder} has no column {column!r}; it has {', '.join(dataset.column_names)}.")
    kind: Any = dataset.features[column]
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        raise ConfigError(f"column {column!r} of the dataset {folder} holds {kind}, not text.")
    return dataset.select_columns(column).with_format(None)
