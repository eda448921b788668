"""Nodes of 1 and 3 ranks, as torchrun starts them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lab import Lab

SCRIPT = """
import os, torch, towpath
device = towpath.init()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(device)
try:
    towpath.shard(model, "mics")
except towpath.errors.ConfigError as error:
    assert "got 1 rank on node 0 and 3 ranks on node 1" in str(error), error
towpath.shard(model, "zero3")(torch.ones(2, 8)).sum().backward()
print(f"of {os.environ['LOCAL_WORLD_SIZE']} in {towpath.Topology.detect()}\\n", end="")  # in one piece
"""


@pytest.mark.parity
def test_torchrun_starts_unequal_nodes_and_flat_strategies_train(lab: Callable[..., Lab]) -> None:
    done = lab(2, (1, 3)).run(["-c", SCRIPT], capture=True, timeout_seconds=300)
    assert done.returncode == 0, done.output
    told = (done.output or "").splitlines()
    assert sorted(line for line in told if line.startswith("of")) == ["of 1 in 1 + 3", *["of 3 in 1 + 3"] * 3]
