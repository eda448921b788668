"""TokenWindows: each once an epoch, shared out by number alone; and the folders of tokens that are opened."""

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
from towpath.train.data import TokenWindows, epoch_order, open_tokens, prepare

LENGTH = 8
examples = settings(max_examples=50, deadline=None)


def windows(count: int, *, seed: int = 0) -> TokenWindows:
    """Tokens that are each its own place."""
    return TokenWindows(np.arange(count), LENGTH, seed)


def test_orders_are_permutations_of_their_own_epoch_and_seed() -> None:
    count = 1000
    orders = [epoch_order(seed, epoch, count) for seed in (0, 1, 2**32, 2**63 - 1) for epoch in (0, 1, 2)]
    for each in orders:
        assert sorted(each.tolist()) == list(range(count))
    orders.append(np.arange(count))
    same = [int((a == b).sum()) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(same) < 10  # two random orders of a thousand agree in one place on average


def test_an_order_stays_what_it_was() -> None:
    """Runs go on with the order they began with: to change it is to break each checkpoint."""
    assert epoch_order(7, 3, 10).tolist() == [2, 7, 1, 4, 5, 0, 6, 3, 8, 9]


@examples
@given(count=st.integers(LENGTH + 1, 400), seed=st.integers(0, 99), epoch=st.integers(0, 1000))
def test_an_epoch_reads_each_window_once(count: int, seed: int, epoch: int) -> None:
    reader = windows(count, seed=seed)
    inputs, targets = reader.batch(epoch * len(reader), len(reader))
    assert inputs.shape == targets.shape == (len(reader), LENGTH)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert sorted(inputs.flatten().tolist()) == list(range(len(reader) * LENGTH))


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


def prepared(folder: Path, text: str = "a line of text\n" * 100) -> Path:
    source = folder / "source.txt"
    source.write_text(text)
    prepare([str(source)], folder / "tokens")
    return folder / "tokens"


def content(part: TokenWindows | None) -> bytes:
    assert part is not None
    return bytes(part.evaluation_batch(0, len(part), len(part))[0].flatten().tolist())


def test_the_end_is_held_out(tmp_path: Path) -> None:
    text = "".join(f"{i:05d}\n" for i in range(300))
    folder = str(prepared(tmp_path, text))
    tokens = open_tokens(DataConfig(tokens=folder, held_out=0.2), 10)
    assert content(tokens.train) == text.encode()[:1440]
    assert content(tokens.held_out) == (text.encode() + b"\0")[1441:1791]
    inputs, targets = tokens.train.batch(0, len(tokens.train))
    assert b"00240" not in bytes(inputs.flatten().tolist()) + bytes(targets.flatten().tolist())
    assert tokens.vocabulary == 256
    assert open_tokens(DataConfig(tokens=folder, held_out=0.0), 10).held_out is None


def test_the_fingerprint_is_of_the_tokens_wherever_they_lie(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    found = [open_tokens(DataConfig(tokens=str(prepared(tmp_path / name))), LENGTH) for name in ("a", "b")]
    assert found[0].fingerprint == found[1].fingerprint
    (tmp_path / "c").mkdir()
    other = open_tokens(DataConfig(tokens=str(prepared(tmp_path / "c", "another text\n" * 100))), LENGTH)
    assert other.fingerprint != found[0].fingerprint


def test_without_tokens_it_is_the_standard_library() -> None:
    tokens = open_tokens(DataConfig(), 256)
    assert tokens.held_out is not None
    assert 20_000 < len(tokens.train) < 80_000
    assert "standard library" in tokens.about
    assert "import" in bytes(tokens.train.batch(0, 64)[0].flatten().tolist()).decode(errors="replace")


@pytest.mark.parametrize("held_out, train", [(0.0, 60), (0.5, 30)])
def test_data_shorter_than_a_sequence_is_refused(tmp_path: Path, held_out: float, train: int) -> None:
    told = f"60 tokens, {train} of them for training, but one sequence of train.length = 64 needs 65"
    with pytest.raises(ConfigError, match=told):
        open_tokens(DataConfig(tokens=str(prepared(tmp_path, "x" * 59)), held_out=held_out), 64)


def test_a_held_out_part_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"held_out = 0.05 of 1501 tokens are 75, .* needs 101. Hold out more, or no"):
        open_tokens(DataConfig(tokens=str(prepared(tmp_path))), 100)


def damaged(folder: Path, **said: Any) -> None:
    path = folder / "tokens.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: (f / "tokens.bin").write_bytes(b"x" * 96), "tokens.bin has 96 bytes, expected 1501"),
        (lambda f: (f / "tokens.bin").write_bytes(b"x" * 1501), r"tokens.bin is not what tokens.json says"),
        (lambda f: (f / "tokens.bin").unlink(), "cannot read .*tokens.bin: No such file"),
        (lambda f: (f / "tokens.json").unlink(), "cannot read .*tokens.json: No such file.*`towpath data prepare`"),
        (lambda f: (f / "tokens.json").write_text("{"), "tokens.json is not what `towpath data prepare` writes"),
        (lambda f: (f / "tokens.json").write_text("[]"), "tokens.json is not what `towpath data prepare` writes"),
        (lambda f: damaged(f, format="towpath tokens 1"), "is not what `towpath data prepare` writes .another format"),
        (lambda f: damaged(f, dtype="float32"), "is not what `towpath data prepare` writes .another format"),
    ],
    ids=["cut", "changed", "gone", "no-json", "half-json", "list", "format", "dtype"],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Any, told: str) -> None:
    folder = prepared(tmp_path)
    damage(folder)
    with pytest.raises(ConfigError, match=told) as caught:
        open_tokens(DataConfig(tokens=str(folder)), LENGTH)
    assert "\n" not in str(caught.value)
