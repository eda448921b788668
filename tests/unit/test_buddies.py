"""Who keeps copies for whom, which files are sent, and in which chunks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from towpath.checkpoint.manifest import StoredBox, StoredFile, StoredTensor
from towpath.codecs import exact
from towpath.protect import buddies
from towpath.protect.buddies import BuddyExchange, SentFile, buddy_of, plan_files

NODES = {
    "equal": [0, 0, 1, 1],
    "three": [0, 1, 2],
    "in another order": [1, 1, 0, 0],
    "interleaved": [0, 1, 0, 1],
    "fewer on one": [0, 0, 0, 1],
}


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_a_buddy_is_on_the_next_node_and_ranks_are_spread_over_it(nodes: list[int]) -> None:
    buddy = [buddy_of(rank, nodes) for rank in range(len(nodes))]
    pairs = {(node, nodes[to]) for node, to in zip(nodes, buddy, strict=True) if to is not None}
    assert len(pairs) == len({*nodes}) and all(node != there for node, there in pairs)
    assert {there for _, there in pairs} == {*nodes}  # each node keeps copies for one
    if len({*Counter(nodes).values()}) == 1:
        assert len({*buddy}) == len(nodes)


def test_a_single_node_has_no_buddy() -> None:
    assert buddy_of(0, [0, 0]) is None


def test_only_files_that_no_other_node_has_are_sent() -> None:
    def written(rank: int) -> Any:
        own, shared = f"rank-{rank}", f"shared-{rank % 2}"
        boxes = (StoredBox((0,), (8,), own), StoredBox((8,), (8,), shared))
        tensors = {"a": StoredTensor("a", torch.bfloat16, (16,), boxes)}
        return {own: StoredFile(100, rank), shared: StoredFile(50, 7)}, tensors, {}

    held = [{"rank-0": 100}, {}, {"rank-0": 100, "rank-1": 99}, {"rank-1": 100}]
    plan = plan_files([written(rank) for rank in range(4)], held, [0, 0, 1, 1])
    assert plan == [[SentFile(f"rank-{rank}", 100, "bfloat16", rank == 0)] for rank in range(4)]
    assert plan_files([written(0)], [{}], [0]) == [[]]


def test_chunks_take_as_long_as_they_should_within_bounds() -> None:
    exchange = BuddyExchange(None, Path(), None, lambda _: True)  # pyright: ignore[reportArgumentType]
    rate, sizes = 10e6, list[int]()
    for _ in range(20):
        sizes.append(exchange._chunk_bytes)
        exchange._adapt(exchange._chunk_bytes / rate)
    assert sizes[0] == buddies._LEAST_BYTES and sizes == sorted(sizes)
    assert exchange._chunk_bytes == pytest.approx(rate * buddies._CHUNK_SECONDS, rel=0.01)
    for seconds, bound in ((0.0, buddies._MOST_BYTES), (60.0, buddies._LEAST_BYTES)):
        for _ in range(20):
            exchange._adapt(seconds)
            assert exchange._chunk_bytes % 8 == 0
        assert exchange._chunk_bytes == bound
    for dtype in exact.DTYPES:
        assert exact.message_bound(buddies._MOST_BYTES // dtype.itemsize, dtype) <= len(buddies._message_memory())
