"""How often a rank that stands still looks whether its peers stand elsewhere."""

from __future__ import annotations

import pytest

from towpath.engine.activity import Peers
from towpath.topology.groups import Groups


@pytest.mark.parametrize("patience", [0.5, 1.0, 4.0, 5.0, 8.0, 60.0, 1800.0, 1801.0])
def test_a_rank_that_stands_still_looks_again_and_again_before_its_patience_ends(patience: float) -> None:
    peers = Peers(Groups())
    peers.patience_seconds = patience
    # Two pauses of silence, and then a look in each: several of them, and yet not a processor's whole time.
    assert 4 * peers.pause_seconds <= patience / 2
    assert peers.pause_seconds >= min(1.0, patience / 16)
    assert peers.pause_seconds <= 1.0
    assert peers.warn_seconds <= patience / 2
