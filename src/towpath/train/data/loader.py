"""From the section [data] to batches: windows of tokens, each known by its number.

    sample 0, 1, 2, ...  ──>  epoch, and place in it  ──>  shuffled within the epoch  ──>  length + 1 tokens

The position of a run is one counter of samples, and samples k to k + n are the same for every caller. So the number of
ranks may change between runs, and a resumed run reads on where it stopped.

Tokens come from folders that are mapped into memory, one copy for all ranks of a node. `towpath data prepare` makes
such a folder. For text and datasets the first rank of each node makes one in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from towpath.errors import ConfigError
from towpath.train.config import MIXED_SAMPLES, DataConfig
from towpath.train.data import corpus
from towpath.train.data.prepare import prepare, tokenizer_fingerprint
from towpath.train.data.token_files import MANIFEST, Manifest, MappedTokens, Progress

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, int64 [count, length]
_Ints = NDArray[np.int64]
_Hashes = NDArray[np.uint64]

# Folders up to this size are verified at every start, which takes about a second.
_VERIFIED_BYTES = 1 << 30
# Folders of the cache that nothing has read for this long are removed when a new one is made.
_KEPT_SECONDS = 30 * 24 * 3600
_SHUFFLE_ROUNDS = 6


class TokenWindows:
    """A range of tokens, cut into windows. The targets of a window are its inputs, one token later."""

    def __init__(self, source: MappedTokens, tokens: range, length: int, seed: int) -> None:
        self.length = length
        self._source, self._tokens, self._seed = source, tokens, seed
        self._windows = (len(tokens) - 1) // length

    def __len__(self) -> int:
        """Return the number of windows in an epoch."""
        return self._windows

    def batch(self, first: int, count: int) -> Batch:
        """Return samples `first` to `first + count`.

        Each epoch visits each window once, in its own order. It also cuts the windows at its own offset, as far as the
        tokens left over at the end of the range allow.
        """
        return self.samples(np.arange(first, first + count, dtype=np.int64))

    def samples(self, numbers: _Ints) -> Batch:
        """Return the samples with these numbers."""
        epoch, place = np.divmod(numbers, len(self))
        window = shuffled(place, len(self), self._seed, epoch)
        left_over = len(self._tokens) - 1 - len(self) * self.length
        # Not the seed of the order, so that offset and order are independent.
        offset = _hash_of(~self._seed, epoch) % np.uint64(left_over + 1)
        return self._gather((window * self.length + offset.astype(np.int64)).tolist())

    def evaluation_batch(self, first: int, count: int, total: int) -> Batch:
        """Return windows `first` to `first + count` of `total` windows that are spread evenly over the range.

        They are fixed: the same `total` gives the same windows on any number of ranks. If `total` exceeds the number of
        windows, some of them repeat.
        """
        return self.spread(np.arange(first, first + count, dtype=np.int64), total)

    def spread(self, numbers: _Ints, total: int) -> Batch:
        """Return the windows with these numbers among `total` that are spread evenly over the range."""
        return self._gather((numbers * len(self) // total * self.length).tolist())

    def _gather(self, starts: Iterable[int]) -> Batch:
        starts = [self._tokens.start + start for start in starts]
        rows = np.empty((len(starts), self.length + 1), np.int64)
        for row, start in zip(rows, starts, strict=True):
            self._source.read(start, row)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


class TokenMixture:
    """Several sources that are read as one, each with the share of samples that its weight gives it.

    In each block of 1000 samples a source has as many places as its share. The places are shuffled within the block,
    and a source fills its places with its own samples in turn. So each source has its own epochs, and the source of a
    sample follows from the sample's number.
    """

    def __init__(self, sources: Sequence[TokenWindows], weights: Sequence[float], seed: int) -> None:
        self.length = sources[0].length
        self._sources, self._weights, self._seed = sources, weights, seed

    def __len__(self) -> int:
        """Return the number of windows of all sources. They do not occur equally often."""
        return sum(map(len, self._sources))

    def batch(self, first: int, count: int) -> Batch:
        """Return samples `first` to `first + count`."""
        block, place = np.divmod(np.arange(first, first + count, dtype=np.int64), MIXED_SAMPLES)
        counts = samples_of_each(self._weights, MIXED_SAMPLES)
        source, place = _owner(shuffled(place, MIXED_SAMPLES, self._seed, block), counts)
        numbers = block * counts[source] + place
        return self._from_each(source, numbers, lambda s, mine: self._sources[s].samples(mine))

    def evaluation_batch(self, first: int, count: int, total: int) -> Batch:
        """Return windows `first` to `first + count` of `total`. Each source's share is spread evenly over it."""
        counts = samples_of_each(self._weights, total)
        source, place = _owner(np.arange(first, first + count, dtype=np.int64), counts)
        return self._from_each(source, place, lambda s, mine: self._sources[s].spread(mine, int(counts[s])))

    def _from_each(self, source: _Ints, numbers: _Ints, read: Callable[[int, _Ints], Batch]) -> Batch:
        inputs, targets = (torch.empty(len(source), self.length, dtype=torch.int64) for _ in range(2))
        for index in range(len(self._sources)):
            rows = np.flatnonzero(source == index)
            if rows.size:
                inputs[rows], targets[rows] = read(index, numbers[rows])
        return inputs, targets


def samples_of_each(weights: Sequence[float], total: int) -> _Ints:
    """Return `total` shared out by `weights`, as whole numbers. The largest remainders are rounded up."""
    exact = np.asarray(weights, np.float64) / np.sum(weights) * total
    counts = np.floor(exact + 1e-9).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")
    counts[largest[: total - counts.sum()]] += 1
    return counts


def _owner(places: _Ints, counts: _Ints) -> tuple[_Ints, _Ints]:
    """Return the source of each place, and the place's number among those of its source."""
    ends = np.cumsum(counts)
    source = np.searchsorted(ends, places, side="right")
    return source, places - (ends - counts)[source]


# An order that is computed and not stored -----------------------------------------------------------------------------


def shuffled(index: _Ints, count: int, seed: int, epoch: _Ints) -> _Ints:
    """Return where each `index` of range(count) goes in the order of its `epoch`.

    A Feistel network permutes the numbers of 2 × half bits. A result of `count` or more goes through it again until it
    is below `count` (cycle walking), which makes this a permutation of range(count). Each seed and epoch has its own.
    """
    key = _hash_of(seed, epoch)
    half = np.uint64(max(1, (max(1, count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)

    def permuted(number: _Hashes, key: _Hashes) -> _Hashes:
        left, right = number >> half, number & mask
        for turn in range(_SHUFFLE_ROUNDS):
            left, right = right, left ^ (_mixed(right + key + np.uint64(turn << 32)) & mask)
        return (left << half) | right

    out = permuted(index.astype(np.uint64), key)
    while (beyond := np.flatnonzero(out >= count)).size:
        out[beyond] = permuted(out[beyond], key[beyond])
    return out.astype(np.int64)


def _hash_of(seed: int, epoch: _Ints) -> _Hashes:
    """Return 64 bits for each epoch that look independent of those of all others."""
    return _mixed(_mixed(np.full(epoch.shape, seed % (1 << 64), np.uint64)) ^ epoch.astype(np.uint64))


def _mixed(number: _Hashes) -> _Hashes:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood, 2014), with its increment."""
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))


# Opening the sources --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The data of a run."""

    vocabulary: int  # a number above every token
    fingerprint: str  # a digest that is the same on ranks that read the same data
    about: str  # the name of the data in messages
    train: TokenWindows | TokenMixture
    held_out: TokenWindows | TokenMixture | None  # None with data.held_out = 0


def open_tokens(
    config: DataConfig,
    length: int,
    *,
    seed: int = 0,
    first_here: bool = True,
    wait: Callable[[], object] = lambda: None,
    progress: Progress | None = None,
) -> Tokens:
    """Open the data of a run, on each of its ranks.

    Args:
        config: The section [data].
        length: Tokens of a sequence.
        seed: The seed of the order.
        first_here: Whether this is the first rank of its node, which makes the tokens that the node lacks.
        wait: A barrier of all ranks. Each rank calls it exactly once, before it raises an error too.
        progress: Called with the size that is done and the size of the whole, while tokens are made.

    Raises:
        ConfigError: A source cannot be read, or is too short. Other ranks do not know of it yet.
    """
    sources = config.split_sources()
    try:
        found = [_find_tokens(source, first_here, progress) for source in sources]
    finally:
        wait()
    opened: list[Tokens] = []
    for number, (source, (folder, manifest)) in enumerate(zip(sources, found, strict=True)):
        if manifest is None:
            if not folder.exists():
                raise ConfigError(f"the first rank of this node has not made the tokens in {folder}: see what it says.")
            manifest = Manifest.load(folder)
        opened.append(_open_folder(folder, manifest, source, length, seed + number))
    if len(opened) == 1:
        return opened[0]
    shares = [int(share) for share in samples_of_each(config.weights, MIXED_SAMPLES)]
    parts = [[one.fingerprint, share] for one, share in zip(opened, shares, strict=True)]
    train = [one.train for one in opened if isinstance(one.train, TokenWindows)]
    held_out = [one.held_out for one in opened if isinstance(one.held_out, TokenWindows)]
    seed += len(opened)
    return Tokens(
        vocabulary=opened[0].vocabulary,
        fingerprint=hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
        about=", ".join(
            f"{one.about} {100 * share / MIXED_SAMPLES:g} %" for one, share in zip(opened, shares, strict=True)
        ),
        train=TokenMixture(train, config.weights, seed),
        held_out=TokenMixture(held_out, config.weights, seed) if held_out else None,
    )


def _open_folder(folder: Path, manifest: Manifest, config: DataConfig, length: int, seed: int) -> Tokens:
    """Split the tokens of one source into a part for training and, at the end, one for evaluation."""
    source = MappedTokens(folder, manifest)
    names = (*config.tokens, *config.text, *([config.dataset] if config.dataset else []))
    about = ", ".join(names) or "the sources of Python's standard library"
    count = len(source)
    held_out = int(count * config.held_out)
    train = count - held_out
    if train <= length:
        raise ConfigError(
            f"{about}: {count} tokens, {train} of them for training, but one sequence of train.length = {length} needs "
            f"{length + 1}. Shorten it or name more data."
        )
    if config.held_out and held_out <= length:
        raise ConfigError(
            f"{about}: data.held_out = {config.held_out} of {count} tokens are {held_out}, but one sequence of "
            f"train.length = {length} needs {length + 1}. Hold out more, or nothing (0)."
        )
    return Tokens(
        vocabulary=manifest.vocabulary,
        fingerprint=manifest.fingerprint,
        about=about,
        train=TokenWindows(source, range(train), length, seed),
        held_out=TokenWindows(source, range(train, count), length, seed) if held_out else None,
    )


def _find_tokens(config: DataConfig, first_here: bool, progress: Progress | None) -> tuple[Path, Manifest | None]:
    """Return the folder of tokens, and its manifest unless another rank is making the folder."""
    if config.tokens:
        folder = Path(config.tokens[0]).expanduser()
        manifest = Manifest.load(folder)
        if first_here and manifest.size_bytes <= _VERIFIED_BYTES:
            manifest.verify(folder)
        if tokenizer_fingerprint(config.tokenizer) != manifest.tokenizer_fingerprint:
            raise ConfigError(
                f"data.tokens = {config.tokens[0]!r} was prepared with the tokenizer {manifest.tokenizer!r} "
                f"({manifest.tokenizer_fingerprint[:19]}), not with data.tokenizer = {config.tokenizer!r}: set that to "
                "the same, or prepare the tokens again."
            )
        return folder, manifest
    found = corpus.find(config)
    identity = [corpus.PIECE_BYTES, tokenizer_fingerprint(config.tokenizer), Path(config.tokenizer).name]
    text = json.dumps([*identity, *found.identity()]).encode("utf-8", errors="surrogateescape")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()).absolute()
    folder = cache / "towpath" / "tokens" / hashlib.sha256(text).hexdigest()[:32]
    return folder, _cached(found, config.tokenizer, folder, progress) if first_here else None


def _cached(found: corpus.Corpus, tokenizer: str, folder: Path, progress: Progress | None) -> Manifest:
    if not folder.exists():
        _remove_old(folder.parent)
        try:
            prepare(found, tokenizer, folder, progress=progress)
        except ConfigError:
            # Another run may have made the folder meanwhile. Then this one cannot be renamed to it.
            if not (folder / MANIFEST).exists():
                raise
    with suppress(OSError):  # the cache may be read-only
        (folder / MANIFEST).touch()
    try:
        return Manifest.load(folder)
    except ConfigError as error:
        raise ConfigError(f"{error} It is a cache: remove {folder}, and it is made anew.") from None


def _remove_old(cache: Path) -> None:
    """Remove folders that were long unused, and unfinished ones. A run that has one mapped keeps its tokens."""
    for folder in cache.glob("*"):
        used = folder if folder.name.startswith(".") else folder / MANIFEST
        with suppress(OSError):  # another run may remove it too
            if time.time() - used.stat().st_mtime > _KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
