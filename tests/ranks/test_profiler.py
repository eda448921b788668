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
from tests.ranks.checkpoints import Run
from tests.ranks.server import on_ranks

SHAPE = towpath.Topology(2, 1)


@pytest.mark.parametrize("all_threads", [False, True])
@on_ranks(2)
def test_submits_waits_and_with_all_threads_the_transfers_are_ranges_on_theirs(
    tmp_path: Path, all_threads: bool
) -> None:
    run = Run.of("paro-nig", SHAPE)
    run.train(range(3))
    before = towpath.stats(run.model)
    options: dict[str, Any] = {}
    if all_threads:
        options["experimental_config"] = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        run.train([3])
    ran = [t.transfer for t in towpath.stats(run.model).since(before).transfers if t.calls]
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
