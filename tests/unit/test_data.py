"""TokenWindows: each once an epoch, shared out by number alone; and what opens them, on each rank of a node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from towpath.errors import ConfigError
from towpath.train.config import DataConfig
from towpath.train.data.corpus import Files
from towpath.train.data.loader import Tokens, TokenWindows, open_tokens, shuffled
from towpath.train.data.prepare import prepare

LENGTH = 8
examples = settings(max_examples=50, deadline=None)


class Counting:
    """As the tokens of a folder, but each is its own place."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, out: np.ndarray[Any, Any]) -> None:
        assert start >= 0 and start + len(out) <= self.count
        out[:] = np.arange(start, start + len(out))


def windows(count: int, *, length: int = LENGTH, seed: int = 0, begin: int = 0) -> TokenWindows:
    source: Any = Counting(begin + count)
    return TokenWindows(source, range(begin, begin + count), length, seed)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "towpath" / "tokens"


@examples
@given(count=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 2**40))
def test_an_epochs_order_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(count), count, seed, np.full(count, epoch))
    assert sorted(order.tolist()) == list(range(count))


def test_orders_of_other_epochs_and_seeds_are_others() -> None:
    count = 1000
    orders = [
        shuffled(np.arange(count), count, seed, np.full(count, epoch)) for seed in (0, 1, 2**32) for epoch in (0, 1, 2)
    ]
    orders.append(np.arange(count))
    same = [int((a == b).sum()) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(same) < 10  # two random orders of a thousand agree in one place on average


def test_an_order_stays_what_it_was() -> None:
    """Runs go on with the order they began with: to change it is to break each checkpoint."""
    assert shuffled(np.arange(10), 10, 7, np.full(10, 3)).tolist() == [5, 1, 8, 7, 0, 2, 4, 3, 6, 9]


@examples
@given(
    tokens=st.integers(LENGTH + 1, 400), begin=st.integers(0, 50), seed=st.integers(0, 99), epoch=st.integers(0, 1000)
)
def test_an_epoch_reads_each_window_once_and_nothing_beyond_the_stretch(
    tokens: int, begin: int, seed: int, epoch: int
) -> None:
    reader = windows(tokens, seed=seed, begin=begin)
    inputs, targets = reader.batch(epoch * len(reader), len(reader))
    assert inputs.shape == targets.shape == (len(reader), LENGTH)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    first = int(inputs.min())
    assert begin <= first and int(targets.max()) < begin + tokens
    assert sorted(inputs.flatten().tolist()) == list(range(first, first + len(reader) * LENGTH))


def test_epochs_cut_the_windows_at_other_places() -> None:
    reader = windows(20 * LENGTH)  # of 159 places for a beginning, 7 are left over
    cuts = {int(reader.batch(epoch * len(reader), len(reader))[0].min()) for epoch in range(100)}
    assert cuts == set(range(LENGTH))


@examples
@given(
    world=st.sampled_from([1, 2, 3, 4, 6]),
    micro_batch=st.sampled_from([1, 2]),
    step=st.integers(0, 50),
    count=st.integers(LENGTH + 1, 2000),
)
def test_ranks_of_any_world_read_the_same_step_together(world: int, micro_batch: int, step: int, count: int) -> None:
    batch, reader = 24, windows(count)
    read = [
        reader.batch(step * batch + micro_step * world * micro_batch + rank * micro_batch, micro_batch)[0]
        for micro_step in range(batch // (world * micro_batch))
        for rank in range(world)
    ]
    assert torch.equal(torch.cat(read), reader.batch(step * batch, batch)[0])


@examples
@given(count=st.integers(LENGTH + 1, 500), total=st.sampled_from([4, 12, 24]), world=st.sampled_from([1, 2, 4]))
def test_evaluation_reads_the_same_windows_in_any_world(count: int, total: int, world: int) -> None:
    reader, each = windows(count), total // world
    read = torch.cat([reader.evaluation_batch(rank * each, each, total)[0] for rank in range(world)])
    assert torch.equal(read, reader.evaluation_batch(0, total, total)[0])
    starts = read[:, 0].tolist()
    assert starts == sorted(starts) and starts[0] == 0
    assert len(set(starts)) == min(total, len(reader))


def test_evaluation_takes_every_window_where_it_takes_as_many() -> None:
    reader = windows(10 * LENGTH + 1)
    assert reader.evaluation_batch(0, 10, 10)[0].flatten().tolist() == list(range(10 * LENGTH))


def prepared(folder: Path, text: str = "a line of text\n" * 100, shard_tokens: int = 97) -> Path:
    source = folder / "source.txt"
    source.write_text(text)
    prepare(Files.named([str(source)]), "bytes", folder / "tokens", shard_tokens=shard_tokens)
    return folder / "tokens"


def content(tokens: Tokens) -> bytes:
    """What it trains with and holds out, as far as windows go."""
    held_out = tokens.held_out
    stretches = [tokens.train, *([held_out] if held_out else [])]
    return b"|".join(bytes(w.evaluation_batch(0, len(w), len(w))[0].flatten().tolist()) for w in stretches)


def test_windows_reach_over_the_ends_of_files(tmp_path: Path) -> None:
    text = "".join(f"{i:05d}\n" for i in range(300))
    config = DataConfig(tokens=(str(prepared(tmp_path, text, shard_tokens=5)),), held_out=0.0)
    tokens = open_tokens(config, 200)
    assert tokens.held_out is None
    assert content(tokens) == text.encode()[:1800]
    assert tokens.vocabulary == 256


def test_the_end_is_held_out(tmp_path: Path) -> None:
    text = "".join(f"{i:05d}\n" for i in range(300))
    tokens = open_tokens(DataConfig(tokens=(str(prepared(tmp_path, text)),), held_out=0.2), 10)
    train, held_out = content(tokens).split(b"|")
    assert train == text.encode()[:1440]
    assert held_out == (text.encode() + b"\0")[1441:1791]
    inputs, targets = tokens.train.batch(0, len(tokens.train))
    assert b"00240" not in bytes(inputs.flatten().tolist()) + bytes(targets.flatten().tolist())


def test_text_is_prepared_once_and_then_read_from_the_cache(tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "some.txt"
    source.write_text("some text\n" * 50)
    config = DataConfig(text=(str(source),), held_out=0.0)
    waited: list[bool] = []
    first = open_tokens(config, LENGTH, wait=lambda: waited.append(True))
    (made,) = cache.iterdir()
    written = made.joinpath("tokens-00000.bin").stat()
    again = open_tokens(config, LENGTH, first_here=False, wait=lambda: waited.append(True))
    assert waited == [True, True]
    assert first.fingerprint == again.fingerprint
    assert content(first) == content(again)
    assert made.joinpath("tokens-00000.bin").stat() == written

    source.write_text("other text\n" * 50)
    other = open_tokens(config, LENGTH)
    assert other.fingerprint != first.fingerprint
    assert len(list(cache.iterdir())) == 2


def test_the_fingerprint_is_of_the_tokens_wherever_they_lie(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    paths = [prepared(folder) for folder in folders]
    a, b = (open_tokens(DataConfig(tokens=(str(path),)), LENGTH) for path in paths)
    assert a.fingerprint == b.fingerprint


def test_without_a_source_it_is_the_standard_library() -> None:
    tokens = open_tokens(DataConfig(), 256)
    assert tokens.held_out is not None
    assert len(tokens.train) > 10_000
    assert "standard library" in tokens.about
    assert "import" in bytes(tokens.train.batch(0, 64)[0].flatten().tolist()).decode(errors="replace")


def test_a_rank_that_fails_has_waited_for_the_others(tmp_path: Path) -> None:
    waited: list[bool] = []
    with pytest.raises(ConfigError, match="is not there"):
        open_tokens(DataConfig(text=(str(tmp_path / "none"),)), LENGTH, wait=lambda: waited.append(True))
    assert waited == [True]


def test_what_the_first_rank_could_not_make_the_others_miss(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("some text\n")
    with pytest.raises(ConfigError, match="the first rank of this node has not made the tokens"):
        open_tokens(DataConfig(text=(str(tmp_path),)), LENGTH, first_here=False)


def test_what_is_long_unused_leaves_the_cache(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n" * 50)
    open_tokens(DataConfig(text=(str(tmp_path / "first.txt"),)), LENGTH)
    (cache / ".killed.partial-1").mkdir()
    monkeypatch.setattr("towpath.train.data.loader._KEPT_SECONDS", -1)
    open_tokens(DataConfig(text=(str(tmp_path / "second.txt"),)), LENGTH)
    (left,) = cache.iterdir()
    assert (left / "tokens-00000.bin").read_bytes().startswith(b"second")


@pytest.mark.parametrize(
    ("held_out", "told"),
    [
        (0.0, "60 tokens, 60 of them for training, but one sequence of train.length = 64 needs 65"),
        (0.5, "60 tokens, 30 of them for training, but one sequence of train.length = 64 needs 65"),
    ],
)
def test_data_shorter_than_a_sequence_is_refused(tmp_path: Path, held_out: float, told: str) -> None:
    tokens = prepared(tmp_path, "x" * 59)
    with pytest.raises(ConfigError, match=told):
        open_tokens(DataConfig(tokens=(str(tokens),), held_out=held_out), 64)


def test_a_held_out_part_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"held_out = 0.05 of 1501 tokens are 75, .* needs 101. Hold out more, or no"):
        open_tokens(DataConfig(tokens=(str(prepared(tmp_path)),)), 100)


def test_another_tokenizer_than_the_folders_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "tokenizer.json"
    other.write_text("{}")
    config = DataConfig(tokens=(str(prepared(tmp_path)),), tokenizer=str(other))
    with pytest.raises(
        ConfigError, match=r"prepared with the tokenizer 'bytes' .*, not with data.tokenizer = '.*json'"
    ):
        open_tokens(config, LENGTH)


def damaged(folder: Path, **said: Any) -> None:
    path = folder / "tokens.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: (f / "tokens-00003.bin").write_bytes(b"x" * 96), "tokens-00003.bin has 96 bytes, expected 97"),
        (lambda f: (f / "tokens-00003.bin").write_bytes(b"x" * 97), r"tokens-00003.bin is not what tokens.json says"),
        (lambda f: (f / "tokens-00003.bin").unlink(), "cannot read .*tokens-00003.bin: No such file"),
        (lambda f: (f / "tokens.json").unlink(), "cannot read .*tokens.json: No such file.*`towpath data prepare`"),
        (lambda f: (f / "tokens.json").write_text("{"), "tokens.json is not what `towpath data prepare` writes"),
        (lambda f: (f / "tokens.json").write_text("[]"), "tokens.json is not what `towpath data prepare` writes"),
        (lambda f: damaged(f, format="towpath tokens 9"), "its format is 'towpath tokens 9', expected"),
        (lambda f: damaged(f, vocabulary=50_000), "a vocabulary of 50000 and 'uint8' do not fit"),
        (lambda f: damaged(f, tokens=5), "1501 tokens in its files, 5 in all"),
        (lambda f: damaged(f, shards=[]), "a count is not a positive number"),
        (lambda f: damaged(f, shards=[{"file": "../x", "tokens": 1501, "sha256": ""}]), "name is not tokens"),
    ],
    ids=["cut", "changed", "gone", "no-json", "half-json", "list", "format", "vocabulary", "count", "none", "name"],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Any, told: str) -> None:
    folder = prepared(tmp_path)
    damage(folder)
    with pytest.raises(ConfigError, match=told) as caught:
        open_tokens(DataConfig(tokens=(str(folder),)), LENGTH)
    assert "\n" not in str(caught.value)
