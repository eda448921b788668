"""A folder of tokens, which training maps into memory:

    tokens-00000.bin, tokens-00001.bin, ...   unsigned integers, little-endian, no more; each of one size but the last
    tokens.json                               what they are: their type, vocabulary, tokenizer, lengths and SHA-256

It is written beside its place and then renamed: a folder that is there is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Iterator
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
    """The narrowest that holds each token."""
    return next(name for name, code in _DTYPES.items() if vocabulary - 1 <= np.iinfo(code).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    dtype: str
    vocabulary: int
    tokenizer: str
    tokenizer_fingerprint: str
    documents: int
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        return self.tokens * np.dtype(_DTYPES[self.dtype]).itemsize

    @property
    def fingerprint(self) -> str:
        """The same for the same tokens with the same meaning, wherever they lie and whatever they were made of."""
        said = [self.dtype, self.vocabulary, self.tokenizer_fingerprint, *(shard.sha256 for shard in self.shards)]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def __str__(self) -> str:
        return json.dumps({"format": _FORMAT, "tokens": self.tokens, **asdict(self)}, indent=2) + "\n"

    @staticmethod
    def load(folder: Path) -> Manifest:
        """Also judges that each file is there and as long as it should be; `verify` reads them."""
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}: expected one that `towpath data prepare` made.")
        try:
            manifest = _manifest(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(
                f"cannot read {folder / MANIFEST}: {error.strerror}. Expected what `towpath data prepare` makes."
            ) from None
        except KeyError as error:
            raise ConfigError(f"{folder / MANIFEST} is not what `towpath data prepare` writes: no {error}.") from None
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{folder / MANIFEST} is not what `towpath data prepare` writes: {error}.") from None
        for shard in manifest.shards:
            _check_size(folder / shard.file, shard.tokens * np.dtype(_DTYPES[manifest.dtype]).itemsize)
        return manifest

    def verify(self, folder: Path, progress: Progress | None = None) -> None:
        """Read all of it, and compare the checksums."""
        read_bytes = 0
        for shard in self.shards:
            digest = hashlib.sha256()
            for chunk in _chunks(folder / shard.file):
                digest.update(chunk)
                read_bytes += len(chunk)
                if progress:
                    progress(read_bytes, self.size_bytes)
            if digest.hexdigest() != shard.sha256:
                raise ConfigError(
                    f"{folder / shard.file} is not what {MANIFEST} says (SHA-256 {digest.hexdigest()[:12]}…, expected "
                    f"{shard.sha256[:12]}…): prepare the tokens again."
                )


def _manifest(said: Any) -> Manifest:
    if said["format"] != _FORMAT:
        raise ValueError(f"its format is {said['format']!r}, expected {_FORMAT!r}")
    shards = tuple(Shard(**shard) for shard in said["shards"])
    rest: dict[str, Any] = {f.name: said[f.name] for f in fields(Manifest) if f.name != "shards"}
    manifest = Manifest(**rest, shards=shards)
    counts = [manifest.vocabulary, manifest.documents, *(shard.tokens for shard in shards)]
    if not all(type(number) is int and number > 0 for number in counts) or not shards:
        raise ValueError("a count is not a positive number")
    if any(not _NAME.fullmatch(shard.file) for shard in shards):
        raise ValueError("a file's name is not tokens-….bin")
    if manifest.dtype != dtype_for(manifest.vocabulary):
        raise ValueError(f"a vocabulary of {manifest.vocabulary} and {manifest.dtype!r} do not fit")
    if manifest.tokens != said["tokens"]:
        raise ValueError(f"{manifest.tokens} tokens in its files, {said['tokens']} in all")
    return manifest


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from None


def _check_size(path: Path, expected_bytes: int) -> None:
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Prepare the tokens again.") from None
    if size_bytes != expected_bytes:
        raise ConfigError(f"{path} has {size_bytes} bytes, expected {expected_bytes}: prepare the tokens again.")


class Mapped:
    """All tokens of a folder as one sequence."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        # As plain arrays: a slice of numpy's memmap costs several times as much.
        self._shards = [np.asarray(_mapped(folder / shard.file, manifest)) for shard in manifest.shards]
        self._tokens = manifest.tokens

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


def _mapped(path: Path, manifest: Manifest) -> NDArray[Any]:
    try:
        return np.memmap(path, dtype=_DTYPES[manifest.dtype], mode="r")
    except OSError as error:
        raise ConfigError(f"cannot map {path} into memory: {error.strerror}.") from None


class Writer:
    """Cuts a stream of tokens into files."""

    def __init__(self, folder: Path, vocabulary: int, shard_tokens: int) -> None:
        self.shards: list[Shard] = []
        self._folder = folder
        self._dtype = np.dtype(_DTYPES[dtype_for(vocabulary)])
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self._tokens = 0
        self._digest = hashlib.sha256()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            if kind is None:
                self._finish(self._file)
            else:
                self._file.close()

    def write(self, tokens: NDArray[Any]) -> None:
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
    """A folder to write to, which becomes `folder` when all went well, and nothing otherwise."""
    partial = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        yield partial
        sync_folder(partial)
        partial.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # renamed, it is no longer there
