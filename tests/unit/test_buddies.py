"""Which files go to which buddy, in which chunks, and when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from towpath.checkpoint.manifest import StoredBox, StoredFile, StoredTensor
from towpath.checkpoint.storage import Written
from towpath.codecs import exact
from towpath.protect import buddies
from towpath.protect.buddies import BuddyExchange, NodeLinks, SentFile, buddy_of, plan_files

# --- who, and which files ---------------------------------------------------------------------------------------------

NODES = {
    "3 x 2": ([0, 0, 1, 1, 2, 2], [2, 3, 4, 5, 0, 1]),
    "3, 1 and 2": ([0, 0, 0, 1, 2, 2], [3, 3, 3, 4, 0, 1]),
    "by turns": ([0, 1, 0, 1], [1, 0, 3, 2]),
    "one": ([0, 0], [None, None]),
}


@pytest.mark.parametrize(("nodes", "expected"), NODES.values(), ids=NODES)
def test_a_buddy_has_the_same_place_on_the_next_node(nodes: list[int], expected: list[int | None]) -> None:
    assert [buddy_of(rank, nodes) for rank in range(len(nodes))] == expected


def written(**files: Mapping[str, tuple[torch.dtype, int]]) -> Written:
    """A rank's files, with the dtype and elements of each tensor."""
    tensors = {
        name: StoredTensor(name, dtype, (count,), (StoredBox((0,), (count,), file),))
        for file, held in files.items()
        for name, (dtype, count) in held.items()
    }
    sizes = {file: sum(dtype.itemsize * n for dtype, n in held.values()) for file, held in files.items()}
    return {file: StoredFile(size, 0) for file, size in sizes.items()}, tensors, {}


def test_only_files_that_no_other_node_has_are_sent() -> None:
    shared = {"w": (torch.float32, 8)}
    ranks = [written(shared=shared, own_0={"a": (torch.float32, 4)}), written(shared=shared)]
    plan = plan_files(ranks, [{"own_0": 16}, {"own_0": 16}], [0, 1])
    assert plan == [[SentFile("own_0", 16, "float32", difference=True)], []]
    assert plan_files(ranks, [{}, {}], [0, 0]) == [[], []]  # there is no buddy


@pytest.mark.parametrize("held", [({}, {"f": 16}), ({"f": 16}, {}), ({"f": 16}, {"f": 12})])
def test_a_difference_needs_the_last_file_of_the_same_size_on_both_nodes(held: tuple[dict[str, int], ...]) -> None:
    ranks = [written(f={"a": (torch.float32, 4)}), written()]
    assert not plan_files(ranks, held, [0, 1])[0][0].difference


@pytest.mark.parametrize(
    ("tensors", "dtype"),
    [
        ({"a": (torch.float32, 4), "b": (torch.bfloat16, 40)}, "bfloat16"),
        ({"a": (torch.float32, 40), "b": (torch.bfloat16, 4)}, "float32"),
        ({"a": (torch.uint8, 400), "b": (torch.bfloat16, 4)}, "bfloat16"),  # as no message has bytes
        ({"a": (torch.uint8, 400)}, "float32"),
    ],
)
def test_a_file_is_encoded_as_the_dtype_of_most_elements(tensors: Any, dtype: str) -> None:
    assert plan_files([written(f=tensors), written()], [{}, {}], [0, 1])[0][0].dtype == dtype


# --- when -------------------------------------------------------------------------------------------------------------


def test_links_are_used_if_any_rank_of_the_node_uses_them(tmp_path: Path) -> None:
    first, second = (NodeLinks(tmp_path / "links", place, 2) for place in range(2))
    assert not first.are_used(False) and second.are_used(True) and first.are_used(False)
    assert not NodeLinks(tmp_path / "links", 1, 2).are_used(False)  # the second one has died
    assert not first.are_used(False)


def chunks(rate: float, latency: float, count: int = 60) -> int:
    """Return the size of a chunk after many, on a link of so many bytes a second."""
    exchange = BuddyExchange(cast(Any, None), Path(), None, lambda: True)
    for _ in range(count):
        exchange._adapt(latency + exchange._chunk_bytes / rate)
    assert exchange._chunk_bytes % 8 == 0
    return exchange._chunk_bytes


def test_a_chunk_takes_twenty_milliseconds_of_the_link_whatever_its_latency() -> None:
    for latency in (0.0, 0.02, 0.2):
        assert chunks(50e6, latency) == pytest.approx(1 << 20, rel=0.1)
    assert chunks(1e3, 0.0) == buddies._LEAST_BYTES
    assert chunks(1e12, 0.1) == buddies._MOST_BYTES


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["little", "all bits"])
def test_a_chunk_is_sent_in_the_shorter_form(changed: str) -> None:
    torch.manual_seed(0)
    old = torch.randn(4096) * 0.02
    new = old * (1 + 1e-5) if changed == "little" else torch.randn(4096) * 0.02
    memory = [torch.empty(exact.message_bound(4096, torch.float32), dtype=torch.uint8) for _ in range(2)]
    sizes = {which: exact.encode(base, new, memory[0]) for which, base in (("little", old), ("all bits", None))}
    assert sizes[changed] == min(cast(Any, sizes.values()))
    message = buddies._shorter(old, new, memory[0], memory[1])
    assert len(message) == sizes[changed] and exact.is_difference(message) == (changed == "little")
    decoded = old.clone()
    exact.decode(message, decoded, exact.is_difference(message))
    assert torch.equal(decoded, new)
