"""The server of ranks itself: what comes back, and how it tells of a rank that fails."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.ranks.server import RankError, World, run_ranks


def _sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def _raise_on_rank_two() -> None:
    if dist.get_rank() == 2:
        raise ValueError("a bad day")
    dist.barrier()


def _die_on_rank_two() -> None:
    if dist.get_rank() == 2:
        os._exit(3)
    dist.barrier()


def _leave_the_others_waiting() -> None:
    if dist.get_rank() != 2:
        dist.barrier()


def _warn() -> None:
    warnings.warn("old", FutureWarning, stacklevel=1)


def test_every_ranks_result_comes_back_in_order() -> None:
    assert run_ranks(_sum_of_ranks, 3) == [3.0, 3.0, 3.0]


def test_a_failure_comes_with_its_rank_and_traceback_and_ends_the_world() -> None:
    with World(3) as world:
        with pytest.raises(RankError, match=r"(?s)rank 2 of 3.*_raise_on_rank_two.*ValueError: a bad day"):
            world.run(_raise_on_rank_two)
        assert not world.alive


@pytest.mark.parametrize(
    ("fn", "reason"),
    [(_leave_the_others_waiting, "barrier"), (_warn, "FutureWarning: old")],
    ids=["hanging", "warning"],
)
def test_a_hang_says_where_and_a_warning_is_an_error(fn: Callable[[], None], reason: str) -> None:
    with pytest.raises(RankError, match=reason):
        run_ranks(fn, 3, timeout=2)


def test_a_rank_that_dies_is_missed() -> None:
    with pytest.raises(RankError, match=r"exit code 3|onnection"):
        run_ranks(_die_on_rank_two, 3)
