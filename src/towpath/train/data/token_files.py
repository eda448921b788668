"""A folder of tokens, which training maps into memory.

    tokens-00000.bin, tokens-00001.bin, ...   unsigned integers, little-endian; all of one size except the last
    tokens.json                               their type, vocabulary, tokenizer, lengths and SHA-256

The folder is written under a temporary name and then renamed, so a folder under its own name is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from towpath.errors import ConfigError
from towpath.files import sync_folder

MANIFEST = "tokens.json"
Progress = Callable[[int, int], None]

_FORMAT = "towpath tokens 1"
_NAME = re.compile(r"tokens-\d{5,}\.bin")
_DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}
_CHUNK_BYTES = 1 << 22


def dtype_for(vocabulary: int) -> str:
    """Return the narrowest dtype that holds every token."""
    return next(name for name, code in _DTYPES.items() if vocabulary - 1 <= np.iinfo(code).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of tokens."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a folder of tokens."""

    dtype: str
    vocabulary: int
    tokenizer: str
    tokenizer_fingerprint: str
    documents: int
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        """The tokens of all files."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        """The bytes of all files."""
        return self.tokens * np.dtype(_DTYPES[self.dtype]).itemsize

    @property
    def fingerprint(self) -> str:
        """A digest of the tokens and their meaning, which does not depend on where they are stored."""
        parts = [self.dtype, self.vocabulary, self.tokenizer_fingerprint, *(shard.sha256 for shard in self.shards)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def __str__(self) -> str:
        return json.dumps({"format": _FORMAT, "tokens": self.tokens, **asdict(self)}, indent=2) + "\n"

    @staticmethod
    def load(folder: Path) -> Manifest:
        """Read a folder's manifest. Check that each file exists and has its length; `verify` reads the files.

        Raises:
            ConfigError: The folder or a file is missing, or is not what `towpath data prepare` writes.
        """
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}: expected one that `towpath data prepare` made.")
        path = folder / MANIFEST
        try:
            manifest = _parsed(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror}. Expected what `towpath data prepare` makes."
            ) from None
        except (KeyError, ValueError, TypeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise ConfigError(f"{path} is not what `towpath data prepare` writes: {reason}.") from None
        for shard in manifest.shards:
            file, expected = folder / shard.file, shard.tokens * np.dtype(_DTYPES[manifest.dtype]).itemsize
            try:
                size = file.stat().st_size
            except OSError as error:
                raise ConfigError(f"cannot read {file}: {error.strerror}. Prepare the tokens again.") from None
            if size != expected:
                raise ConfigError(f"{file} has {size} bytes, expected {expected}: prepare the tokens again.")
        return manifest

    def verify(self, folder: Path, progress: Progress | None = None) -> None:
        """Read all files and compare their checksums.

        Raises:
            ConfigError: A file cannot be read, or has other contents.
        """
        read_bytes = 0
        for path, shard in ((folder / shard.file, shard) for shard in self.shards):
            digest = hashlib.sha256()
            try:
                with path.open("rb") as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        digest.update(chunk)
                        read_bytes += len(chunk)
                        if progress:
                            progress(read_bytes, self.size_bytes)
            except OSError as error:
                raise ConfigError(f"cannot read {path}: {error.strerror}.") from None
            if digest.hexdigest() != shard.sha256:
                raise ConfigError(
                    f"{path} is not what {MANIFEST} says (SHA-256 {digest.hexdigest()[:12]}…, expected "
                    f"{shard.sha256[:12]}…): prepare the tokens again."
                )


def _parsed(table: Any) -> Manifest:
    if table["format"] != _FORMAT:
        raise ValueError(f"its format is {table['format']!r}, expected {_FORMAT!r}")
    shards = tuple(Shard(**shard) for shard in table["shards"])
    rest: dict[str, Any] = {f.name: table[f.name] for f in fields(Manifest) if f.name != "shards"}
    manifest = Manifest(**rest, shards=shards)
    counts = [manifest.vocabulary, manifest.documents, *(shard.tokens for shard in shards)]
    if not all(type(number) is int and number > 0 for number in counts) or not shards:
        raise ValueError("a count is not a positive number")
    if any(not _NAME.fullmatch(shard.file) for shard in shards):
        raise ValueError("a file's name is not tokens-….bin")
    if manifest.dtype != dtype_for(manifest.vocabulary):
        raise ValueError(f"a vocabulary of {manifest.vocabulary} and {manifest.dtype!r} do not fit")
    if manifest.tokens != table["tokens"]:
        raise ValueError(f"{manifest.tokens} tokens in its files, {table['tokens']} in all")
    return manifest


class MappedTokens:
    """All tokens of a folder as one sequence, mapped into memory."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._shards: list[NDArray[Any]] = []
        self._tokens = manifest.tokens
        for path in (folder / shard.file for shard in manifest.shards):
            try:
                mapped = np.memmap(path, dtype=_DTYPES[manifest.dtype], mode="r")
            except OSError as error:
                raise ConfigError(f"cannot map {path} into memory: {error.strerror}.") from None
            # As a plain array: a slice of numpy's memmap costs several times as much.
            self._shards.append(np.asarray(mapped))

    def __len__(self) -> int:
        return self._tokens

    def read(self, start: int, out: NDArray[np.int64]) -> None:
        """Fill `out` with the tokens from `start` on."""
        shard, first = divmod(start, len(self._shards[0]))
        filled = 0
        while filled < len(out):
            part = self._shards[shard][first : first + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            shard, first = shard + 1, 0


class TokenWriter:
    """Cuts a stream of tokens into files. Use it as a context, which closes the last file."""

    def __init__(self, folder: Path, vocabulary: int, shard_tokens: int) -> None:
        self.shards: list[Shard] = []
        self._folder = folder
        self._dtype = np.dtype(_DTYPES[dtype_for(vocabulary)])
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self._tokens = 0
        self._digest = hashlib.sha256()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            if kind is None:
                self._finish(self._file)
            else:
                self._file.close()

    def write(self, tokens: NDArray[Any]) -> None:
        """Append tokens."""
        while len(tokens):
            if self._file is None:
                self._file = (self._folder / self._name).open("wb")
            part = tokens[: self._shard_tokens - self._tokens]
            content = part.astype(self._dtype, copy=False).tobytes()
            self._file.write(content)
            self._digest.update(content)
            self._tokens += len(part)
            tokens = tokens[len(part) :]
            if self._tokens == self._shard_tokens:
                self._finish(self._file)

    @property
    def _name(self) -> str:
        return f"tokens-{len(self.shards):05d}.bin"

    def _finish(self, file: BinaryIO) -> None:
        with file:
            file.flush()
            os.fsync(file.fileno())
        self.shards.append(Shard(file=self._name, tokens=self._tokens, sha256=self._digest.hexdigest()))
        self._file, self._tokens, self._digest = None, 0, hashlib.sha256()


@contextmanager
def published(folder: Path) -> Generator[Path]:
    """Yield a temporary folder to write to. It becomes `folder` if the context ends without an error."""
    temporary = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync_folder(temporary)
        temporary.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after the rename there is nothing to remove
