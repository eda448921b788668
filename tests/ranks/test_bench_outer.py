"""The workers of the suites of outer steps, on ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.islands import FreeSteps, OuterSpec
from benchmarks.suites import outer_quality, outer_time, quality
from benchmarks.workload import Workload
from tests.ranks.server import World
from tests.ranks.strategies import seldom
from towpath import Topology

TINY = replace(Workload(Topology(2, 2)).quick(), dtype="bfloat16")


def few_windows() -> None:
    """On a rank: validate on as few windows as there are."""
    quality.WINDOWS = quality.WINDOWS_AT_THE_END = 1


def trained(name: str) -> tuple[list[float], float]:
    """On a rank: train a variant of `outer_quality` for two steps, and return its losses."""
    few_windows()
    found = outer_quality.train(*ranks(), name, 0, 2)
    return [loss for _, loss in found.curve], found.final


def ranks() -> tuple[int, int]:
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


@pytest.mark.parametrize("name", ["center", seldom("4 islands"), "Muon"])
def test_variants_of_quality_train(name: str, world: Callable[[int], World]) -> None:
    found = world(4).run(trained, name)
    assert all(each == found[0] for each in found)
    (before, after), final = found[0]
    assert after < before and math.isfinite(final)


def candidate_trained(name: str) -> list[float]:
    """On a rank: train a candidate of `outer_time` for two steps, and return its losses."""
    few_windows()
    return [loss for _, loss in outer_time.train(*ranks(), name, TINY, 2).curve]


@pytest.mark.parametrize("name", [outer_time.LOSSLESS, *outer_time.OUTER])
def test_candidates_of_time_train(name: str, world: Callable[[int], World]) -> None:
    found = world(4).run(candidate_trained, name)
    assert all(each == found[0] for each in found)
    assert found[0][-1] < found[0][0]


def stepped(candidate: Any) -> tuple[int, float]:
    """On a rank: take some steps, and return how many seconds there are, and the least."""
    torch.manual_seed(0)
    seconds = FreeSteps(*ranks(), candidate, TINY).steps(3)
    return len(seconds), min(seconds)


def test_steps_are_measured_of_strategies_and_peers(world: Callable[[int], World]) -> None:
    for candidate in (OuterSpec(every=2, delay=1).strategy(TINY.topology), "torch-ddp tuned bf16"):
        for count, least in world(4).run(stepped, candidate):
            assert count == 3 and least > 0
