"""Ranks that meet where others met and died: they find each other, not what those left."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from towpath.errors import ConfigError
from towpath.topology.store import agree_on_name

PATIENCE = timedelta(seconds=30)


def _names(store: Store, ranks: range, world: int) -> list[str]:
    names: dict[int, str] = {}

    def come(rank: int) -> None:
        names[rank] = agree_on_name(store, rank, world, PATIENCE)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [names[rank] for rank in ranks]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_ranks_agree_on_one_name_and_each_time_on_another(world: int) -> None:
    store = HashStore()
    names = [_names(store, range(size), size) for size in (world, world, world + 2, world)]
    assert all(len(set(of_ranks)) == 1 for of_ranks in names)
    assert len({of_ranks[0] for of_ranks in names}) == 4


def test_what_dead_ranks_said_is_answered_and_nobody_is_taken_for_them() -> None:
    store = HashStore()
    for rank in range(3):
        store.set(f"towpath/hello/{rank}", f"dead {rank}")
    with pytest.raises(ConfigError, match="ranks \\[1, 2\\] did not come"):  # rank 0 alone, and it dies too
        agree_on_name(store, 0, 3, timedelta(seconds=0.05))
    assert len(set(_names(store, range(3), 3))) == 1


def test_a_rank_whose_first_does_not_come_says_so() -> None:
    with pytest.raises(ConfigError, match="rank 0 did not come"):
        agree_on_name(HashStore(), 1, 2, timedelta(seconds=0.05))
