"""`towpath data`: the same folder however it is made, what texts go into it, and how mistakes are answered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks.strategies import seldom
from towpath.cli.main import _run
from towpath.errors import ConfigError
from towpath.train.config import DataConfig
from towpath.train.data import corpus
from towpath.train.data.corpus import Files
from towpath.train.data.loader import open_tokens
from towpath.train.data.prepare import load_tokenizer, prepare

# Nothing takes that long, on whatever machine: what does, hangs.
HANGS_SECONDS = 300

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


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "z.txt").write_text("last\n")
    (folder / "b" / "one.md").write_text("second\n")
    (folder / "b-1.txt").write_text("third\n")
    (folder / "README").write_text("first\n")
    (folder / "empty.txt").write_text("")
    (folder / "photo.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.txt").write_text("hidden\n")
    (folder / ".git" / "config.txt").write_text("hidden\n")
    (folder / "binary.txt").write_bytes(b"text\0and numbers")
    return folder


def small_pieces(monkeypatch: pytest.MonkeyPatch, size_bytes: int = 1000) -> None:
    monkeypatch.setattr(corpus, "PIECE_BYTES", size_bytes)
    monkeypatch.setattr(corpus, "_REACH_BYTES", size_bytes // 4)


def told(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0) -> str:
    """What the command prints; where it fails, its one line."""
    assert _run(["data", *map(str, arguments)]) == status
    captured = capsys.readouterr()
    if status:
        assert len(captured.err.splitlines()) == 1 and not captured.out
    return captured.err if status else captured.out


def test_texts_are_taken_in_order_and_each_ends_with_a_nul(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = texts.parent / "tokens"
    said = told(capsys, "prepare", texts, "-o", output, "--workers", 1)
    assert (output / "tokens-00000.bin").read_bytes() == b"first\n\0second\n\0third\n\0last\n\0"
    assert "28 tokens of 4 documents, vocabulary 256, 28 B in 1 file of uint8" in said
    assert "Skipped in folders: 2 files that are hidden or not text by their names" in said
    assert "Left out: 1 files that hold NUL bytes" in said


def test_sources_keep_their_order_and_nothing_is_read_twice(texts: Path, tmp_path: Path) -> None:
    sources = [texts / "z.txt", texts / "*.txt", texts / "binary.txt", texts]
    prepare(Files.named([*map(str, sources)]), "bytes", tmp_path / "tokens")
    expected = b"last\n\0third\n\0first\n\0second\n\0"
    assert (tmp_path / "tokens" / "tokens-00000.bin").read_bytes() == expected


def test_a_file_that_is_named_is_taken_as_it_is(texts: Path, tmp_path: Path) -> None:
    prepare(Files.named([str(texts / "binary.txt")]), "bytes", tmp_path / "tokens")
    assert (tmp_path / "tokens" / "tokens-00000.bin").read_bytes() == b"text\0and numbers\0"


@pytest.mark.parametrize("ending", ["\n", "\r\n", " "], ids=["lines", "windows", "one-line"])
def test_a_large_file_is_cut_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    text = LINES.replace("\n", ending).encode()
    (tmp_path / "large.txt").write_bytes(text)
    small_pieces(monkeypatch)
    found = Files.named([str(tmp_path / "large.txt")])
    read = [text for piece in found.pieces() for text in piece.read().texts]
    assert len(read) == -(-len(text) // 1000)
    assert b"".join(one.content for one in read) == text
    assert [one.ends for one in read] == [False] * (len(read) - 1) + [True]
    for one in read:
        one.content.decode()  # no character is cut
        assert len(one.content) < 1500
        assert one.content.endswith(ending.encode()) or ending == " "


def test_the_folder_is_the_same_for_any_number_of_workers(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.txt").write_text(LINES[: 20_000 * (i + 1)])
    small_pieces(monkeypatch, 30_000)
    made: list[dict[str, bytes]] = []
    for workers in (1, 3):
        output = tmp_path / str(workers)
        told(
            capsys, *("prepare", folder, "-o", output, "--workers", workers),
            *("--tokenizer", tokenizer, "--shard-tokens", 10_000),
        )  # fmt: skip
        made.append({path.name: path.read_bytes() for path in output.iterdir()})
    assert made[0] == made[1]
    assert len(made[0]) > 3
    assert json.loads(made[0]["tokens.json"])["documents"] == 5


def test_a_tokenizer_of_a_file_gives_back_the_texts(
    texts: Path, tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer

    (texts / "z.txt").write_text("a longer text than eight tokens, so that truncation would show: ünïcode 文字\n")
    said = told(capsys, "prepare", texts, "-o", tmp_path / "tokens", "--tokenizer", tokenizer, "--workers", 1)
    manifest = json.loads((tmp_path / "tokens" / "tokens.json").read_text())
    assert manifest["dtype"] == "uint16" and manifest["tokenizer"] == "tokenizer.json"
    numbers = np.fromfile(tmp_path / "tokens" / "tokens-00000.bin", "<u2")
    library: Any = Tokenizer.from_file(str(tokenizer))
    documents = library.decode(numbers.tolist(), skip_special_tokens=False).split("<|endoftext|>")
    assert documents == ["first\n", "second\n", "third\n", (texts / "z.txt").read_text(), ""]
    assert manifest["vocabulary"] == library.get_vocab_size()
    assert "vocabulary 400" in said
    read = open_tokens(
        DataConfig(tokens=(str(tmp_path / "tokens"),), tokenizer=str(tokenizer), held_out=0.0), 8
    )  # the same file, or a copy of it, serves
    assert read.vocabulary == 400


def test_what_is_not_utf8_is_counted_where_a_tokenizer_needs_it_to_be(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin.txt").write_bytes("naïve\n".encode("latin-1"))
    said = told(capsys, "prepare", tmp_path / "latin.txt", "-o", tmp_path / "bytes", "--workers", 1)
    assert "Not UTF-8" not in said
    assert (tmp_path / "bytes" / "tokens-00000.bin").read_bytes() == b"na\xefve\n\0"
    said = told(
        capsys, "prepare", tmp_path / "latin.txt", "-o", tmp_path / "t", "--tokenizer", tokenizer, "--workers", 1
    )
    assert "Not UTF-8: 1 documents" in said


def test_the_standard_library_is_pure_text_of_ten_megabytes() -> None:
    found = corpus.find(DataConfig())
    assert isinstance(found, Files)
    assert 5e6 < found.size < 20e6
    names = [Path(file.path) for file in found.files]
    assert all(name.suffix == ".py" for name in names)
    assert not [name for name in names if {"site-packages", "test", "idlelib"} & set(name.parts)]
    assert sum(piece.size for piece in found.pieces()) == found.size
    assert max(piece.size for piece in found.pieces()) < 2 * corpus.PIECE_BYTES


def test_show_says_what_a_folder_holds(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "tokens"
    told(capsys, "prepare", texts, "-o", output, "--workers", 1, "--json", tmp_path / "prepared.json")
    said = told(capsys, "show", output, "--json", tmp_path / "shown.json")
    rows = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert rows["tokens"].strip() == "28" and rows["documents"].strip() == "4"
    assert rows["checksums"].strip() == "not verified (--verify)"
    written = [(tmp_path / name).read_text() for name in ("prepared.json", "shown.json")]
    assert written == [(output / "tokens.json").read_text()] * 2
    assert "as they were written" in told(capsys, "show", output, "--verify")
    (output / "tokens-00000.bin").write_bytes(b"x" * 28)
    assert "tokens-00000.bin is not what tokens.json says" in told(capsys, "show", output, "--verify", status=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt"], "missing.txt is not there: expected a file, a folder or a glob (looked in "),
        (["*.none"], "*.none matches no file"),
        (["empty.txt"], "no text in empty.txt"),
        (["b", "--dataset", "d"], "only one source"),
        (["b", "--dataset", "d", "--column", "x"], "only one source"),
        (["--dataset", "missing"], "the dataset missing is not there"),
        (["b", "--tokenizer", "missing.json"], "cannot read the tokenizer missing.json: No such file or directory"),
        (["b", "--tokenizer", "README"], "README is not a tokenizer.json of the tokenizers library"),
        (["b", "--tokenizer", "photo.png"], "photo.png is not a tokenizer.json of the tokenizers library"),
        (["b", "--tokenizer", "."], "the tokenizer . is a folder: name its tokenizer.json"),
        (["b", "-o", "b"], "is there already: choose another folder"),
        (["b", "-o", "z.txt/tokens"], "cannot write"),
        (["binaries"], "no text in binaries: all its 1 files hold NUL bytes"),
        (["b", "--json", "missing/x.json"], "--json missing/x.json: there is no folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(texts)
    (texts / "binaries").mkdir()
    (texts / "binaries" / "x.txt").write_bytes(b"\0")
    before = sorted(texts.iterdir())
    output = [] if "-o" in arguments else ["-o", "tokens"]
    assert message in told(capsys, "prepare", *arguments, *output, "--workers", "1", status=2)
    assert sorted(texts.iterdir()) == before


def test_without_the_library_the_extra_is_named(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"needs a library: pip install 'towpath\[hf\]'"):
        load_tokenizer(str(tokenizer))


def test_a_file_that_shrinks_meanwhile_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(LINES)
    found = Files.named([str(tmp_path / "log.txt")])
    (tmp_path / "log.txt").write_text("")
    with pytest.raises(ConfigError, match="became shorter while it was read"):
        prepare(found, "bytes", tmp_path / "tokens")


def test_an_error_in_a_worker_is_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.txt").write_text(LINES)
    found = Files.named([str(tmp_path / "log.txt")])
    (tmp_path / "log.txt").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*log.txt: No such file"):
        prepare(found, "bytes", tmp_path / "tokens", workers=2)
    assert not list(tmp_path.iterdir())


# Its tokenizer takes the first piece, and is busy with the second for as long as one likes.
STUCK = """
import threading
import towpath.train.data.corpus, towpath.train.data.prepare
from towpath.cli.main import main

class Stuck(towpath.train.data.prepare.Tokenizer):
    def encode_batch(self, texts):
        if texts[0].startswith(b"second"):
            print("busy", flush=True)
            threading.Event().wait()
        return super().encode_batch(texts)

towpath.train.data.corpus.PIECE_BYTES = 8
towpath.train.data.prepare.load_tokenizer = lambda name: Stuck()
main()
"""


@pytest.mark.parametrize(
    ("number", "status"), [seldom(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_interrupted_it_leaves_nothing(tmp_path: Path, number: signal.Signals, status: int) -> None:
    (tmp_path / "a.txt").write_text("first of 2\nsecond\n")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # tests started in the background: it would be inherited
        signal.signal(signal.SIGINT, signal.default_int_handler)
    line = [
        sys.executable,
        "-c",
        STUCK,
        "data",
        "prepare",
        tmp_path / "a.txt",
        "-o",
        tmp_path / "tokens",
        "--workers=1",
    ]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "busy\n"
        assert [path.name[:16] for path in tmp_path.glob(".*")] == [".tokens.partial-"]
        process.send_signal(number)
        assert process.wait(HANGS_SECONDS) == status
        assert "Traceback" not in process.stderr.read()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_an_interrupt_ends_the_workers_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 1_000_000)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        found = Files.named([str(tmp_path / "a.txt")])
        prepare(found, "bytes", tmp_path / "tokens", workers=2, progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert not any(b"spawn_main" in command_of(child) for child in children())


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def command_of(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    rows = {"text": [f"row {i}\n" for i in range(600)] + [None, ""], "number": list(range(602))}
    whole = datasets.Dataset.from_dict(rows)
    whole.save_to_disk(str(tmp_path / "whole"))
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(str(tmp_path / "with-train"))
    datasets.DatasetDict({"a": whole, "b": whole}).save_to_disk(str(tmp_path / "without-train"))
    return tmp_path


@pytest.mark.parametrize("folder", ["whole", "with-train", "without-train/b"])
def test_a_dataset_is_its_rows(dataset: Path, capsys: pytest.CaptureFixture[str], folder: str) -> None:
    told(capsys, "prepare", "--dataset", dataset / folder, "-o", dataset / "tokens", "--workers", 1)
    expected = b"".join(f"row {i}\n\0".encode() for i in range(600))
    assert (dataset / "tokens" / "tokens-00000.bin").read_bytes() == expected


def test_a_dataset_serves_without_being_prepared(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(dataset / "cache"))
    read = open_tokens(DataConfig(dataset=str(dataset / "whole"), held_out=0.0), 6)
    assert bytes(read.train.evaluation_batch(0, 1, 1)[0][0].tolist()) == b"row 0\n"


@pytest.mark.parametrize(
    ("folder", "column", "message"),
    [
        ("whole", "body", "has no column 'body'; it has text, number"),
        ("whole", "number", "column 'number' of the dataset .*, not text"),
        ("without-train", "text", "has no split 'train': name one of .*/without-train/a, .*/without-train/b"),
        (".", "text", "is not a dataset on disk"),
    ],
)
def test_a_dataset_that_does_not_serve_is_refused(dataset: Path, folder: str, column: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        corpus.find(DataConfig(dataset=str(dataset / folder), column=column))
    assert "\n" not in str(caught.value)
