"""Tokenizers: from a text's bytes to numbers, the same ones wherever and in whichever process.

`bytes` knows 256 tokens, the bytes themselves; NUL, which no text holds, ends a document, so there is no token beside
them. A tokenizer.json of the `tokenizers` library brings its own vocabulary; a document then ends with whichever of the
usual end-of-text tokens it defines, or with nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from towpath.errors import ConfigError

BYTES = "bytes"
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<end_of_text>")


class Tokenizer(Protocol):
    @property
    def name(self) -> str:
        """As `data.tokenizer` names it."""
        ...

    @property
    def fingerprint(self) -> str:
        """The same for the same tokenizer, wherever its file lies."""
        ...

    @property
    def vocabulary(self) -> int:
        """Every token is below."""
        ...

    @property
    def end(self) -> int | None:
        """The token after each document."""
        ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[Any]]: ...

    def undecodable(self, texts: Sequence[bytes]) -> int:
        """How many of them it cannot take as they are."""
        ...


class Bytes:
    name = BYTES
    fingerprint = BYTES
    vocabulary = 256
    end = 0

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def undecodable(self, texts: Sequence[bytes]) -> int:
        return 0


class FromFile:
    """A tokenizer.json. What is not UTF-8 becomes U+FFFD; <|endoftext|> and its like, written in a text, are tokens."""

    def __init__(self, path: str) -> None:
        content = _content(path)
        self.name = path
        self.fingerprint = _digest(content)
        self._tokenizer = _parsed(path, content)
        known: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        # Not their number: a file may leave gaps.
        self.vocabulary = max(known.values(), default=-1) + 1
        if not known:
            raise ConfigError(f"the tokenizer {path} knows no tokens: expected a trained one.")
        self.end = next((known[end] for end in _ENDS if end in known), None)

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        decoded = [text.decode("utf-8", errors="replace") for text in texts]
        encoded = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in encoded]

    def undecodable(self, texts: Sequence[bytes]) -> int:
        return sum(map(_is_not_utf8, texts))


def load(name: str) -> Tokenizer:
    """`bytes`, or the path of a tokenizer.json."""
    return Bytes() if name == BYTES else FromFile(name)


def fingerprint_of(name: str) -> str:
    """What `load(name).fingerprint` would be, without the library."""
    return BYTES if name == BYTES else _digest(_content(name))


def _content(path: str) -> bytes:
    file = Path(path).expanduser()
    if file.is_dir():
        raise ConfigError(f"the tokenizer {path} is a folder: name its tokenizer.json, or 'bytes'.")
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the tokenizer {path}: {error.strerror}. Expected 'bytes' or a tokenizer.json."
        ) from None


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _parsed(path: str, content: bytes) -> Any:
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise ConfigError(f"the tokenizer {path} needs a library: pip install 'towpath[hf]'.") from None
    try:
        tokenizer = Library.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises no narrower class
        raise ConfigError(f"{path} is not a tokenizer.json of the tokenizers library: {error}.") from None
    # A file may ask for both, which are for batches of a fixed length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _is_not_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return False
