"""When a rank counts as waiting, and how often it then looks whether its peers wait for something else."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from towpath.core.placement import GroupCollective
from towpath.core.queues import MAX_IN_FLIGHT, QUEUES
from towpath.core.routes import Group as Ranks
from towpath.core.routes import Op
from towpath.core.strategy import BETWEEN_HOSTS, TransferKind
from towpath.core.transfer import Range, Transfer
from towpath.core.transport import Transport
from towpath.engine.checks.activity import RankStatus, StallMonitor, _end, _report
from towpath.engine.streams.queue import ThreadStream, make_stream
from towpath.engine.streams.streams import CudaStream, _CudaHandle
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups


def _gather(unit: str) -> Transfer:
    move = GroupCollective(Op.ALL_GATHER, 2, (Ranks((0, 1), (0, 1)),))
    return Transfer(TransferKind.GATHER, Range(unit, "float32", 8, "float32"), move, Transport("flat"), Topology(2, 1))


@pytest.mark.parametrize("patience", [0.5, 1.0, 4.0, 5.0, 8.0, 60.0, 1800.0, 1801.0])
def test_a_rank_that_stands_still_looks_again_and_again_before_its_patience_ends(patience: float) -> None:
    peers = StallMonitor(Groups())
    peers.patience_seconds = patience
    # Two pauses of silence, and then a look in each: several of them, and yet not a processor's whole time.
    assert 4 * peers.pause_seconds <= patience / 2
    assert peers.pause_seconds >= min(1.0, patience / 16)
    assert peers.pause_seconds <= 1.0
    assert peers.warn_seconds <= patience / 2


class End:
    """Of what a device was given to do."""

    def __init__(self) -> None:
        self.has_come, self.queries = False, 0

    def query(self) -> bool:
        self.queries += 1
        return self.has_come


def test_a_transfer_that_the_device_has_not_finished_counts_as_waiting() -> None:
    activity, (first, second) = RankStatus(), (End(), End())
    activity.enqueued(first, [_gather("a")])
    activity.enqueued(second, [_gather("b")])
    assert activity.waits and "waits for gather of unit 'a', on the device" in activity.describe()
    before = activity.progress
    first.has_come = True
    assert activity.waits and activity.on_device() == "gather of unit 'b'"
    assert activity.progress > before  # the device went on, if the host did not
    second.has_come = True
    assert not activity.waits and "in no transfer" in activity.describe()


def test_nothing_queries_the_device_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    activity, first, second = RankStatus(), End(), End()
    activity.enqueued(first, [_gather("a")])
    queried = first.queries
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    activity.enqueued(second, [_gather("b")])
    assert activity.waits and "waits for gather of unit 'a', on the device" in activity.describe()
    timed: Any = SimpleNamespace(profiled=nullcontext, is_timed=True)
    handle = _CudaHandle(cast(Any, second), torch.device("cuda"), timed)
    monkeypatch.setattr(handle, "join", lambda: None)
    handle.wait()
    assert (first.queries, second.queries) == (queried, 0)


class Turns(threading.Event):
    """Lets the reporter look ten times, with progress of the host in between."""

    def __init__(self, activity: RankStatus) -> None:
        super().__init__()
        self.activity, self.turns = activity, 0

    def wait(self, timeout: float | None = None) -> bool:
        self.activity.progress += 1
        self.turns += 1
        return self.turns == 10


def test_the_reporter_queries_no_device_while_the_host_goes_on() -> None:
    peers, end = StallMonitor(Groups()), End()
    peers.activity.enqueued(end, [_gather("a")])
    queried, turns = end.queries, Turns(peers.activity)
    _report(weakref.ref(peers), turns)
    assert turns.turns == 10 and end.queries == queried


class Interrupted(End):
    """Lets another thread look in the middle of the first look."""

    def __init__(self, look: Callable[[], Any]) -> None:
        super().__init__()
        self.has_come = True
        self.threads = [threading.Thread(target=look)]

    def query(self) -> bool:
        if self.threads:
            other = self.threads.pop()
            other.start()
            other.join(timeout=0.2)  # it may have to wait until this look is over
        return True


def test_two_threads_that_look_at_the_device_drop_no_more_than_it_finished() -> None:
    activity, unfinished = RankStatus(), End()
    activity.enqueued(Interrupted(lambda: activity.on_device()), [_gather("a")])
    activity._enqueued.append((unfinished, "gather of unit 'b'"))
    assert activity.on_device() == "gather of unit 'b'"
    assert [end for end, _ in activity._enqueued] == [unfinished]


def test_what_is_kept_of_a_device_that_never_finishes_is_bounded() -> None:
    activity = RankStatus()
    for _ in range(5_000):
        activity.enqueued(End(), [_gather("a")])
    assert len(activity._enqueued) <= 256 and activity.waits


def test_ranks_compare_on_a_thread_also_where_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whoever waits for the comparison can be told, meanwhile, that its peers will never come."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: object())
    device = torch.device("cuda")
    kinds = {kind: type(make_stream(QUEUES[kind], device, MAX_IN_FLIGHT[QUEUES[kind]])) for kind in TransferKind}
    assert {kind for kind, stream in kinds.items() if stream is ThreadStream} == set(BETWEEN_HOSTS)
    assert {stream for kind, stream in kinds.items() if kind not in BETWEEN_HOSTS} == {CudaStream}


def test_an_abort_ends_every_group_of_the_device_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Backend:
        def __init__(self, name: str) -> None:
            self.name = name

        def _group_start(self) -> None:
            calls.append("chain")

        def _group_end(self) -> None:
            calls.append("at once")

        def abort(self) -> None:
            calls.append(self.name)

    class Group:
        def __init__(self, name: str, on_device: bool) -> None:
            self.name, self.on_device = name, on_device

        def _get_backend(self, device: torch.device) -> Backend:
            assert device.type == "cuda"
            if not self.on_device:
                raise RuntimeError("No backend type associated with device type cuda")
            return Backend(self.name)

    groups = Groups()
    monkeypatch.setattr(groups, "_parent", Group("parent", True))
    made = {((0, 1), "gather"): Group("gather", True), ((0, 1), "control"): Group("control", False)}
    monkeypatch.setattr(groups, "_made", made)
    groups.abort()
    assert calls == ["chain", "parent", "gather", "at once"]


def test_the_thread_that_reports_ends_before_the_interpreter_does() -> None:
    """Else it may wait for the store in C++ while Python goes away, which aborts a process that was through."""
    peers, stop = StallMonitor(Groups()), threading.Event()
    reporter = threading.Thread(target=_report, args=(weakref.ref(peers), stop), daemon=True)
    reporter.start()
    _end(reporter, stop)
    assert not reporter.is_alive()
