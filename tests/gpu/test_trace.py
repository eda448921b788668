"""A trace on CUDA, where a time is an event in a stream. Skipped, and counted, without a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import towpath
from towpath import tracing
from towpath.observing import BETWEEN, COMPUTE, INSIDE, WAITING

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_step_of_one_rank_is_traced_in_the_order_of_its_stream() -> None:
    layers = [torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.GELU()) for _ in range(4)]
    model = towpath.shard(torch.nn.Sequential(*layers).cuda(), "zero3")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4096, 2048, device="cuda")
    for _ in range(3):
        with tracing.trace(model) as trace:
            model(x).square().mean().backward()
            with trace.phase("optimizer"):
                optimizer.step()
            optimizer.zero_grad()
    assert not [i for i in trace.intervals if i.track in (BETWEEN, INSIDE)]
    computed = [i for i in trace.intervals if i.track in (COMPUTE, WAITING)]
    assert {"forward 0", "backward 3", "optimizer"} <= {i.name for i in computed}
    for one, following in pairwise(computed):
        assert following.start_seconds >= one.end_seconds - 1e-6  # an event is true to half a microsecond
    assert sum(i.seconds for i in computed) > 0
