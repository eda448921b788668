"""A lost node: what the others hold in memory goes on bit for bit. Functions with an underscore run on every rank."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks.checkpoints import Run, differing, rank
from tests.ranks.server import Worlds
from tests.ranks.strategies import seldom
from towpath import Protect, Topology, checkpoint
from towpath.protect import memory

SHAPE = Topology(2, 2)


@pytest.fixture
def nodes(tmp_path: Path) -> Generator[Path]:
    yield tmp_path / "nodes"


def run_of(nodes: Path, label: str, shape: Topology = SHAPE) -> Run:
    """A protected run. Each node of `shape` has a folder for its memory."""
    mine = nodes / str(rank() // shape.ranks_per_node)
    mine.mkdir(parents=True, exist_ok=True)
    os.environ[memory.VARIABLE] = str(mine)
    return Run.of(label, shape, protect=Protect(every=2))


def lose(nodes: Path, node: int) -> None:
    dist.barrier()
    if rank() == 0:
        shutil.rmtree(nodes / str(node))
    dist.barrier()


LABELS = ["mics:2x1", "paro-iig", "zero3", seldom("ddp"), seldom("zero1"), seldom("hpz"), seldom("zero++")]


@pytest.mark.parametrize("label", LABELS)
def test_after_the_loss_of_a_node_training_goes_on_bit_for_bit(world: Worlds, nodes: Path, label: str) -> None:
    for lost in (0, 1):
        for wrong, losses, expected in world(4).run(_lose_and_go_on, nodes / str(lost), label, lost):
            assert wrong == [] and losses == expected


def _lose_and_go_on(nodes: Path, label: str, lost: int) -> tuple[list[str], list[float], list[float]]:
    run = run_of(nodes, label)
    saver = checkpoint.Saver(nodes / "root", run.state())
    for step in range(1, 6):  # snapshots after steps 2 and 4
        if step == 5:
            content, expected = run.content(), []
        losses = run.train([step])
        saver.protect(step)
        if step == 5:
            expected = losses
    saver._snapshots.wait()
    lose(nodes, lost)
    resumed = run_of(nodes, label).spoil()
    loaded = checkpoint.load(nodes / "root", resumed.state())
    assert loaded is not None and loaded.step == 4, loaded
    return differing(resumed.content(), content), resumed.train([5]), expected
