"""Tokenizers, and `towpath data prepare`: from a corpus to a folder of tokens, on several processes.

Pieces are encoded in parallel and written in order, so the folder's bytes do not depend on the number of processes.
Processes are spawned, so that they inherit neither threads nor a GPU. Ctrl-C reaches only the caller, which ends the
processes and removes what was written.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import parent_process, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from towpath.errors import ConfigError
from towpath.train.data.corpus import Corpus, Piece
from towpath.train.data.token_files import MANIFEST, Manifest, Progress, TokenWriter, dtype_for, published

SHARD_TOKENS = 1 << 28
_AHEAD = 2  # pieces in flight for each worker

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<end_of_text>")


class Tokenizer:
    """The tokenizer "bytes": its 256 tokens are the bytes, and NUL, which no text holds, ends a document.

    Attributes:
        name: The value of `data.tokenizer`.
        fingerprint: A text that is the same for the same tokenizer, wherever its file is stored.
        vocabulary: A number above every token.
        end: The token after each document, or None.
    """

    name = "bytes"
    fingerprint = "bytes"
    vocabulary = 256
    end: int | None = 0

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Return the tokens of each text."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def undecodable(self, texts: Sequence[bytes]) -> int:
        """Return how many texts are not UTF-8, for a tokenizer that needs UTF-8."""
        return 0


class FileTokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` library.

    Bytes that are not UTF-8 become U+FFFD. A token such as <|endoftext|> that is written in a text stays a token.
    """

    def __init__(self, path: str) -> None:
        content = _tokenizer_file(path)
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise ConfigError(f"the tokenizer {path} needs a library: pip install 'towpath[hf]'.") from None
        try:
            self._tokenizer: Any = Library.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises no narrower class
            raise ConfigError(f"{path} is not a tokenizer.json of the tokenizers library: {error}.") from None
        # The file may enable both. They are for batches of a fixed length.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        tokens: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not tokens:
            raise ConfigError(f"the tokenizer {path} knows no tokens: expected a trained one.")
        self.name = path
        self.fingerprint = _digest(content)
        # The number of tokens would be too small: a file may leave gaps.
        self.vocabulary = max(tokens.values()) + 1
        self.end = next((tokens[end] for end in _END_TOKENS if end in tokens), None)

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        decoded = [text.decode("utf-8", errors="replace") for text in texts]
        encoded = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in encoded]

    def undecodable(self, texts: Sequence[bytes]) -> int:
        count = 0
        for text in texts:
            try:
                text.decode("utf-8")
            except UnicodeDecodeError:
                count += 1
        return count


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer "bytes", or that of a tokenizer.json at path `name`."""
    return Tokenizer() if name == Tokenizer.name else FileTokenizer(name)


def tokenizer_fingerprint(name: str) -> str:
    """Return `load_tokenizer(name).fingerprint` without using the library."""
    return Tokenizer.fingerprint if name == Tokenizer.name else _digest(_tokenizer_file(name))


def _tokenizer_file(path: str) -> bytes:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The result of `prepare`."""

    manifest: Manifest
    binary: int  # files left out because they hold NUL bytes
    undecodable: int  # documents, or parts of documents, that are not UTF-8 though the tokenizer needs it


def prepare(
    corpus: Corpus,
    tokenizer: str,
    folder: Path,
    *,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    progress: Progress | None = None,
) -> Prepared:
    """Write the tokens of a corpus into a folder.

    Args:
        corpus: The texts.
        tokenizer: "bytes", or the path of a tokenizer.json.
        folder: A folder that does not exist yet, or is empty.
        workers: Processes that encode. The tokens do not depend on it.
        shard_tokens: Tokens of a file.
        progress: Called with the size that is done and the size of the corpus.

    Raises:
        ConfigError: The texts cannot be read, the folder cannot be written, or there is no text.
    """
    folder = folder.expanduser().absolute()
    encoder = load_tokenizer(tokenizer)
    done = documents = binary = undecodable = 0
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is there already: choose another folder, or remove it first.")
        with published(folder) as temporary:
            with (
                TokenWriter(temporary, encoder.vocabulary, shard_tokens) as writer,
                closing(_encoded(corpus.pieces(), encoder, workers)) as pieces,
            ):
                for piece in pieces:
                    writer.write(piece.tokens)
                    done += piece.size
                    documents += piece.documents
                    binary += piece.binary
                    undecodable += piece.undecodable
                    if progress:
                        progress(done, corpus.size)
            if not writer.shards or not documents:
                left_out = f": all its {binary} files hold NUL bytes, so they are not text" if binary else ""
                raise ConfigError(f"no text in {corpus.about}{left_out}.")
            manifest = Manifest(
                dtype=dtype_for(encoder.vocabulary),
                vocabulary=encoder.vocabulary,
                tokenizer=Path(encoder.name).name,
                tokenizer_fingerprint=encoder.fingerprint,
                documents=documents,
                shards=tuple(writer.shards),
            )
            with (temporary / MANIFEST).open("w", encoding="utf-8") as file:
                file.write(str(manifest))
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}.") from None
    return Prepared(manifest=manifest, binary=binary, undecodable=undecodable)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncodedPiece:
    tokens: NDArray[Any]
    size: int
    documents: int
    binary: int
    undecodable: int


def _encode(piece: Piece, encoder: Tokenizer) -> _EncodedPiece:
    read = piece.read()
    contents = [text.content for text in read.texts]
    dtype = dtype_for(encoder.vocabulary)
    end = np.array([] if encoder.end is None else [encoder.end], dtype)
    encoded: list[NDArray[Any]] = [np.empty(0, dtype)]
    for text, tokens in zip(read.texts, encoder.encode_batch(contents), strict=True):
        encoded += [tokens.astype(dtype, copy=False), *([end] if text.ends else [])]
    return _EncodedPiece(
        tokens=np.concatenate(encoded),
        size=piece.size,
        documents=sum(text.ends for text in read.texts),
        binary=read.binary,
        undecodable=encoder.undecodable(contents),
    )


def _encoded(pieces: Iterator[Piece], encoder: Tokenizer, workers: int) -> Generator[_EncodedPiece]:
    if workers == 1:
        yield from (_encode(piece, encoder) for piece in pieces)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(encoder.name,))
    waiting: deque[Future[_EncodedPiece]] = deque()
    try:
        for piece in pieces:
            with _sigint_blocked():
                waiting.append(pool.submit(_encode_in_worker, piece))
            if len(waiting) > _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ConfigError("a worker was killed, perhaps for want of memory: try fewer --workers.") from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _sigint_blocked() -> Generator[None]:
    """Block SIGINT. A process that starts meanwhile inherits this, so only the caller handles Ctrl-C."""
    resource_tracker.ensure_running()  # started later, it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker_tokenizer: list[Tokenizer] = []


def _begin_worker(tokenizer: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers share the cores among themselves
    _worker_tokenizer.append(load_tokenizer(tokenizer))


def _encode_in_worker(piece: Piece) -> _EncodedPiece:
    return _encode(piece, _worker_tokenizer[0])


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
