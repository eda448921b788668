"""Placements: which are legal, and what an illegal one is told."""

import pytest

import towpath
from towpath.core.placement import legal_extents
from towpath.errors import ConfigError
from towpath.topology.cluster import Extent, Topology


def test_an_extent_must_divide_the_next_in_both_coordinates() -> None:
    with pytest.raises(ConfigError, match=r"P 4×1 does not divide G 2×1.*nearest legal.*P 4×1, G 4×1, OS 4×1"):
        towpath.Placement(Extent(4), Extent(2), Extent(4))
    with pytest.raises(ConfigError, match="backward copy 2×2 does not divide P 2×1"):
        towpath.Placement(Extent(2), Extent(2), Extent(2), Extent(2, 2))


@pytest.mark.parametrize(
    ("extent", "rule"),
    [
        (Extent(3), "its 3 local ranks do not divide the node's 4"),
        (Extent(4, 3), "its 3 nodes do not divide the cluster's 8"),
        (Extent(2, 2), "an extent spans nodes only when it fills the node"),
    ],
)
def test_an_extent_that_does_not_fit_names_the_rule_and_the_nearest_legal_placement(extent: Extent, rule: str) -> None:
    topology = Topology(8, 4)
    with pytest.raises(ConfigError, match=rule) as caught:
        towpath.Placement(Extent(1), Extent(1), extent).check(topology)
    nearest = str(caught.value).split("The nearest legal placement is ")[1].rstrip(".")
    sizes = {str(e) for e in legal_extents(topology)}
    assert nearest.startswith("P 1×1, G 1×1, OS ")
    assert nearest.split("OS ")[1] in sizes


def test_the_nearest_legal_placement_of_a_whole_family_stays_a_family() -> None:
    with pytest.raises(ConfigError, match="nearest legal placement is P 4×1, G 4×1, OS 4×1"):
        wrong = Extent(2, 2)
        towpath.Placement(wrong, wrong, wrong).check(Topology(2, 4))


def test_extents_and_topologies_are_whole_numbers_of_at_least_one() -> None:
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="whole number"):
            Extent(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="whole number"):
            Topology(2, wrong)  # type: ignore[arg-type]


def test_legal_extents_are_those_of_lins() -> None:
    assert legal_extents(Topology(4, 2)) == [Extent(1), Extent(2), Extent(2, 2), Extent(2, 4)]
