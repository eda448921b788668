"""torchdata's StatefulDataLoader in a checkpoint: after a resume come the batches that would have come.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

import towpath
from tests.ranks.launched import launched
from tests.ranks.server import Worlds
from towpath import checkpoint


def _loader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = TensorDataset(torch.arange(40.0))
    sampler = DistributedSampler(rows, dist.get_world_size(), dist.get_rank(), shuffle=True, seed=3)
    return StatefulDataLoader(rows, batch_size=2, sampler=sampler)


def _model() -> Any:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def test_it_goes_on_in_the_middle_of_an_epoch(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_resumed, tmp_path)


def _resumed(folder: Path) -> None:
    with launched():
        whole = [batch[0].tolist() for batch in _loader()]
        model, loader = towpath.shard(_model(), "zero3"), _loader()
        batches = iter(loader)
        first = [batch[0].tolist() for batch in islice(batches, 4)]
        assert checkpoint.save(folder, 4, checkpoint.State(model, data=loader)).ok
        loader = _loader()
        assert checkpoint.load(folder, checkpoint.State(towpath.shard(_model(), "ddp"), data=loader)) is not None
        rest = [batch[0].tolist() for batch in loader]
        assert first + rest == whole
