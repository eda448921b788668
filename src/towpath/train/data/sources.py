"""From a configuration's section [data] to the windows that a run reads.

Tokens always come from folders of shards that are mapped into memory, one copy for all ranks of a node: those that
`towpath data prepare` made, or, for text and datasets, some in the user's cache, made by the node's first rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from towpath.errors import ConfigError
from towpath.train.config import MIXED_SAMPLES, DataConfig
from towpath.train.data import corpus, tokens
from towpath.train.data.mixture import Mixture, samples_of_each
from towpath.train.data.prepare import Plan, prepare
from towpath.train.data.shards import MANIFEST, Manifest, Mapped, Progress
from towpath.train.data.text_pieces import PIECE_BYTES, Corpus
from towpath.train.data.windows import Windows

# Verified at every start: what takes a second or so. All of it: `towpath data show --verify`.
_VERIFIED_BYTES = 1 << 30
# What nobody has read for this long leaves the cache when something new comes.
_KEPT_SECONDS = 30 * 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    vocabulary: int
    fingerprint: str  # ranks that read the same have the same
    about: str
    train: Windows | Mixture
    held_out: Windows | Mixture | None  # None with data.held_out = 0


def _alone() -> None:
    pass


def open_tokens(
    config: DataConfig,
    length: int,
    *,
    seed: int = 0,
    first_here: bool = True,
    wait: Callable[[], object] = _alone,
    progress: Progress | None = None,
) -> Tokens:
    """The data of a run, on each of its ranks.

    One rank of each node is `first_here`: it makes what the node lacks. `wait()` is a barrier of all ranks, and each
    calls it exactly once, also one that fails: its ConfigError comes after, for the caller to share.
    """
    sources = config.alone()
    try:
        found = [_folder(source, first_here, progress) for source in sources]
    finally:
        wait()
    opened = [
        _opened(folder, manifest or _made_by_the_first(folder), source, length, seed + number)
        for number, (source, (folder, manifest)) in enumerate(zip(sources, found, strict=True))
    ]
    return opened[0] if len(opened) == 1 else _mixed(opened, config, seed + len(opened))


def _opened(folder: Path, manifest: Manifest, config: DataConfig, length: int, seed: int) -> Tokens:
    """One source."""
    source = Mapped(folder, manifest)
    named = (*config.tokens, *config.text, *([config.dataset] if config.dataset else []))
    about = ", ".join(named) or "the sources of Python's standard library"
    train, held_out = _split(len(source), length, config.held_out, about)
    return Tokens(
        vocabulary=manifest.vocabulary,
        fingerprint=manifest.fingerprint,
        about=about,
        train=Windows(source, train, length, seed),
        held_out=Windows(source, held_out, length, seed) if held_out else None,
    )


def _mixed(opened: list[Tokens], config: DataConfig, seed: int) -> Tokens:
    """Sources of one tokenizer, each in its share."""
    shares = samples_of_each(config.weights, MIXED_SAMPLES)
    said = [[one.fingerprint, int(share)] for one, share in zip(opened, shares, strict=True)]
    parts = [f"{one.about} {100 * share / MIXED_SAMPLES:g} %" for one, share in zip(opened, shares, strict=True)]
    held_out = [one.held_out for one in opened if isinstance(one.held_out, Windows)]
    train = [one.train for one in opened if isinstance(one.train, Windows)]
    return Tokens(
        vocabulary=opened[0].vocabulary,
        fingerprint=hashlib.sha256(json.dumps(said).encode()).hexdigest(),
        about=", ".join(parts),
        train=Mixture(train, config.weights, seed),
        held_out=Mixture(held_out, config.weights, seed) if held_out else None,
    )


def _folder(config: DataConfig, first_here: bool, progress: Progress | None) -> tuple[Path, Manifest | None]:
    """Where the tokens are, and what they are unless another rank is at work on it."""
    if config.tokens:
        folder = Path(config.tokens[0]).expanduser()
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
            f"data.tokens = {config.tokens[0]!r} was prepared with the tokenizer {manifest.tokenizer!r} "
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


def _made_by_the_first(folder: Path) -> Manifest:
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
