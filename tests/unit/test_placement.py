"""Placements: which are legal, and what an illegal one is told."""

import pytest

import towpath
from towpath.core.placement import legal_extents
from towpath.errors import ConfigError
from towpath.topology.cluster import Extent, Topology


def test_an_extent_must_divide_the_next_in_both_coordinates() -> None:
    with pytest.raises(ConfigError, match=r"P 4×1 does not divide G 2×1.*Widen the later one"):
        towpath.Placement(Extent(4), Extent(2), Extent(4))
    with pytest.raises(ConfigError, match="backward copy 2×2 does not divide P 2×1"):
        towpath.Placement(Extent(2), Extent(2), Extent(2), Extent(2, 2))


def test_an_extent_that_does_not_fit_is_told_the_legal_ones() -> None:
    for wrong in (Extent(3), Extent(4, 3), Extent(2, 2)):
        words = rf"OS {wrong} on 8 nodes of 4 ranks is no legal extent.*1×1, 2×1, 4×1, 4×2, 4×4, 4×8\."
        with pytest.raises(ConfigError, match=words):
            towpath.Placement(Extent(1), Extent(1), wrong).check(Topology(8, 4))


def test_extents_and_topologies_are_whole_numbers_of_at_least_one() -> None:
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="whole number"):
            Extent(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="whole number"):
            Topology(2, wrong)  # type: ignore[arg-type]


def test_legal_extents_are_those_of_lins() -> None:
    assert legal_extents(Topology(4, 2)) == [Extent(1), Extent(2), Extent(2, 2), Extent(2, 4)]
