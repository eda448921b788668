"""`towpath probe` on a shaped cluster: it finds the rate that the cables were given."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lab import Lab, Rate
from towpath.core.routes import ROUTES
from towpath.plan.profile import Profile, parse_collective_name
from towpath.topology.cluster import Topology

RATE = "100mbit"


def measured(rank: int, world: int) -> Profile:
    from towpath.plan import cluster_probe

    # Some of it takes as long as it does, whatever the budget; and nothing of that is looked at here.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_probe, "_TOGETHER_SECONDS", 0.05)
        return cluster_probe.probe(Topology(2, 2), budget_seconds=4)


@pytest.mark.parity
def test_a_probe_finds_the_rate_of_the_cables_and_all_ranks_have_the_same(lab: Callable[..., Lab]) -> None:
    profiles = lab(2, 2, inter=RATE).call(measured)

    assert all(profile == profiles[0] for profile in profiles)
    found = profiles[0].cluster().hardware
    # Headers take a few per cent; the bucket that shapes the cable lets the first bytes of a message pass.
    assert found.inter.rate == pytest.approx(Rate.parse(RATE).bits_per_second / 8, rel=0.25)
    assert found.ranks_sharing == 4
    collectives = [parse_collective_name(point.what) for point in profiles[0].collectives()]
    assert {op for op, *_ in collectives} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert {str(mesh) for _, mesh, _ in collectives} == {"2 × 2", "1 × 2", "2 × 1"}
    assert {route for *_, route in collectives} == set(ROUTES)
