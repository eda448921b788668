"""Several sources in the shares that their weights say: by number alone, each source's windows once an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from towpath.errors import ConfigError
from towpath.train.config import MIXED_SAMPLES, DataConfig
from towpath.train.data.corpus import Files
from towpath.train.data.loader import TokenMixture, TokenWindows, open_tokens, samples_of_each
from towpath.train.data.prepare import prepare

LENGTH = 4
examples = settings(max_examples=50, deadline=None)
weights_of_two_or_more = st.lists(st.floats(0.01, 100.0), min_size=2, max_size=6)


class Filled:
    """As the tokens of a folder: each is `first` more than its place."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def read(self, start: int, out: Any) -> None:
        out[:] = range(self.first + start, self.first + start + len(out))


def mixture(counts: list[int], weights: list[float], seed: int = 0) -> TokenMixture:
    """Source i has windows of tokens from i million on."""
    sources: list[Any] = [Filled(1_000_000 * i, count) for i, count in enumerate(counts)]
    windows = [TokenWindows(s, range(s.count), LENGTH, seed + i) for i, s in enumerate(sources)]
    return TokenMixture(windows, weights, seed + len(windows))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@examples
@given(weights=weights_of_two_or_more, total=st.integers(1, 5000))
def test_samples_are_shared_out_to_the_last_and_each_within_one_of_its_share(weights: list[float], total: int) -> None:
    counts = samples_of_each(weights, total)
    assert counts.sum() == total
    for weight, count in zip(weights, counts.tolist(), strict=True):
        assert abs(count - weight / sum(weights) * total) < 1 + 1e-6


@examples
@given(weights=weights_of_two_or_more, block=st.integers(0, 1000), seed=st.integers(0, 2**63))
def test_every_thousand_samples_hold_each_source_in_its_share(weights: list[float], block: int, seed: int) -> None:
    reader = mixture([50] * len(weights), weights, seed)
    source = reader.batch(block * MIXED_SAMPLES, MIXED_SAMPLES)[0][:, 0] // 1_000_000
    assert torch.bincount(source, minlength=len(weights)).tolist() == samples_of_each(weights, MIXED_SAMPLES).tolist()


def test_each_source_has_epochs_of_its_own_in_which_every_window_comes_once() -> None:
    reader = mixture([8 * LENGTH + 1, 5000 * LENGTH + 1], [1, 3])
    starts = reader.batch(0, 4 * MIXED_SAMPLES)[0][:, 0]
    short, long = starts[starts < 1_000_000], starts[starts >= 1_000_000]
    assert len(short) == 1000 and torch.bincount(short // LENGTH).tolist() == [125] * 8
    assert len(long) == 3000 == len(long.unique())


def test_sources_are_mixed_and_not_one_after_the_other() -> None:
    source = mixture([500, 500], [1, 1]).batch(0, MIXED_SAMPLES)[0][:, 0] // 1_000_000
    assert 400 < (source[1:] != source[:-1]).sum() < 600


@examples
@given(world=st.sampled_from([1, 2, 4]), step=st.integers(0, 200), seed=st.integers(0, 9))
def test_ranks_of_any_world_read_the_same_step_together(world: int, step: int, seed: int) -> None:
    batch, reader = 24, mixture([300, 900, 77], [5, 2, 1], seed)
    each = batch // world
    read = [reader.batch(step * batch + rank * each, each) for rank in range(world)]
    inputs, targets = reader.batch(step * batch, batch)
    assert torch.equal(torch.cat([r[0] for r in read]), inputs)
    assert torch.equal(torch.cat([r[1] for r in read]), targets) and torch.equal(targets, inputs + 1)


def test_evaluation_reads_the_same_windows_in_any_world_and_in_the_same_shares() -> None:
    reader, total = mixture([900, 300], [3, 1]), 16
    whole = reader.evaluation_batch(0, total, total)[0]
    assert torch.equal(
        torch.cat([reader.evaluation_batch(8, 8, total)[0], reader.evaluation_batch(0, 8, total)[0]]).sort(0)[0], whole
    )
    first, second = whole[:12, 0].tolist(), whole[12:, 0].tolist()
    assert first == sorted(first) and first[0] == 0 and first[-1] > 700  # spread over all of it
    assert second[0] == 1_000_000 and second[-1] > 1_000_200


def prepared(folder: Path, name: str, text: str) -> str:
    source = folder / f"{name}.txt"
    source.write_text(text)
    prepare(Files.named([str(source)]), "bytes", folder / name)
    return str(folder / name)


def test_folders_of_tokens_are_read_in_their_shares(tmp_path: Path) -> None:
    folders = (prepared(tmp_path, "a", "a" * 2000), prepared(tmp_path, "b", "b" * 100))
    tokens = open_tokens(DataConfig(tokens=folders, weights=(1, 4), held_out=0.3), LENGTH)
    assert tokens.held_out is not None
    for inputs, _ in (tokens.train.batch(0, 1000), tokens.held_out.evaluation_batch(0, 1000, 1000)):
        assert (inputs[:, 0] == ord("a")).sum() == 200
    assert tokens.about == f"{folders[0]} 20 %, {folders[1]} 80 %"


def test_text_is_read_in_its_shares_each_entry_from_a_cache_of_its_own(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 500)
    texts = tuple(str(tmp_path / f"{name}.txt") for name in "ab")
    config = DataConfig(text=texts, weights=(3, 1), held_out=0.0)
    inputs, _ = open_tokens(config, LENGTH).train.batch(0, 1000)
    assert (inputs[:, 0] == ord("a")).sum() == 750
    again = open_tokens(config, LENGTH, first_here=False)
    assert torch.equal(again.train.batch(0, 1000)[0], inputs)


def test_other_weights_are_other_data_and_the_same_in_another_unit_are_not(tmp_path: Path) -> None:
    folders = (prepared(tmp_path, "a", "a" * 200), prepared(tmp_path, "b", "b" * 200))
    prints = [
        open_tokens(DataConfig(tokens=folders, weights=w), LENGTH).fingerprint for w in ((1, 3), (25, 75), (1, 4))
    ]
    assert prints[0] == prints[1] != prints[2]


def test_a_source_that_is_too_short_is_named(tmp_path: Path) -> None:
    folders = (prepared(tmp_path, "a", "a" * 200), prepared(tmp_path, "b", "b"))
    with pytest.raises(ConfigError, match=r"/b: 2 tokens"):
        open_tokens(DataConfig(tokens=folders, weights=(1, 1)), LENGTH)
