"""What a corpus is to those who read it: pieces of about a MiB, in order, each with texts.

They are the same on every machine and for any number of workers. A piece names what it reads, and is read where it is
encoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Text:
    content: bytes
    ends: bool  # whether its document ends with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    texts: list[Text]
    binary: int = 0  # files left out, since they hold NUL bytes


class Piece(Protocol):
    @property
    def size(self) -> int: ...

    def read(self) -> Read: ...


class Corpus(Protocol):
    @property
    def about(self) -> str:
        """What it is, for a message."""
        ...

    @property
    def size(self) -> int:
        """Of all pieces together."""
        ...

    @property
    def skipped(self) -> int:
        """Files of its folders that do not look like text by their names."""
        ...

    def identity(self) -> list[object]:
        """What changes when what it reads may have changed."""
        ...

    def pieces(self) -> Iterator[Piece]: ...
