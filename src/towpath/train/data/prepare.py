"""From a corpus to a folder of tokens, on several processes.

Pieces are given out in order and written in order, so the folder's bytes do not depend on how many processes there are.
Processes are spawned: what the caller's holds (threads, a GPU) stays there. Ctrl-C reaches the caller alone, which ends
them and removes what was written.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
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
from towpath.train.data import tokens
from towpath.train.data.shards import MANIFEST, Manifest, Progress, Writer, dtype_for, published
from towpath.train.data.text_pieces import Corpus, Piece
from towpath.train.data.tokens import Tokenizer

SHARD_TOKENS = 1 << 28
_AHEAD = 2  # pieces in flight for each worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How it is done. None of it changes the tokens."""

    workers: int = 1
    shard_tokens: int = SHARD_TOKENS
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    manifest: Manifest
    binary: int  # files left out, since they hold NUL bytes
    undecodable: int  # documents, or their parts, that the tokenizer could not take as they are


def prepare(corpus: Corpus, tokenizer: str, folder: Path, plan: Plan) -> Outcome:
    """Into `folder`, which must not exist yet, or be empty."""
    folder = folder.expanduser().absolute()
    encoder = tokens.load(tokenizer)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is there already: choose another folder, or remove it first.")
        with published(folder) as partial:
            return _write(corpus, encoder, partial, plan)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}.") from None


def _write(corpus: Corpus, encoder: Tokenizer, folder: Path, plan: Plan) -> Outcome:
    done = documents = binary = undecodable = 0
    with (
        Writer(folder, encoder.vocabulary, plan.shard_tokens) as writer,
        closing(_encoded(corpus.pieces(), encoder, plan.workers)) as pieces,
    ):
        for piece in pieces:
            writer.write(piece.tokens)
            done += piece.size
            documents += piece.documents
            binary += piece.binary
            undecodable += piece.undecodable
            if plan.progress:
                plan.progress(done, corpus.size)
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
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(str(manifest))
        file.flush()
        os.fsync(file.fileno())
    return Outcome(manifest=manifest, binary=binary, undecodable=undecodable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A piece, as a worker sends it back."""

    tokens: NDArray[Any]
    size: int
    documents: int
    binary: int
    undecodable: int


def _encode(piece: Piece, encoder: Tokenizer) -> Encoded:
    read = piece.read()
    contents = [text.content for text in read.texts]
    dtype = dtype_for(encoder.vocabulary)
    end = np.array([] if encoder.end is None else [encoder.end], dtype)
    encoded: list[NDArray[Any]] = [np.empty(0, dtype)]
    for text, numbers in zip(read.texts, encoder.encode_batch(contents), strict=True):
        encoded += [numbers.astype(dtype, copy=False), *([end] if text.ends else [])]
    return Encoded(
        tokens=np.concatenate(encoded),
        size=piece.size,
        documents=sum(text.ends for text in read.texts),
        binary=read.binary,
        undecodable=encoder.undecodable(contents),
    )


def _encoded(pieces: Iterator[Piece], encoder: Tokenizer, workers: int) -> Generator[Encoded]:
    if workers == 1:
        yield from (_encode(piece, encoder) for piece in pieces)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(encoder.name,))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for piece in pieces:
            with _interrupts_later():
                waiting.append(pool.submit(_work, piece))
            if len(waiting) > _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ConfigError("a worker was killed, perhaps for want of memory: try fewer --workers.") from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_later() -> Generator[None]:
    """A process started meanwhile inherits that SIGINT is blocked: Ctrl-C is for the caller to answer."""
    resource_tracker.ensure_running()  # started later, it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker: list[Tokenizer] = []


def _begin(tokenizer: str) -> None:
    """In a worker. One thread each: they share the cores among themselves."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker.append(tokens.load(tokenizer))


def _work(piece: Piece) -> Encoded:
    return _encode(piece, _worker[0])


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
