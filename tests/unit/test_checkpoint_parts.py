"""The parts of checkpoints: boxes, checksums, JSON, files and folders."""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from towpath import checkpoint
from towpath.checkpoint import dcp, folders, safetensors
from towpath.checkpoint.json_state import from_json, tensors_in, to_json
from towpath.checkpoint.manifest import Manifest, StoredBox, StoredFile, StoredTensor, check_boxes
from towpath.checkpoint.rng import rng_state, seed_anew, set_rng_state
from towpath.checkpoint.safe_open import WrongFieldError
from towpath.checkpoint.safetensors import combine
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


@st.composite
def _rectangles(draw: st.DrawFn) -> StoredTensor:
    """A tensor that is cut again and again, each part across some dimension."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    parts = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        offsets, sizes = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        for start, length in ((0, at), (at, sizes[dim] - at)):
            if length:
                parts.append((_with(offsets, dim, offsets[dim] + start), _with(sizes, dim, length)))
    return StoredTensor("F32", shape, tuple(StoredBox(offsets, sizes, "file", 0, 0) for offsets, sizes in parts))


def _with(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


@given(stored=_rectangles(), which=st.integers(0, 20), other=st.integers(0, 20))
def test_rectangles_are_taken_that_hold_each_element_once_and_no_others(
    stored: StoredTensor, which: int, other: int
) -> None:
    check_boxes(stored)
    boxes = list(stored.boxes)
    one, another = boxes[which % len(boxes)], boxes[other % len(boxes)]
    without, twice = [box for box in boxes if box is not one], [*boxes, one]
    instead = [another if box is one else box for box in boxes]
    for wrong in (without, twice, *([instead] if one is not another else [])):
        with pytest.raises(WrongFieldError):
            check_boxes(replace(stored, boxes=tuple(wrong)))


def test_rectangles_of_which_very_many_lie_beside_each_other_are_refused() -> None:
    """Each would be compared with each."""
    boxes = tuple(StoredBox((0, 2 * i), (2, 2), "file", 0, 0) for i in range(3000))
    with pytest.raises(WrongFieldError, match="fewer that lie beside each other"):
        check_boxes(StoredTensor("F32", (2, 6000), boxes))


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
    reader = dcp.FolderReader(path, checkpoint.read_manifest(path))
    dcp.read({"model.w": part}, reader, None)
    where = tuple(slice(o, o + n) for o, n in zip(first, sizes, strict=True))
    assert torch.equal(part.local, model.w[where])


# --- checksums and JSON ----------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_the_checksum_of_a_whole_follows_from_those_of_its_parts(parts: list[bytes]) -> None:
    crc = 0
    for part in parts:
        crc = combine(crc, zlib.crc32(part), len(part))
    assert crc == zlib.crc32(b"".join(parts))


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

DTYPES = sorted(safetensors.DTYPES, key=str)


def test_files_are_safetensors_bit_for_bit_in_every_dtype(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        noise = torch.randint(0, 2 if dtype is torch.bool else 256, (3, 5, dtype.itemsize), dtype=torch.uint8)
        tensors[str(dtype)] = noise.view(dtype).reshape(3, 5)
    tensors["scalar"], tensors["empty"] = torch.tensor(2.5), torch.empty(0, 4)
    entries = safetensors.in_order(
        safetensors.Entry(n, safetensors.DTYPES[t.dtype], tuple(t.shape)) for n, t in tensors.items()
    )
    writer = safetensors.FileWriter(tmp_path / "a.safetensors", entries, {})
    places = {e.name: (writer.at, writer.write(safetensors.bytes_of(tensors[e.name]))) for e in entries}
    facts = writer.close()

    assert (tmp_path / "a.safetensors").stat().st_size == facts.bytes
    found = load_file(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert bytes(safetensors.bytes_of(found[name])) == bytes(safetensors.bytes_of(tensor))
        into = torch.empty_like(tensor)
        safetensors.take(tmp_path / "a.safetensors", places[name][0], safetensors.bytes_of(into))
        assert zlib.crc32(safetensors.bytes_of(into)) == places[name][1]


def _manifest() -> Manifest:
    box = StoredBox((0, 0), (2, 3), "rank-00000.safetensors", 80, 7)
    return Manifest(
        step=3,
        written_by="a test",
        seconds=1.5,
        world=2,
        strategy=None,
        files={"rank-00000.safetensors": StoredFile(104, 80, 9)},
        tensors={"model.w": StoredTensor("F32", (2, 3), (box,))},
        values={"schedule": {"best": float("inf"), "lr": 0.1 + 0.2}},
    )


def _read(text: str) -> Manifest | None:
    try:
        return Manifest.from_text(text, Path("nowhere"))
    except CheckpointError:
        return None


def test_a_manifest_comes_back_as_it_was_and_vouches_for_itself(tmp_path: Path) -> None:
    text = _manifest().to_text()
    assert Manifest.from_text(text, tmp_path) == _manifest()
    body = text.index('"content"') + len('"content"')
    for position in range(body, len(text) - 3, 7):
        changed = text[:position] + chr(ord(text[position]) ^ 1) + text[position + 1 :]
        if _read(changed) != _manifest():  # 0.30000000000000005 is the same number
            with pytest.raises(CheckpointError, match=r"checksum does not match|not a whole manifest"):
                Manifest.from_text(changed, tmp_path)
    for end in range(0, len(text) - 2, 11):
        with pytest.raises(CheckpointError, match="not a whole manifest"):
            Manifest.from_text(text[:end], tmp_path)


# --- folders ---------------------------------------------------------------------------------------------------------


def _publish(root: Path, *steps: int) -> None:
    for step in steps:
        partial = folders.partial_of(root, step)
        partial.mkdir(parents=True)
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
    folders.partial_of(tmp_path, 7).mkdir()
    mine = folders.partial_of(tmp_path, 8)
    mine.mkdir()
    folders.mark_in_use(mine)
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
