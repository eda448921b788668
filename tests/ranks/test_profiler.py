"""What torch.profiler shows of a sharded model: by its default, and with all threads.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import towpath
from tests.ranks.models import MODELS
from tests.ranks.server import on_ranks
from tests.ranks.strategies import strategy_of

SHAPE = towpath.Topology(2, 1)


@pytest.mark.parametrize("all_threads", [False, True])
@on_ranks(2)
def test_submits_waits_and_with_all_threads_the_transfers_are_ranges_on_theirs(
    tmp_path: Path, all_threads: bool
) -> None:
    torch.manual_seed(0)
    model = towpath.shard(MODELS["gpt"].make(torch.float32), strategy_of("paro-nig", SHAPE), topology=SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        _step(model, optimizer, step)
    before = towpath.stats(model)
    options: dict[str, Any] = {}
    if all_threads:
        options["experimental_config"] = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        _step(model, optimizer, 3)
    ran = [t.transfer for t in towpath.stats(model).since(before).transfers if t.calls]
    file = tmp_path / f"{torch.distributed.get_rank()}-{all_threads}.json"
    profiler.export_chrome_trace(str(file))
    events = [e for e in json.loads(file.read_text())["traceEvents"] if str(e.get("name")).startswith("towpath ")]
    found = {e["name"] for e in events}
    expected = {f"towpath {what} {t.kind} {t.unit}" for what in ("submit", "wait") for t in ran}
    if all_threads:
        expected |= {f"towpath {t.kind} {t.unit}" for t in ran}
    assert found == expected, found ^ expected
    training = {e["tid"] for e in events if e["name"].split(" ")[1] in ("submit", "wait")}
    assert len(training) == 1
    assert not training & {e["tid"] for e in events if e["name"].split(" ")[1] not in ("submit", "wait")}


def _step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    entry = MODELS["gpt"]
    batch = entry.micro_batch(torch.distributed.get_rank(), 0, step, torch.float32)
    entry.loss(model, *batch).backward()
    optimizer.step()
    optimizer.zero_grad()
