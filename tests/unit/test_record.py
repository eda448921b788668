"""What is counted of transfers, where times are known at once and where a device tells them later."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from towpath.collectives.collective import WireBuffers, Workspace
from towpath.core.placement import GroupCollective
from towpath.core.routes import Group, Op
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Range
from towpath.observe.record import Mark, Record, Timer, Trace, TransferWait
from towpath.topology.cluster import Topology

CPU = torch.device("cpu")
PAIR = GroupCollective(Op.ALL_GATHER, 2, (Group((0, 1), (0, 1)),))


def gather(unit: str) -> Transfer:
    return Transfer(TransferKind.GATHER, Range(unit, "float32", 8, "float32"), PAIR, Transport("flat"), Topology(2, 1))


def record(timer: Any) -> Record:
    activity = SimpleNamespace(begins=lambda _: None, ends=lambda: None, computes=lambda *_: None)
    return Record(cast(Any, SimpleNamespace(status=activity, raise_if_diverged=lambda: None)), timer)


def _counts(counted: Record) -> list[tuple[int, float, float]]:
    return [(t.calls, t.seconds_in_flight, t.seconds_exposed) for t in counted.totals().transfers]


@dataclass(eq=False)
class Event:
    """At a second of the device's, which the host does not know before it has come."""

    second: float


class Device:
    """Its stream has come to `now`; what the host enqueues is marked at the end of the queue, `end`."""

    is_free = False

    def __init__(self) -> None:
        self.now = self.end = 0.0
        self.made = 0

    def mark(self) -> Mark:
        self.made += 1
        return cast(Any, Event(self.end))

    def is_known(self, mark: Mark) -> bool:
        return cast(Any, mark).second <= self.now

    def seconds(self, began: Mark, ended: Mark) -> float:
        assert self.is_known(ended), "it was read before it had come: that waits for the device"
        return cast(Any, ended).second - cast(Any, began).second

    def host_seconds(self, began: Mark, ended: Mark) -> float:
        return 0.0

    def settle(self) -> None:
        self.now = self.end


def test_seconds_of_a_device_are_added_when_they_are_known_and_calls_at_once() -> None:
    device = Device()
    counted = record(device)
    counted.totals()
    first, second = gather("a"), gather("b")
    for transfer in (first, second):
        with counted.running([transfer], Workspace(WireBuffers(CPU))):
            device.end += 2.0
    waits = TransferWait(counted, [second])
    began = waits.mark()
    device.end += 0.5
    waits.waited(began, waits.mark())

    counted.end_step()
    assert _counts(counted) == [
        (1, 0, 0),
        (1, 0, 0),
    ]
    device.now = 2.0  # the first has ended meanwhile
    counted.end_step()
    assert _counts(counted) == [
        (1, 2, 0),
        (1, 0, 0),
    ]
    device.settle()
    assert _counts(counted) == [
        (1, 2, 0),
        (1, 2, 0.5),
    ]
    assert counted.totals().exposed_by_kind == {TransferKind.GATHER: 0.5}
    assert [(t.calls, t.seconds_in_flight) for t in counted.totals().transfers] == [(1, 2), (1, 2)]  # once


def test_events_are_made_only_while_somebody_reads_seconds() -> None:
    device = Device()
    counted = record(device)
    wait = TransferWait(counted, [gather("a")])

    def run() -> int:
        before = device.made
        with counted.running([gather("a")], Workspace(WireBuffers(CPU))):
            device.end += 2.0
        device.settle()
        return device.made - before

    assert run() == 0 and not wait.is_timed
    [total] = counted.totals().transfers  # calls and bytes were counted all the same
    assert (total.calls, total.seconds_in_flight) == (1, 0.0) and total.inter_bytes > 0
    assert run() == 2 and wait.is_timed
    assert [(t.calls, t.seconds_in_flight) for t in counted.totals().transfers] == [(2, 2.0)]


def test_a_trace_times_transfers_that_nobody_else_reads() -> None:
    device = Device()
    counted = record(device)
    counted.trace = Trace(device)
    with counted.running([gather("a")], Workspace(WireBuffers(CPU))):
        device.end += 2.0
    counted.trace.end()
    assert [i.seconds for i in counted.trace.intervals if i.name == "gather of a"] == [2.0]
    counted.trace = None
    assert not counted.is_timed([gather("a")])


def test_what_ranks_compare_is_always_timed_by_the_host() -> None:
    compared = replace(gather(""), kind=TransferKind.UNUSED_PARAMS)
    assert record(Device()).is_timed([compared]) and not record(Device()).is_timed([gather("a")])


def test_only_what_holds_the_host_up_is_taken_off_its_seconds() -> None:
    for timer, taken_off in ((Timer(), 1.5), (Device(), 0.0)):
        counted = record(timer)
        with counted.host:
            before = counted.host.seconds
            ended = 1.5 if isinstance(timer, Timer) else cast(Any, Event(1.5))
            counted.waited([gather("a")], 0.0 if isinstance(timer, Timer) else cast(Any, Event(0.0)), ended)
            assert counted.host.seconds == before - taken_off


def test_several_gathers_in_one_message_share_its_seconds() -> None:
    counted = record(Timer())
    both = [gather("a"), gather("b")]
    marks = iter([1.0, 3.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Timer, "mark", lambda _: next(marks))
        with counted.running(both, Workspace(WireBuffers(CPU))):
            pass
    assert [(t.calls, t.seconds_in_flight) for t in counted.totals().transfers] == [(1, 1.0), (1, 1.0)]


def test_bytes_of_coded_messages_are_those_that_were_sent() -> None:
    """In a trace, those of each interval. In totals, those of all calls."""
    move = replace(PAIR, op=Op.ALL_GATHER)
    sync = Transfer(
        TransferKind.PARAM_SYNC, Range("a", "float32", 1 << 16, "float32"), move, Transport(exact=True), Topology(2, 1)
    )
    counted = record(Timer())
    for traced, messages in ((False, 100), (True, 50)):
        counted.trace = Trace(Timer()) if traced else None
        with counted.running([sync], workspace := Workspace(WireBuffers(CPU))):
            workspace.count_encoded(200, messages)
    assert counted.trace is not None
    counted.trace.end()
    sent = [each.args for each in counted.trace.intervals if each.track == "between nodes"]
    assert [args["bytes"] for args in sent] == [sync.inter_bytes // 4]
    assert [args["codec"] for args in sent] == ["exact differences"]
    assert counted.totals().inter_bytes == sync.inter_bytes * 2 * 150 // 400
    assert counted.totals().encoded_shares == {("exact differences", "float32"): 150 / 400}
    assert counted.totals().since(counted.totals()).encoded_shares == {}


def test_wire_buffers_are_made_once_and_only_as_large_as_is_needed() -> None:
    told: list[int] = []
    buffers = WireBuffers(torch.device("cpu"), lambda made: told.append(made.numel()))
    buffers.reserve({"float32": 8, "uint8": 0})
    workspace = Workspace(buffers)
    assert workspace.take(8, torch.float32).data_ptr() == workspace.take(3, torch.float32).data_ptr()
    assert (told, buffers.made, buffers.nbytes) == ([8], 1, 32)
    with torch.inference_mode():
        assert not workspace.take(16, torch.float32).is_inference()
    assert (told, buffers.nbytes) == ([8, 16], 64)


def test_what_waits_for_a_device_does_not_grow_with_the_transfers() -> None:
    """As in inference, where no boundary comes, and spans become known while others are noted."""
    device = Device()
    counted = record(device)
    counted.totals()
    for number in range(20_000):
        device.end = number + 1.0
        with counted.running([gather("a")], Workspace(WireBuffers(CPU))):
            device.end = number + 2.0
        device.now = device.end - 10  # it is ten transfers behind
    assert len(counted._unknown) <= 2 * 1000
    [total] = counted.totals().transfers
    assert total.calls == 20_000
