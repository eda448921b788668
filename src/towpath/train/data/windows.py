"""What training reads: windows of tokens, each known by its number.

    sample 0, 1, 2, ...  ──>  epoch and place in it  ──>  shuffled within the epoch  ──>  length + 1 tokens

A run's position is one counter of samples. Whoever asks for samples k to k + n gets the same ones: it does not matter
how many ranks ask, or how often a run was stopped and went on.

Tokens always come from a folder of shards that is mapped into memory, one copy for all ranks of a node: one that
`towpath data prepare` made, or, for text and datasets, one in the user's cache that the first rank of the node makes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from towpath.errors import ConfigError
from towpath.train.config import DataConfig
from towpath.train.data import corpus, tokens
from towpath.train.data.prepare import Plan, prepare
from towpath.train.data.shards import MANIFEST, Manifest, Mapped, Progress
from towpath.train.data.shuffle import keys, shuffled
from towpath.train.data.text_pieces import PIECE_BYTES, Corpus

# Verified at every start: what takes a second or so. All of it: `towpath data show --verify`.
_VERIFIED_BYTES = 1 << 30
# What nobody has read for this long leaves the cache when something new comes.
_KEPT_SECONDS = 30 * 24 * 3600

Batch = tuple[torch.Tensor, torch.Tensor]


class Windows:
    """A stretch of tokens, cut into windows; the targets are the inputs, one token later."""

    def __init__(self, source: Mapped, stretch: range, length: int, seed: int) -> None:
        self.length = length
        self._source = source
        self._stretch = stretch
        self._seed = seed
        self._windows = (len(stretch) - 1) // length

    def __len__(self) -> int:
        """Windows in an epoch."""
        return self._windows

    def batch(self, first: int, count: int) -> Batch:
        """Inputs and targets of samples `first` to `first + count`, int64 [count, length].

        Each epoch visits each window once, in an order of its own, and cuts them at a place of its own, as far as the
        tokens left over at the end of the stretch allow.
        """
        epoch, place = np.divmod(np.arange(first, first + count, dtype=np.int64), len(self))
        window = shuffled(place, len(self), self._seed, epoch)
        left_over = len(self._stretch) - 1 - len(self) * self.length
        # Another seed than the order's: the two have nothing to do with each other.
        offset = keys(~self._seed, epoch) % np.uint64(left_over + 1)
        return self._gather((window * self.length + offset.astype(np.int64)).tolist())

    def evenly(self, first: int, count: int, total: int) -> Batch:
        """The same, of the windows `first` to `first + count` among `total` that are spread evenly over the stretch.

        They are fixed: for one `total`, all world sizes that divide it read the same windows. Where `total` exceeds
        the windows there are, some come again.
        """
        return self._gather([number * len(self) // total * self.length for number in range(first, first + count)])

    def _gather(self, starts: Iterable[int]) -> Batch:
        starts = [self._stretch.start + start for start in starts]
        rows = np.empty((len(starts), self.length + 1), np.int64)
        for row, start in zip(rows, starts, strict=True):
            self._source.read(start, row)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    vocabulary: int
    fingerprint: str  # ranks that read the same have the same
    about: str
    train: Windows
    held_out: Windows | None  # None with data.held_out = 0


def _alone() -> None:
    pass


def open_tokens(
    config: DataConfig,
    length: int,
    *,
    seed: int = 0,
    first_here: bool = True,
    wait: Callable[[], None] = _alone,
    progress: Progress | None = None,
) -> Tokens:
    """The data of a run, on each of its ranks.

    One rank of each node is `first_here`: it makes what the node lacks. `wait()` is a barrier of all ranks, and each
    calls it exactly once, also one that fails: its ConfigError comes after, for the caller to share.
    """
    try:
        folder, manifest = _folder(config, first_here, progress)
    finally:
        wait()
    if manifest is None:
        manifest = _made_by_the_first(folder, config)
    source = Mapped(folder, manifest)
    about = config.tokens or ", ".join(config.text) or config.dataset or "the sources of Python's standard library"
    train, held_out = _split(len(source), length, config.held_out, about)
    return Tokens(
        vocabulary=manifest.vocabulary,
        fingerprint=manifest.fingerprint,
        about=about,
        train=Windows(source, train, length, seed),
        held_out=Windows(source, held_out, length, seed) if held_out else None,
    )


def _folder(config: DataConfig, first_here: bool, progress: Progress | None) -> tuple[Path, Manifest | None]:
    """Where the tokens are, and what they are unless another rank is at work on it."""
    if config.tokens:
        folder = Path(config.tokens).expanduser()
        manifest = Manifest.load(folder)
        if first_here and manifest.size_bytes <= _VERIFIED_BYTES:
            manifest.verify(folder)
        _check_tokenizer(manifest, config)
        return folder, manifest
    found = corpus.find(config)
    folder = _cache() / _key(found, config.tokenizer)
    return folder, _cached(found, config.tokenizer, folder, progress) if first_here else None


def _check_tokenizer(manifest: Manifest, config: DataConfig) -> None:
    if tokens.fingerprint_of(config.tokenizer) != manifest.tokenizer_fingerprint:
        raise ConfigError(
            f"data.tokens = {config.tokens!r} was prepared with the tokenizer {manifest.tokenizer!r} "
            f"({manifest.tokenizer_fingerprint[:19]}), not with data.tokenizer = {config.tokenizer!r}: set that to the "
            "same, or prepare the tokens again."
        )


def _cached(found: Corpus, tokenizer: str, folder: Path, progress: Progress | None) -> Manifest:
    if not folder.exists():
        _forget_old(folder.parent)
        try:
            prepare(found, tokenizer, folder, Plan(progress=progress))
        except ConfigError:
            # Another run may have been faster, and then this one cannot take its place.
            if not (folder / MANIFEST).exists():
                raise
    with suppress(OSError):  # a cache that can only be read serves too
        (folder / MANIFEST).touch()
    try:
        return Manifest.load(folder)
    except ConfigError as error:
        raise ConfigError(f"{error} It is a cache: remove {folder}, and it is made anew.") from None


def _made_by_the_first(folder: Path, config: DataConfig) -> Manifest:
    if not folder.exists():
        raise ConfigError(f"the first rank of this node has not made the tokens in {folder}: see what it says.")
    return Manifest.load(folder)


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base).absolute() / "towpath" / "tokens"


def _key(found: Corpus, tokenizer: str) -> str:
    said = [PIECE_BYTES, tokens.fingerprint_of(tokenizer), Path(tokenizer).name, *found.identity()]
    return hashlib.sha256(json.dumps(said).encode("utf-8", errors="surrogateescape")).hexdigest()[:32]


def _forget_old(cache: Path) -> None:
    """Folders long unused, and what killed runs left half made. A run that still has one mapped keeps its tokens."""
    for folder in cache.glob("*"):
        told = folder if folder.name.startswith(".") else folder / MANIFEST
        with suppress(OSError):  # another run is at it too
            if time.time() - told.stat().st_mtime > _KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _split(count: int, length: int, share: float, about: str) -> tuple[range, range]:
    """What training reads, and the end that only evaluation does."""
    held_out = int(count * share)
    train = count - held_out
    if train <= length:
        raise ConfigError(
            f"{about}: {count} tokens, {train} of them for training, but one sequence of train.length = {length} needs "
            f"{length + 1}. Shorten it or name more data."
        )
    if share and held_out <= length:
        raise ConfigError(
            f"{about}: data.held_out = {share} of {count} tokens are {held_out}, but one sequence of train.length = "
            f"{length} needs {length + 1}. Hold out more, or nothing (0)."
        )
    return range(train), range(train, count)
