"""Ranks whose devices wait in vain while their hosts have gone on: a GPU's part is played by events that never come."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import towpath
from tests.ranks.server import World
from tests.ranks.test_programs import Net
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.engine.agree.watchdog import Watchdog
from towpath.errors import StepError
from towpath.topology.groups import Groups


class Never:
    """The end of what the device never finishes."""

    def query(self) -> bool:
        return False


def _sharded() -> Any:
    torch.manual_seed(3)
    model = towpath.shard(Net().double(), "zero3", topology=towpath.Topology(2, 1), units=[nn.Linear])
    model(torch.ones(2, 6).double()).sum().backward()
    return model


def _wait_as_for_a_device(model: Any, unit: str) -> str:
    """Submit a gather of this unit that the device never finishes, and wait for the device outside the model."""
    comm = model.towpath_engine.comm
    peers, aborted = comm.watchdog, threading.Event()
    peers._groups.abort = aborted.set
    gathers: list[Transfer] = [t for t in comm.record.last_step if t.kind is TransferKind.GATHER and t.unit == unit]
    comm.log.note(TransferKind.GATHER, unit)
    peers.log = comm.log
    peers.status.enqueued(Never(), gathers[:1])
    assert aborted.wait(50), "nobody has aborted what the device waits for"
    with pytest.raises(StepError) as caught:
        model(torch.ones(2, 6).double())
    return str(caught.value)


def test_ranks_that_gave_their_devices_different_gathers_are_told_while_they_wait_for_them() -> None:
    with World(2, group_timeout=60.0) as ranks:
        texts = ranks.run(_different_gathers)
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank}: the ranks ran different units: transfer 1 of the step was, on rank 0"), (
            text
        )
        assert "on rank 0: gather of unit 'blocks.0', on rank 1: gather of unit 'blocks.1'" in text, text


def _different_gathers() -> str:
    return _wait_as_for_a_device(_sharded(), f"blocks.{dist.get_rank()}")


def test_ranks_whose_device_waits_for_a_process_that_has_ended_are_told_which() -> None:
    with World(3, group_timeout=60.0) as ranks:
        texts = ranks.run(_ended)
    for rank in (0, 2):
        assert texts[rank].startswith(f"rank {rank}: the process of rank 1 has ended or no longer answers"), texts
        assert "gather of unit 'blocks.0', on the device" in texts[rank], texts


def _ended() -> str:
    torch.manual_seed(3)
    model: Any = towpath.shard(Net().double(), "zero3", topology=towpath.Topology(3, 1), units=[nn.Linear])
    model(torch.ones(2, 6).double()).sum().backward()
    peers = model.towpath_engine.comm.watchdog
    peers.watch_processes()
    if dist.get_rank() == 1:
        peers._next_rank._from_previous.close()  # as the kernel does for a process that ends
        return ""
    return _wait_as_for_a_device(model, "blocks.0")


def test_a_rank_of_a_protected_job_that_waits_on_the_host_is_told_that_a_process_has_ended() -> None:
    with World(3, group_timeout=60.0) as ranks:
        texts = ranks.run(_ended_on_host)
    for rank in (0, 2):
        assert texts[rank].startswith(f"rank {rank}: the process of rank 1 has ended"), texts


def _ended_on_host() -> str:
    watchdog = Watchdog.of(Groups())
    watchdog.watch_processes()  # for a model before it, which is not protected
    watchdog.watch_processes(protected=True)
    probed = watchdog._next_rank._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)  # pyright: ignore
    assert watchdog._protected and probed < 5
    if dist.get_rank() == 1:
        watchdog._next_rank._from_previous.close()  # pyright: ignore[reportOptionalMemberAccess]
        return ""
    with pytest.raises(StepError) as caught:
        watchdog.wait(dist.all_reduce(torch.ones(1), async_op=True))
    return str(caught.value)
