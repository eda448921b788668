"""`towpath data prepare`: what texts and datasets become, and how mistakes are answered."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from towpath.cli.main import _run
from towpath.errors import ConfigError
from towpath.train import data as preparing
from towpath.train.config import DataConfig
from towpath.train.data import FileTokenizer, open_tokens, prepare

LINES = "".join(f"line {i} of ünïcode 文字\n" for i in range(3000))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer.json with an end-of-text token, which asks for truncation and padding."""
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(LINES.splitlines(), trainer)
    made.enable_truncation(8)
    made.enable_padding(length=32)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0) -> str:
    """What the command prints; where it fails, its one line."""
    assert _run(["data", "prepare", *map(str, arguments)]) == status
    captured = capsys.readouterr()
    if status:
        assert len(captured.err.splitlines()) == 1 and not captured.out
    return captured.err if status else captured.out


def test_texts_keep_their_order_and_each_ends_with_a_nul(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("z.txt", b"last\n"), ("b.md", "naïve\n".encode("latin-1")), ("empty.txt", b"")):
        (tmp_path / name).write_bytes(text)
    output = tmp_path / "tokens"
    said = told(capsys, tmp_path / "z.txt", tmp_path / "empty.txt", tmp_path / "b.md", "-o", output)
    assert (output / "tokens.bin").read_bytes() == b"last\n\0na\xefve\n\0"
    assert "13 tokens of 2 documents, vocabulary 256, 13 B of uint8" in said


@pytest.mark.parametrize("ending", ["\n", "\r\n", " "], ids=["lines", "windows", "one-line"])
def test_a_large_file_is_cut_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    text = LINES.replace("\n", ending).encode()
    (tmp_path / "large.txt").write_bytes(text)
    monkeypatch.setattr(preparing, "_PIECE_BYTES", 1000)
    made = prepare([str(tmp_path / "large.txt")], tmp_path / "tokens")
    assert (tmp_path / "tokens" / "tokens.bin").read_bytes() == text + b"\0"
    assert made.documents == 1


def test_a_tokenizer_of_a_file_gives_back_the_texts(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer

    monkeypatch.setattr(preparing, "_PIECE_BYTES", 30)
    texts = ["first\n", "a longer text than eight tokens, so that truncation would show:\nünïcode 文字\n"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    said = told(
        capsys, tmp_path / "0.txt", tmp_path / "1.txt", "-o", tmp_path / "tokens", "--tokenizer", tokenizer
    )  # fmt: skip
    manifest = json.loads((tmp_path / "tokens" / "tokens.json").read_text())
    assert manifest["dtype"] == "uint16" and manifest["tokenizer"] == "tokenizer.json"
    numbers = np.fromfile(tmp_path / "tokens" / "tokens.bin", "<u2")
    library: Any = Tokenizer.from_file(str(tokenizer))
    documents = library.decode(numbers.tolist(), skip_special_tokens=False).split("<|endoftext|>")
    assert documents == [*texts, ""]
    assert "vocabulary 400" in said
    assert open_tokens(DataConfig(tokens=str(tmp_path / "tokens"), held_out=0.0), 8).vocabulary == 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt"], "missing.txt is not there: expected text files, or a dataset (looked in "),
        (["empty.txt"], "no text in empty.txt"),
        (["a.txt", "folder"], "expected text files, or one dataset"),
        (["folder"], "datasets cannot load folder"),
        (["a.txt", "--tokenizer", "a.txt"], "a.txt is not a tokenizer.json of the tokenizers library"),
        (["a.txt", "--tokenizer", "."], "cannot read the tokenizer .: Is a directory"),
        (["a.txt", "-o", "folder"], "is there already: choose another folder"),
        (["a.txt", "-o", "a.txt/tokens"], "cannot write"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "folder").mkdir()
    for name, text in (("a.txt", "a text\n"), ("empty.txt", "")):
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.iterdir())
    output = [] if "-o" in arguments else ["-o", "tokens"]
    assert message in told(capsys, *arguments, *output, status=2)
    assert sorted(tmp_path.iterdir()) == before


def test_without_the_libraries_the_extra_is_named(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("tokenizers", "datasets"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=r"needs a library: pip install 'towpath\[hf\]'"):
        FileTokenizer(str(tokenizer))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r"needs the datasets library: pip install 'towpath\[hf\]'"):
        prepare([str(tmp_path / "rows.jsonl")], tmp_path / "tokens")


def test_what_was_written_before_an_interrupt_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text\n")

    def stop(_: int) -> None:
        assert [path.name[:16] for path in tmp_path.glob(".*")] == [".tokens.partial-"]
        raise KeyboardInterrupt

    monkeypatch.setattr(preparing.os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare([str(tmp_path / "a.txt")], tmp_path / "tokens")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same rows on disk as a dataset, as one with splits, as JSON lines and as Parquet."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = {"text": [f"row {i}\n" for i in range(600)] + [None, ""], "number": list(range(602))}
    whole = datasets.Dataset.from_dict(rows)
    whole.save_to_disk(str(tmp_path / "whole"))
    datasets.DatasetDict({"other": whole.select([0]), "b": whole}).save_to_disk(str(tmp_path / "splits"))
    whole.to_json(str(tmp_path / "rows.jsonl"))
    (tmp_path / "folder").mkdir()
    whole.to_parquet(str(tmp_path / "folder" / "rows.parquet"))
    return tmp_path


@pytest.mark.parametrize("source", [["whole"], ["splits", "--split", "b"], ["rows.jsonl"], ["folder"]], ids=str)
def test_a_dataset_is_its_rows(dataset: Path, capsys: pytest.CaptureFixture[str], source: list[str]) -> None:
    told(capsys, dataset / source[0], *source[1:], "-o", dataset / "tokens")
    expected = b"".join(f"row {i}\n\0".encode() for i in range(600))
    assert (dataset / "tokens" / "tokens.bin").read_bytes() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "body"}, "has no column 'body'; it has text, number"),
        ({"column": "number"}, "column 'number' of .* has 1; expected text"),
        ({"source": "splits", "split": "none"}, "datasets cannot load .*splits: KeyError"),
    ],
)
def test_a_dataset_that_does_not_serve_is_refused(dataset: Path, options: dict[str, str], message: str) -> None:
    source = str(dataset / options.pop("source", "whole"))
    with pytest.raises(ConfigError, match=message) as caught:
        prepare([source], dataset / "tokens", **options)  # pyright: ignore[reportArgumentType]
    assert "\n" not in str(caught.value)
