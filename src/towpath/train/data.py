"""From tokens on disk to batches: windows of tokens, each known by its number.

    sample 0, 1, 2, ...  ──>  epoch, and place in it  ──>  shuffled within the epoch  ──>  length + 1 tokens

The position of a run is one counter of samples of the whole job, and samples k to k + n are the same for every caller.
So the number of ranks may change between runs, and a resumed run reads on where it stopped.

`towpath data prepare` (prepare.py) writes them. All ranks of a node map them into memory, as one copy.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from towpath.errors import ConfigError
from towpath.train.config import DataConfig
from towpath.train.prepare import PreparedTokens

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, int64 [count, length]

# Parts of Python's library that differ between machines: distributions split packages off, and builds write files.
_WITHOUT = "site-packages dist-packages test tests idlelib lib2to3 distutils ensurepip tkinter turtledemo lib-dynload"
_WITHOUT_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize", "turtle", ".")


def python_sources() -> bytes:
    """Return the sources of Python's standard library, a NUL after each: about 10 MB of text on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _WITHOUT.split()]
        found += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith(_WITHOUT_FILES)]
    if not found:
        raise ConfigError(f"no sources of Python's standard library in {root}: name tokens in data.tokens.")
    return b"".join(path.read_bytes() + b"\0" for path in sorted(found))


class TokenWindows:
    """A range of tokens, cut into windows. The targets of a window are its inputs, one token later."""

    def __init__(self, tokens: NDArray[Any], length: int, seed: int) -> None:
        self._tokens, self._length, self._seed = tokens, length, seed

    def __len__(self) -> int:
        """Return the number of windows in an epoch."""
        return (len(self._tokens) - 1) // self._length

    def batch(self, first: int, count: int) -> Batch:
        """Return samples `first` to `first + count`. Each epoch visits each window once, in its own order."""
        places = (divmod(sample, len(self)) for sample in range(first, first + count))
        return self._gather([order(self._seed, epoch, len(self))[place] for epoch, place in places])

    def evaluation_batch(self, first: int, count: int, total: int) -> Batch:
        """Return windows `first` to `first + count` of `total` windows that are spread evenly over the range.

        They are fixed: the same `total` gives the same windows on any number of ranks. If `total` exceeds the number of
        windows, some of them repeat.
        """
        return self._gather([number * len(self) // total for number in range(first, first + count)])

    def _gather(self, windows: list[int]) -> Batch:
        starts = [int(window) * self._length for window in windows]
        rows = np.stack([self._tokens[start : start + self._length + 1] for start in starts]).astype(np.int64)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


@lru_cache(maxsize=4)
def order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """Return the order of an epoch: a permutation of range(count), of which each seed and epoch has its own."""
    # numpy guarantees that a RandomState draws the same numbers in all versions.
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, epoch]).permutation(count)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The data of a run."""

    vocabulary: int
    fingerprint: str  # the same on ranks that read the same tokens
    about: str  # the name of the data in messages
    train: TokenWindows
    held_out: TokenWindows | None  # None with data.held_out = 0


def open_tokens(config: DataConfig, length: int, *, seed: int = 0, verify: bool = True) -> Tokens:
    """Open the data of a run, and split it into a part for training and, at the end, one for evaluation.

    With `verify`, it compares the checksum of the tokens.
    """
    if config.tokens:
        folder = Path(config.tokens).expanduser()
        manifest = PreparedTokens.load(folder)
        tokens, vocabulary, fingerprint = manifest.map(folder, verify), manifest.vocabulary, manifest.sha256
    else:
        text = python_sources()
        tokens, vocabulary, fingerprint = np.frombuffer(text, np.uint8), 256, hashlib.sha256(text).hexdigest()
    about = config.tokens or "the sources of Python's standard library"
    held_out = int(len(tokens) * config.held_out)
    train = len(tokens) - held_out
    if train <= length:
        raise ConfigError(
            f"{about}: {len(tokens)} tokens, {train} of them for training, but one sequence of train.length = {length} "
            f"needs {length + 1}. Shorten it or name more data."
        )
    if config.held_out and held_out <= length:
        raise ConfigError(
            f"{about}: data.held_out = {config.held_out} of {len(tokens)} tokens are {held_out}, but one sequence of "
            f"train.length = {length} needs {length + 1}. Hold out more, or nothing (0)."
        )
    return Tokens(
        vocabulary=vocabulary,
        fingerprint=fingerprint,
        about=about,
        train=TokenWindows(tokens[:train], length, seed),
        held_out=TokenWindows(tokens[train:], length, seed) if held_out else None,
    )
