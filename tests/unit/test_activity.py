"""When a rank counts as waiting, and how often it then looks whether its peers wait for something else."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from towpath import daemons
from towpath.core.placement import GroupCollective
from towpath.core.queues import HOST_EXCHANGES, MAX_IN_FLIGHT, QUEUES
from towpath.core.routes import Group as Ranks
from towpath.core.routes import Op
from towpath.core.strategy import BETWEEN_HOSTS, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Range
from towpath.engine.agree import status
from towpath.engine.agree.status import RankStatus
from towpath.engine.agree.watchdog import NextRank, Watchdog, _report
from towpath.engine.comm import Streams, leave, make_stream
from towpath.engine.threads import ThreadStream, _ThreadHandle
from towpath.engine.transfer_queues import CudaStream, _CudaHandle
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups


def _gather(unit: str, nodes: int = 2) -> Transfer:
    topology = Topology(nodes, 2 // nodes)
    move = GroupCollective(Op.ALL_GATHER, 2, (Ranks((0, 1), (0, 1)),))
    return Transfer(TransferKind.GATHER, Range(unit, "float32", 8, "float32"), move, Transport("flat"), topology)


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


def test_only_transfers_between_nodes_use_links() -> None:
    activity, inside, between = RankStatus(), _gather("a", nodes=1), _gather("b")
    activity.begins([inside])
    assert activity.waits and not activity.uses_links
    activity.begins([between])
    assert activity.uses_links
    activity.ends()
    assert not activity.uses_links
    (first, second) = End(), End()
    activity.enqueued(first, [inside])
    assert not activity.uses_links
    activity.enqueued(second, [between])
    assert activity.uses_links
    second.has_come = True
    assert activity.uses_links  # as far as is known: ends are seen in order
    first.has_come = True
    assert not activity.uses_links


def test_nothing_queries_the_device_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    activity, first, second = RankStatus(), End(), End()
    activity.enqueued(first, [_gather("a")])
    queried = first.queries
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    activity.enqueued(second, [_gather("b")])  # its event is in the graph, and can never be queried
    assert [end for end, _ in activity._enqueued] == [first]
    assert activity.waits and "waits for gather of unit 'a', on the device" in activity.describe()
    timed: Any = SimpleNamespace(profiled=nullcontext, is_timed=True)
    handle = _CudaHandle(cast(Any, second), torch.device("cuda"), timed)
    monkeypatch.setattr(handle, "join", lambda: None)
    handle.wait()
    assert (first.queries, second.queries) == (queried, 0)


class Relaxed:
    """The driver, on threads that do not capture themselves. It counts threads in the relaxed mode."""

    def __init__(self) -> None:
        self.modes: dict[int, int] = {}

    def exchange(self, mode: Any) -> None:
        thread = threading.get_ident()
        self.modes[thread], mode._obj.value = mode._obj.value, self.modes.get(thread, 0)


class Captured(End):
    """While another thread captures a graph in the default mode, a query on a thread in its own default mode fails."""

    def __init__(self, driver: Relaxed) -> None:
        super().__init__()
        self.driver, self.lost = driver, False

    def query(self) -> bool:
        if self.driver.modes.get(threading.get_ident(), 0) != 2:
            self.lost = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return super().query()


def test_a_graph_that_another_thread_captures_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the training thread nor by the reporter, whose modes are afterwards what they were."""
    driver, peers = Relaxed(), Watchdog(Groups())
    end, behind = Captured(driver), Captured(driver)
    monkeypatch.setattr(status, "_exchange_capture_mode", lambda: driver.exchange)
    peers.status.enqueued(end, [_gather("a")])
    peers.status.enqueued(behind, [_gather("b")])
    monkeypatch.setattr(peers.status, "silent_seconds", lambda: 1e6)
    reporter = threading.Thread(target=_report, args=(weakref.ref(peers), Turns(peers.status)))
    reporter.start()
    reporter.join()
    assert end.queries > 10 and set(driver.modes.values()) == {0} and len(driver.modes) == 2
    assert not end.lost and not behind.lost
    driver.exchange = lambda mode: None  # a machine whose driver cannot: the capture is lost, and the reporter goes on
    assert peers.status.on_device() == "gather of unit 'a'" and end.lost


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
    peers, end = Watchdog(Groups()), End()
    peers.status.enqueued(end, [_gather("a")])
    queried, turns = end.queries, Turns(peers.status)
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
    activity._enqueued.append((unfinished, [_gather("b")]))
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
    assert type(make_stream(HOST_EXCHANGES, device, 1)) is ThreadStream  # so are exchanges from host memory
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
    monkeypatch.setattr(groups, "parent", Group("parent", True))
    made = {((0, 1), "gather"): Group("gather", True), ((0, 1), "control"): Group("control", False)}
    monkeypatch.setattr(groups, "_made", made)
    groups.abort()
    assert calls == ["chain", "parent", "gather", "at once"]


def test_the_thread_that_reports_ends_before_the_interpreter_does() -> None:
    """Else it may wait for the store in C++ while Python goes away, which aborts a process that was through."""
    peers, stop = Watchdog(Groups()), threading.Event()
    reporter = daemons.start_daemon("reporter", partial(_report, weakref.ref(peers), stop), stop.set)
    daemons._end_daemons()
    assert not reporter.is_alive()


class Two:
    """Two ranks as threads. `change` sees what each gather found, before any rank goes on."""

    def __init__(self, change: Callable[[list[Any]], None]) -> None:
        self._change, self._found = change, [None, None]
        self._all_here, self._all_gone = (threading.Barrier(2, action, timeout=60) for action in (self._see, None))

    def _see(self) -> None:
        self._change(self._found)

    def gather(self, rank: int, mine: Any) -> list[Any]:
        self._found[rank] = mine
        self._all_here.wait()
        found = list(self._found)
        self._all_gone.wait()
        return found

    def neighbors(self) -> list[NextRank]:
        def neighbor(rank: int) -> NextRank:
            return NextRank(
                cast(Any, SimpleNamespace(rank=rank, world=2, all_gather_objects=partial(self.gather, rank)))
            )

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(neighbor, range(2)))


def test_a_stranger_that_connects_first_is_not_the_neighbor() -> None:
    strangers: list[socket.socket] = []

    def connect(found: list[Any]) -> None:
        if not strangers:
            strangers.extend(socket.create_connection(address) for address, _ in found for _ in range(2))
            strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")  # to rank 0; the other one sends nothing

    first, second = Two(connect).neighbors()
    for stranger in strangers:
        with stranger, suppress(ConnectionResetError):  # what it sent may not have been read
            assert stranger.recv(1) == b""
    assert not first.is_gone and not second.is_gone
    _end_process(second)
    assert first._connection is not None
    first._connection.settimeout(60)  # until the kernel has told it
    assert first.is_gone
    _end_process(first)


def _end_process(neighbor: NextRank) -> None:
    for each in (neighbor._connection, neighbor._from_previous):
        if each is not None:
            each.close()


def test_a_neighbor_that_cannot_connect_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("towpath.engine.agree.watchdog._PATIENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def mislead(found: list[Any]) -> None:
            if isinstance(found[0], tuple):
                found[1] = (stranger.getsockname(), found[1][1])  # rank 0 takes it for rank 1

        first, second = Two(mislead).neighbors()
    assert first._connection is None and second._from_previous is None
    assert not first.is_gone and not second.is_gone
    _end_process(first)
    _end_process(second)


class _EndsLate(Future[None]):
    """A job that ends when a wait for it has just timed out."""

    def result(self, timeout: float | None = None) -> None:
        if timeout is not None:
            self.set_result(None)
            raise TimeoutError
        return super().result()


def test_a_job_that_ends_as_a_wait_for_it_times_out_has_not_failed() -> None:
    assert _ThreadHandle(_EndsLate(), (), None)._ended()


def test_a_program_that_ends_in_an_error_does_not_wait_for_a_thread_that_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(status: int) -> None:
        raise SystemExit(status)

    ends, waiting = threading.Event(), threading.Event()
    monkeypatch.setattr(daemons, "_LIMIT_SECONDS", 1e6)
    monkeypatch.setattr(daemons, "_ends_in_error", False)
    monkeypatch.setattr(os, "_exit", leave)
    daemons.start_daemon("waits", lambda: (waiting.set(), ends.wait()))
    waiting.wait()
    daemons.note_error()
    with pytest.raises(SystemExit, match="1"):
        daemons._end_daemons()
    ends.set()


def test_a_program_that_ends_in_an_error_does_not_wait_for_a_transfer_that_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished: list[str] = []
    streams: Any = Streams(torch.device("cpu"))
    streams["between nodes"] = SimpleNamespace(finish=lambda: finished.append("waited"))
    peers: Any = SimpleNamespace(diverged="")
    monkeypatch.setattr(daemons, "_ends_in_error", False)
    leave(weakref.ref(streams), peers)
    assert finished == ["waited"]
    daemons.note_error()
    leave(weakref.ref(streams), peers)
    assert finished == ["waited"]


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "is lost"])
def test_only_a_rank_that_is_lost_ends_a_rank_that_waits_where_it_cannot_raise(
    monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr("towpath.engine.agree.watchdog.ends_in_error", lambda: False)
    monkeypatch.setattr("towpath.engine.agree.watchdog._RAISE_SECONDS", -1.0)
    monkeypatch.setattr(os, "_exit", leave)
    first, second = Two(lambda _: None).neighbors()
    watchdog: Any = object.__new__(Watchdog)
    watchdog.number = watchdog.first = 0
    watchdog.status, watchdog._next_rank, watchdog._protected = RankStatus(), first, True
    watchdog._has_raised, watchdog._stuck = False, None
    if leaves:
        second.take_leave()
    _end_process(second)
    while not first.is_gone:
        pass
    watchdog.end_if_stuck()  # it notes when
    with nullcontext() if leaves else pytest.raises(SystemExit):
        watchdog.end_if_stuck()
    _end_process(first)
