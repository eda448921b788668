"""The parts of checkpoints: boxes, JSON, files and folders."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from towpath import checkpoint
from towpath.checkpoint import folders, storage
from towpath.checkpoint.manifest import (
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    from_json,
    read_manifest,
    tensors_in,
    to_json,
    write_manifest,
)
from towpath.checkpoint.rank_contents import ControlGroup, rng_state, seed_anew, set_rng_state
from towpath.checkpoint.safe_files import write_tensors
from towpath.engine.parameters.parallel import Box, boxes_of, ranges_of
from towpath.errors import CheckpointError

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


@given(shapes, st.lists(st.integers(0, 700), max_size=3), st.lists(st.integers(0, 700), max_size=3))
def test_where_boxes_of_two_cuts_overlap_the_elements_lie_together_in_both(
    shape: tuple[int, ...], one: list[int], other: list[int]
) -> None:
    """So whatever a rank needs of a box is one range of a file."""
    numel = prod(shape)

    def cut(ends: list[int]) -> list[range]:
        marks = sorted({0, numel, *(e for e in ends if e < numel)})
        return [range(b.start, b.end) for a, e in pairwise(marks) for b in boxes_of(shape, a, e)]

    for a in cut(one):
        for b in cut(other):
            both = sorted(set(a) & set(b))
            assert both == list(range(both[0], both[-1] + 1)) if both else True


class Rectangle(torch.Tensor):
    """A part of a tensor, as a rank of a tensor-parallel mesh loads it."""

    first: tuple[int, ...]
    local: torch.Tensor

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(self.first), self.local.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.local


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(
    ("first", "sizes"),
    [((0, 2, 0), (4, 3, 5)), ((1, 0, 2), (3, 6, 2)), ((1, 2, 3), (2, 3, 1)), ((2, 0, 0), (2, 6, 5))],
)
def test_a_part_with_gaps_is_read_from_a_wider_box(
    tmp_path: Path, first: tuple[int, ...], sizes: tuple[int, ...], dense: bool
) -> None:
    """Such parts occur where a model saved without a tensor-parallel mesh is loaded with one."""
    model = nn.Module()
    model.w = nn.Parameter(torch.arange(120.0).view(4, 6, 5))
    path = checkpoint.save(tmp_path, 1, checkpoint.State(model)).path
    part = torch.empty(1).expand(4, 6, 5).as_subclass(Rectangle)
    part.first, part.local = first, torch.zeros(sizes) if dense else torch.zeros(sizes[::-1]).permute(2, 1, 0)
    control = ControlGroup(checkpoint.State(model).everyone, "loading")
    storage.read({"model.w": part}, path, read_manifest(path), control)
    where = tuple(slice(o, o + n) for o, n in zip(first, sizes, strict=True))
    assert torch.equal(part.local, model.w[where])


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
    text = json.dumps(to_json(tree, "x", lambda path, tensor: None))
    found = from_json(json.loads(text), lambda path: torch.empty(0))
    assert found == tree and repr(found) == repr(tree)


def test_tensors_inside_are_found_by_their_paths() -> None:
    kept: dict[str, torch.Tensor] = {}
    tree = {"order": [torch.arange(3), {"at": (1, torch.ones(2))}]}

    told = to_json(tree, "data", kept.__setitem__)

    assert tensors_in(told) == list(kept) == ["data.order.0", "data.order.1.at.1"]
    found = from_json(told, kept.__getitem__)
    assert found["order"][0] is kept["data.order.0"] and found["order"][1]["at"][0] == 1


def test_what_json_cannot_hold_is_refused_by_its_path() -> None:
    with pytest.raises(CheckpointError, match=r"data\.loader is a Random, which a checkpoint cannot hold"):
        to_json({"loader": random.Random()}, "data", lambda path, tensor: None)


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
    assert checkpoint.save(tmp_path, 1, checkpoint.State(nn.Linear(2, 2))).ok
    file, manifest, partial, *rest = happened
    assert (file, manifest) == ("rank-00000.safetensors", "manifest.json") and ".partial-" in partial
    assert rest == ["published", tmp_path.name]


def _manifest() -> Manifest:
    box = StoredBox((0, 0), (2, 3), "rank-00000.safetensors")
    return Manifest(
        step=3,
        written_by="a test",
        seconds=1.5,
        world=2,
        strategy=None,
        files={"rank-00000.safetensors": StoredFile(104, 9)},
        tensors={"model.w": StoredTensor(torch.float32, (2, 3), (box,))},
        values={"schedule": {"best": float("inf"), "lr": 0.1 + 0.2}},
    )


def test_a_manifest_comes_back_as_it_was_and_vouches_for_itself(tmp_path: Path) -> None:
    write_manifest(tmp_path, _manifest())
    assert read_manifest(tmp_path) == _manifest()
    path = tmp_path / "manifest.json"
    text = path.read_text()
    for position in range(text.index('"content"') + len('"content"'), len(text) - 3, 7):
        path.write_text(text[:position] + chr(ord(text[position]) ^ 1) + text[position + 1 :])
        try:
            assert read_manifest(tmp_path) == _manifest()  # 0.30000000000000005 is the same number
        except CheckpointError as error:
            assert "checksum does not match" in str(error) or "not a whole manifest" in str(error)
    for end in range(0, len(text) - 2, 11):
        path.write_text(text[:end])
        with pytest.raises(CheckpointError, match="not a whole manifest"):
            read_manifest(tmp_path)


# --- folders ---------------------------------------------------------------------------------------------------------


def _publish(root: Path, *steps: int) -> None:
    for step in steps:
        partial = folders.new_partial(root, step)
        (partial / "content").write_text(f"{step}, {sum(1 for _ in root.iterdir())}")
        folders.publish(partial, folders.checkpoint_of(root, step))


def _steps(root: Path) -> list[int]:
    return [folders.step_of(path) for path in folders.checkpoints(root)]


def test_a_checkpoint_of_the_same_step_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    _publish(tmp_path, 5)
    before = (tmp_path / "step-000005" / "content").read_text()
    _publish(tmp_path, 5)
    assert (tmp_path / "step-000005" / "content").read_text() != before
    assert [p.name for p in tmp_path.iterdir()] == ["step-000005"]


def test_the_last_ones_stay_and_every_nth_and_later_ones_are_left_alone(tmp_path: Path) -> None:
    _publish(tmp_path, *range(10, 80, 10), 1_234_567)
    folders.remove_old(tmp_path, 60, keep_last=2, keep_every=30)
    assert _steps(tmp_path) == [1_234_567, 70, 60, 50, 30]
    folders.remove_old(tmp_path, 60, keep_last=None, keep_every=None)
    assert len(_steps(tmp_path)) == 5


def test_what_dead_runs_left_is_swept_and_what_they_were_replacing_comes_back(tmp_path: Path) -> None:
    _publish(tmp_path, 5, 6)
    (tmp_path / "step-000005").rename(tmp_path / "step-000005.replaced-ab12")  # died between two renames
    (tmp_path / "step-000007.partial-cd34").mkdir()
    mine = folders.new_partial(tmp_path, 8)
    (tmp_path / "notes.txt").write_text("kept")
    folders.sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-000005", "step-000006", mine.name]


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


def test_new_ranks_get_seeds_of_their_own_alike_each_time() -> None:
    drawn = []
    for rank in (0, 1, 2, 0):
        seed_anew(77, 120, rank)
        drawn.append(tuple(_draws()))
    assert drawn[0] == drawn[3] and len(Counter(drawn)) == 3
