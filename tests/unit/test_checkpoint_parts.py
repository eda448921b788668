"""The parts of checkpoints: boxes, JSON, files and folders."""

from __future__ import annotations

import json
import os
import random
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from towpath import checkpoint
from towpath.checkpoint import folders, moving
from towpath.checkpoint.local_state import rng_state, set_rng_state
from towpath.checkpoint.manifest import StoredFile, decode_value, encode_value
from towpath.checkpoint.safe_files import DamagedError, write_tensors
from towpath.engine.parameters.dtensors import Box, boxes_of, ranges_of

# --- boxes -----------------------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_the_boxes_of_a_slice_are_its_elements_in_order_few_and_never_empty(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    end = data.draw(st.integers(0, prod(shape)))
    start = data.draw(st.integers(0, end))
    whole = torch.arange(prod(shape)).view(shape)

    boxes = list(boxes_of(shape, start, end))

    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    at = start
    for box in boxes:
        assert box.start == at < box.end and prod(box.sizes) == box.end - box.start
        place = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        assert place.reshape(-1).tolist() == list(range(box.start, box.end))
        at = box.end
    assert at == end


@given(shapes, st.data())
def test_the_ranges_of_a_box_are_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    sizes = tuple(data.draw(st.integers(1, length - o)) for o, length in zip(offsets, shape, strict=True))
    flat = torch.arange(prod(shape))
    box = flat.view(shape)[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    ranges = list(ranges_of(Box(offsets, sizes, 0, 0), shape))
    assert torch.cat([flat[start:end] for start, end in ranges]).tolist() == box.reshape(-1).tolist()
    assert all(one[1] < other[0] for one, other in pairwise(ranges))  # else they would be one


# --- JSON -------------------------------------------------------------------------------------------------------------

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.booleans() | st.sampled_from(["(tuple)", "(tensor)"])
trees = st.recursive(
    leaves,
    lambda inside: st.lists(inside) | st.lists(inside).map(tuple) | st.dictionaries(keys, inside, max_size=3),
    max_leaves=12,
)


@settings(max_examples=30)
@given(trees)
def test_what_is_no_tensor_comes_back_from_json_as_it_was(tree: object) -> None:
    text = json.dumps(encode_value(tree, "x", {}))
    found = decode_value(json.loads(text), lambda path: torch.empty(0))
    assert found == tree and repr(found) == repr(tree)


# --- files -----------------------------------------------------------------------------------------------------------


def test_what_others_may_read_of_the_folder_they_may_read_of_its_files(tmp_path: Path) -> None:
    """The library would let only the owner read them."""
    for mode, expected in ((0o755, 0o644), (0o700, 0o600)):
        tmp_path.chmod(mode)
        write_tensors(tmp_path / f"{mode}", {"x": torch.ones(2)})
        assert (tmp_path / f"{mode}").stat().st_mode & 0o777 == expected


def test_files_and_manifest_are_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def flushed(descriptor: int) -> None:
        happened.append(Path(f"/proc/self/fd/{descriptor}").readlink().name.split("-1")[0])
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        happened.append("published")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    assert checkpoint.save(tmp_path / "runs" / "a", 1, checkpoint.State(nn.Linear(2, 2))).ok
    *above, file, manifest, partial, published, root = happened
    assert above == ["runs", tmp_path.name]  # where folders were made
    assert (file, manifest) == ("rank-00000.safetensors", "manifest.json") and ".partial" in partial
    assert (published, root) == ("published", "a")


# --- folders ---------------------------------------------------------------------------------------------------------


def _publish(root: Path, *steps: int) -> None:
    for step in steps:
        with folders.new_partial(root, step) as partial:
            (partial / "content").write_text(f"{step}, {sum(1 for _ in root.iterdir())}")
            folders.publish(partial, folders.checkpoint_of(root, step))


def test_a_checkpoint_of_the_same_step_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    _publish(tmp_path, 5)
    before = (tmp_path / "step-000005" / "content").read_text()
    _publish(tmp_path, 5)
    assert (tmp_path / "step-000005" / "content").read_text() != before
    assert [p.name for p in tmp_path.iterdir()] == ["step-000005"]


def test_what_dead_runs_left_is_swept_and_what_they_were_replacing_comes_back(tmp_path: Path) -> None:
    _publish(tmp_path, 5, 6)
    (tmp_path / "step-000005").rename(tmp_path / "step-000005.replaced-ab12")  # died between two renames
    (tmp_path / "step-000007.partial-cd34").mkdir()
    (tmp_path / "notes.txt").write_text("kept")
    with folders.new_partial(tmp_path, 8) as mine:
        folders.sweep(tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-000005", "step-000006", mine.name]


def test_a_file_that_arrives_damaged_leaves_nothing(tmp_path: Path) -> None:
    arrives = iter([torch.zeros(3, dtype=torch.uint8)])
    with pytest.raises(DamagedError, match="which rank 1 has sent, did not arrive as it was sent"):
        moving._write(tmp_path / "file", arrives, StoredFile(3, 0), 1)
    assert list(tmp_path.iterdir()) == []


# --- random numbers --------------------------------------------------------------------------------------------------


def _draws() -> list[float]:
    import numpy as np

    return [torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]


def test_every_generator_goes_on_where_it_was() -> None:
    torch.manual_seed(1)
    random.seed(2)
    _draws()  # leaves one Gaussian in store
    state = rng_state()
    expected = [_draws(), _draws()]
    set_rng_state(state)
    assert [_draws(), _draws()] == expected
