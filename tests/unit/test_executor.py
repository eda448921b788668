"""The engine stays in step with its machine, also where a transfer fails in the middle of what is to be done."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import towpath
from towpath.core.step_state import Task, Wait
from towpath.core.strategy import TransferKind
from towpath.engine.transfer_queues import Handle
from towpath.errors import StepError


class Failing(Handle):
    def has_ended(self) -> bool:
        return True

    def wait(self, on_host: bool = False) -> None:
        raise StepError("the peer is gone")


def test_what_is_left_to_show_is_shown_when_a_transfer_fails() -> None:
    model: Any = towpath.shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "zero3", units=[nn.Linear])
    engine = model.towpath_engine
    first = engine.units[1].modules[0]
    engine.machine.entered(1)
    said = engine.machine.forward_begins(1, comes_back=False)
    with pytest.raises(StepError, match="the peer is gone"):
        engine.execute([Wait(Task(TransferKind.GATHER, 1, handle=Failing())), *said])
    assert not isinstance(first.weight, towpath.ShardTensor)
    engine.execute(engine.machine.forward_ends(1, graph_follows=False))
    assert isinstance(first.weight, towpath.ShardTensor)
