"""The tokens of a run: `towpath data prepare` writes them into a folder, and training maps that into memory.

    tokens.bin     unsigned integers, little-endian, as narrow as the vocabulary allows
    tokens.json    their type, number, vocabulary, tokenizer and SHA-256

The folder is written under a temporary name and then renamed, so a folder under its own name is complete.

Training reads windows of tokens, each known by its number:

    sample 0, 1, 2, ...  ──>  epoch, and place in it  ──>  shuffled within the epoch  ──>  length + 1 tokens

The position of a run is one counter of samples of the whole job, and samples k to k + n are the same for every caller.
So the number of ranks may change between runs, and a resumed run reads on where it stopped. All ranks of a node map the
tokens into memory, as one copy.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from towpath.errors import ConfigError
from towpath.files import sync_folder
from towpath.train.config import DataConfig

if TYPE_CHECKING:  # to prepare tokens takes no torch
    from torch import Tensor

Batch: TypeAlias = "tuple[Tensor, Tensor]"  # inputs and targets, int64 [count, length]

TOKENS, MANIFEST = "tokens.bin", "tokens.json"  # the files of a folder of tokens
FORMAT = "towpath tokens 2"
DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}

# Files up to this size are verified at every start, which takes about a second.
_VERIFIED_BYTES = 1 << 30
Texts = list[tuple[bytes, bool]]  # text, and whether a document ends with it

_PIECE_BYTES = 1 << 24  # a larger file is cut at the next end of a line
_ROWS = 256  # of a dataset, encoded at once
_BUILDERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<end_of_text>")

# Parts of Python's library that differ between machines: distributions split packages off, and builds write files.
_WITHOUT = "site-packages dist-packages test tests idlelib lib2to3 distutils ensurepip tkinter turtledemo lib-dynload"
_WITHOUT_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize", "turtle", ".")


@dataclass(frozen=True, kw_only=True)
class PreparedTokens:
    """The description of a folder of tokens, as in its tokens.json."""

    dtype: str
    vocabulary: int  # a number above every token
    tokenizer: str
    documents: int
    tokens: int
    sha256: str  # of tokens.bin

    def __str__(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @staticmethod
    def load(folder: Path) -> PreparedTokens:
        """Read the manifest of a folder."""
        path = folder / MANIFEST
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            if table.pop("format") != FORMAT or table["dtype"] not in DTYPES:
                raise ValueError("another format")
            return PreparedTokens(**table)
        except OSError as error:
            what = "Expected a folder that `towpath data prepare` made"
            raise ConfigError(f"data.tokens: cannot read {path}: {error.strerror}. {what}.") from None
        except (AttributeError, KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"{path} is not what `towpath data prepare` writes ({error}): prepare it anew.") from None

    def map(self, folder: Path, verify: bool) -> NDArray[Any]:
        """Return all tokens, mapped into memory. With `verify`, compare the checksum of a file up to 1 GiB."""
        path, size = folder / TOKENS, self.tokens * np.dtype(DTYPES[self.dtype]).itemsize
        try:
            if (found := path.stat().st_size) != size:
                raise ConfigError(f"{path} has {found} bytes, expected {size}: prepare the tokens anew.")
            if verify and size <= _VERIFIED_BYTES:
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                        raise ConfigError(f"{path} is not what {MANIFEST} says: prepare the tokens anew.")
            # As a plain array: a slice of numpy's memmap costs several times as much.
            return np.asarray(np.memmap(path, dtype=DTYPES[self.dtype], mode="r"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}. Prepare the tokens anew.") from None


class Tokenizer:
    """The tokenizer "bytes": its 256 tokens are the bytes, and NUL, which no text holds, ends a document."""

    name = "bytes"
    vocabulary = 256
    end: int | None = 0

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Return the tokens of each text."""
        return [np.frombuffer(text, np.uint8) for text in texts]


class FileTokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` library, which encodes on all cores.

    Bytes that are not UTF-8 become U+FFFD. A token such as <|endoftext|> that is written in a text stays a token.
    """

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise ConfigError(f"the tokenizer {path} needs a library: pip install 'towpath[hf]'.") from None
        try:
            self._tokenizer: Any = Library.from_str(Path(path).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the tokenizer {path}: {error.strerror}. Name a tokenizer.json.") from None
        except Exception as error:  # the library raises no narrower class
            raise ConfigError(f"{path} is not a tokenizer.json of the tokenizers library: {error}.") from None
        # The file may enable both. They are for batches of a fixed length.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        tokens: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = Path(path).name
        self.vocabulary = max(tokens.values(), default=0) + 1  # a file may leave gaps, so not the number of tokens
        self.end = next((tokens[end] for end in _END_TOKENS if end in tokens), None)

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        decoded = [text.decode("utf-8", errors="replace") for text in texts]
        encoded = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in encoded]


def prepare(
    sources: Sequence[str],
    folder: Path,
    tokenizer: str = "bytes",
    *,
    column: str = "text",
    split: str = "train",
    name: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> PreparedTokens:
    """Write the tokens of text files, or of one dataset, into a folder that does not exist yet.

    `column`, `split` and `name` are those of a dataset, whose rows are documents. `progress` is called now and then
    with the number of tokens so far.
    """
    folder = folder.expanduser().absolute()
    encoder = Tokenizer() if tokenizer == Tokenizer.name else FileTokenizer(tokenizer)
    dtype = next(each for each, code in DTYPES.items() if encoder.vocabulary - 1 <= np.iinfo(code).max)
    if folder.exists():
        raise ConfigError(f"{folder} is there already: choose another folder, or remove it first.")
    texts = _rows_of(sources, column, split, name) if _is_dataset(sources) else _files(sources)
    count = documents = 0
    digest = hashlib.sha256()
    temporary = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        with (temporary / TOKENS).open("wb") as file:
            for pieces in texts:
                for (_, ends), tokens in zip(pieces, encoder.encode([text for text, _ in pieces]), strict=True):
                    end = [] if encoder.end is None or not ends else [encoder.end]
                    content = np.append(tokens, end).astype(DTYPES[dtype]).tobytes()
                    file.write(content)
                    digest.update(content)
                    count, documents = count + len(tokens) + len(end), documents + ends
                if progress:
                    progress(count)
            os.fsync(file.fileno())
        if not documents:
            raise ConfigError(f"no text in {', '.join(sources)}: expected text files, or a dataset with rows.")
        manifest = PreparedTokens(
            dtype=dtype,
            vocabulary=encoder.vocabulary,
            tokenizer=encoder.name,
            documents=documents,
            tokens=count,
            sha256=digest.hexdigest(),
        )
        (temporary / MANIFEST).write_text(str(manifest), encoding="utf-8")
        sync_folder(temporary)
        temporary.rename(folder)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after the rename there is nothing to remove
    return manifest


def _is_dataset(sources: Sequence[str]) -> bool:
    paths = [Path(source) for source in sources]
    if all(path.is_file() and path.suffix.lower() not in _BUILDERS for path in paths):
        return False
    missing = [source for source, path in zip(sources, paths, strict=True) if not path.exists()]
    if missing and not (len(sources) == 1 and re.fullmatch(r"[\w.-]+/[\w.-]+", sources[0])):
        raise ConfigError(f"{missing[0]} is not there: expected text files, or a dataset (looked in {Path.cwd()}).")
    return True


def _files(paths: Sequence[str]) -> Iterator[Texts]:
    for path in paths:
        try:
            with Path(path).open("rb") as file:
                pieces = iter(lambda: file.read(_PIECE_BYTES) + file.readline(), b"")
                for piece, following in itertools.pairwise(itertools.chain(pieces, [b""])):
                    yield [(piece, not following)]
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}. Check its rights.") from None


def _rows_of(sources: Sequence[str], column: str, split: str, name: str | None) -> Iterator[Texts]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{sources[0]} needs the datasets library: pip install 'towpath[hf]'.") from None
    builder, folder = _BUILDERS.get(Path(sources[0]).suffix.lower()), Path(sources[0])
    try:
        found: Any
        if builder is not None:
            found = datasets.load_dataset(builder, data_files=list(sources), split="train")
        elif len(sources) > 1:
            raise ConfigError(f"{', '.join(sources)}: expected text files, or one dataset.")
        elif (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():  # by save_to_disk()
            found = datasets.load_from_disk(sources[0])
            found = found[split] if isinstance(found, dict) else found
        else:
            found = datasets.load_dataset(sources[0], name, split=split)
    except ConfigError:
        raise
    except Exception as error:  # each kind of file fails in its own way
        text = " ".join(str(error).split())[:300]
        raise ConfigError(f"datasets cannot load {', '.join(sources)}: {type(error).__name__}: {text}.") from None
    if column not in found.column_names:
        raise ConfigError(f"{sources[0]} has no column {column!r}; it has {', '.join(found.column_names)}.")
    for rows in found.iter(batch_size=_ROWS):
        texts: list[Any] = [text for text in rows[column] if text]
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise ConfigError(f"column {column!r} of {sources[0]} has {wrong[0]!r}; expected text.")
        yield [(text.encode(), True) for text in texts]


# What training reads --------------------------------------------------------------------------------------------------


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
        return self._gather([epoch_order(self._seed, epoch, len(self))[place] for epoch, place in places])

    def evaluation_batch(self, first: int, count: int, total: int) -> Batch:
        """Return windows `first` to `first + count` of `total` windows that are spread evenly over the range.

        They are fixed: the same `total` gives the same windows on any number of ranks. If `total` exceeds the number of
        windows, some of them repeat.
        """
        return self._gather([number * len(self) // total for number in range(first, first + count)])

    def _gather(self, windows: list[int]) -> Batch:
        starts = [int(window) * self._length for window in windows]
        rows = np.stack([self._tokens[start : start + self._length + 1] for start in starts]).astype(np.int64)
        import torch

        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
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
