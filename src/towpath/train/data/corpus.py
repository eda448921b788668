"""Which texts are read, in which order: files that are named, found in folders or matched by globs, rows of a dataset,
or the sources of Python's standard library.

A file is a document. A piece is many small ones, or a part of a large one that is cut at a line's end: no file is ever
held whole.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from towpath.errors import ConfigError
from towpath.train.config import DataConfig
from towpath.train.data import json_lines, parquet
from towpath.train.data.dataset import Rows
from towpath.train.data.text_pieces import PIECE_BYTES, Corpus, Piece, Read, Text

# How far after its place a cut looks for a line's end, and how much of a file tells whether it is text.
_REACH_BYTES = 1 << 18
_BEGINNING_BYTES = 1 << 13

# In folders; beside these, files without a suffix: README, Makefile, most corpora of one file.
_SUFFIXES = """
.adoc .asm .bash .bib .c .cc .cfg .cl .clj .cmake .cpp .cs .css .csv .cu .cuh .cxx .d .dart .el .erl .ex .exs .f .f90
.go .gradle .h .hh .hpp .hs .htm .html .ini .ipynb .java .jl .js .json .jsonl .jsx .kt .lisp .lua .m .markdown .md .ml
.mli .ndjson .nim .org .parquet .php .pl .pm .proto .py .pyi .pyx .r .rb .rs .rst .s .scala .scm .sh .sql .srt .swift
.tcl .tex .text .toml .ts .tsv .tsx .txt .v .vhd .vim .wiki .xml .yaml .yml .zig
"""
SUFFIXES = frozenset(_SUFFIXES.split())

# Not everywhere, or not the same everywhere: packages that distributions split off, and what a build writes.
_WITHOUT = "site-packages dist-packages test tests idlelib lib2to3 distutils ensurepip tkinter turtledemo lib-dynload"
_STDLIB_WITHOUT = frozenset(_WITHOUT.split())
_STDLIB_WITHOUT_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize", "turtle")


def find(config: DataConfig) -> Corpus:
    """The one that `config` names, or the sources of the standard library."""
    if config.dataset:
        return Rows.of(config.dataset, config.column)
    if config.text:
        return Files.named(config.text, config.column)
    return Files.of_python()


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    path: str
    size_bytes: int
    changed_ns: int
    checked: bool  # left out if it turns out to be binary; a file that is named is taken as it is
    column: str = ""  # which field of JSON lines, or column of Parquet, is the text; empty: all that is in the file

    @property
    def json_lines(self) -> bool:
        return bool(self.column) and Path(self.path).suffix.lower() in json_lines.SUFFIXES

    @property
    def parquet(self) -> bool:
        return Path(self.path).suffix.lower() == parquet.SUFFIX

    def identity(self) -> tuple[object, ...]:
        told = (os.path.realpath(self.path), self.size_bytes, self.changed_ns, self.checked)
        return (*told, self.column) if self.json_lines or self.parquet else told


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    about: str
    files: tuple[File, ...]
    skipped: int = 0

    @staticmethod
    def named(sources: Sequence[str], column: str = "text") -> Files:
        """Files, folders and globs, in this order, each one's files sorted. What is named twice is read once.

        `column`: which field of JSON lines is the text; empty: they are read as they are.
        """
        found: dict[str, File] = {}
        skipped = 0
        for source in sources:
            paths, others, checked = _matches(source)
            skipped += others
            for path in paths:
                found.setdefault(os.path.realpath(path), _file(path, checked=checked, column=column))
        about = ", ".join(sources)
        if not any(file.size_bytes for file in found.values()):
            raise ConfigError(f"no text in {about}: {len(found)} files, and {skipped} not text by their names.")
        return Files(about=about, files=tuple(found.values()), skipped=skipped)

    @staticmethod
    def of_python() -> Files:
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
        return Files(about=about, files=tuple(_file(path, checked=False) for path in paths))

    @property
    def size(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def identity(self) -> list[object]:
        return [file.identity() for file in self.files]

    def pieces(self) -> Iterator[Piece]:
        gathered: list[Part] = []
        size = 0
        for file in self.files:
            if file.parquet:
                if gathered:
                    yield FilePiece(tuple(gathered))
                    gathered, size = [], 0
                yield from parquet.row_groups(file.path, file.column, file.size_bytes)
                continue
            for start in range(0, file.size_bytes, PIECE_BYTES):
                part = Part(file=file, start=start, stop=min(start + PIECE_BYTES, file.size_bytes))
                gathered.append(part)
                size += part.size
                if size >= PIECE_BYTES:
                    yield FilePiece(tuple(gathered))
                    gathered, size = [], 0
        if gathered:
            yield FilePiece(tuple(gathered))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Of a file: from the first line's end after `start` up to the first after `stop`, where the next one begins."""

    file: File
    start: int
    stop: int

    @property
    def ends(self) -> bool:
        return self.stop == self.file.size_bytes

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FilePiece:
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def read(self) -> Read:
        texts: list[Text] = []
        binary = 0
        for part in self.parts:
            content = _content(part)
            if content is None:
                binary += part.ends
            elif part.file.json_lines:
                texts += json_lines.texts(content.data, part.file.column, part.file.path, content.start)
            else:
                texts.append(Text(content.data, part.ends))
        return Read(texts=texts, binary=binary)


class _Content(NamedTuple):
    data: bytes
    start: int  # in the file


def _content(part: Part) -> _Content | None:
    """None if the file is binary, and that matters."""
    file = part.file
    cut = _after_line if file.json_lines else _cut
    try:
        with Path(file.path).open("rb") as opened:
            if file.checked and b"\0" in opened.read(_BEGINNING_BYTES):
                return None
            if part.start == 0 and file.column and not file.json_lines:
                _refuse_json_lines(file, opened)
            start, stop = (cut(opened, place, file) for place in (part.start, part.stop))
            opened.seek(start)
            content = opened.read(stop - start)
    except OSError as error:
        raise ConfigError(f"cannot read {file.path}: {error.strerror}.") from None
    if len(content) < stop - start:
        raise ConfigError(f"{file.path} became shorter while it was read: {file.size_bytes} bytes before. Try again.")
    return _Content(content, start)


def _refuse_json_lines(file: File, opened: BinaryIO) -> None:
    opened.seek(0)
    if json_lines.looks_like_it(opened):
        raise ConfigError(
            f"{file.path}: got a JSON object on each of its first lines, expected text. Call the file .jsonl, and the "
            f"field {file.column!r} of each line is read (data.column, or --column); or set that to '', to train on "
            "the lines as they are, braces and all."
        )


def _cut(opened: BinaryIO, place: int, file: File) -> int:
    """After the first line that ends at `place` or soon behind; where none does, between two characters."""
    if place == 0 or place >= file.size_bytes:
        return min(place, file.size_bytes)
    opened.seek(place - 1)
    window = opened.read(_REACH_BYTES)
    newline = window.find(b"\n")
    if newline >= 0:
        return place + newline
    following = window[1:4]
    return place + next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))


def _after_line(opened: BinaryIO, place: int, file: File) -> int:
    """After the first line that ends at `place` or behind."""
    if place == 0 or place >= file.size_bytes:
        return min(place, file.size_bytes)
    opened.seek(place - 1)
    read = 0
    while window := opened.read(_REACH_BYTES):
        newline = window.find(b"\n")
        if newline >= 0:
            return place + read + newline
        read += len(window)
        if read > json_lines.LONGEST_LINE_BYTES:
            raise json_lines.refused(file.path, place, 0, file.column, f"a line of more than {read} bytes")
    return file.size_bytes


def _matches(source: str) -> tuple[list[str], int, bool]:
    """Its files, how many others were skipped by their names, and whether those left must prove to be text."""
    path = os.path.expanduser(source)  # noqa: PTH111 (a Path would lose a glob's last slash)
    if Path(path).is_dir():
        everything = list(_walk(path))
        texts = [file for file in everything if _is_text_like(file)]
        return texts, len(everything) - len(texts), True
    if Path(path).exists():
        return [path], 0, False
    matched = sorted(filter(os.path.isfile, glob.iglob(path, recursive=True)), key=_parts)  # noqa: PTH207
    if not matched:
        what = "matches no file" if glob.has_magic(path) else "is not there: expected a file, a folder or a glob"
        raise ConfigError(f"{source} {what} (looked in {Path.cwd()}).")
    return matched, 0, True


def _walk(root: str, without: Iterable[str] = ()) -> Iterator[str]:
    """Files below `root`, sorted by folder and name. Hidden folders and links to folders are not entered."""
    found: list[str] = []
    for folder, folders, names in os.walk(root, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        found += [os.path.join(folder, name) for name in names]  # noqa: PTH118 (a million of them)
    return iter(sorted(found, key=_parts))


def _unreadable(error: OSError) -> None:
    raise ConfigError(f"cannot read the folder {error.filename}: {error.strerror}.")


def _parts(path: str) -> tuple[str, ...]:
    return Path(path).parts


def _is_text_like(path: str) -> bool:
    name = Path(path)
    return not name.name.startswith(".") and (name.suffix.lower() in SUFFIXES or not name.suffix)


def _file(path: str, *, checked: bool, column: str = "") -> File:
    try:
        told = Path(path).stat()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from None
    return File(path=path, size_bytes=told.st_size, changed_ns=told.st_mtime_ns, checked=checked, column=column)
