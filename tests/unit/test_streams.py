"""Streams made of threads: jobs in order, and what may begin before its turn."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Generator
from threading import Event
from typing import Any

import pytest
import torch

from tests.workspace import workspace
from towpath.collectives.collective import Workspace
from towpath.core.queues import MAX_IN_FLIGHT, QUEUES
from towpath.core.strategy import BETWEEN_HOSTS, TransferKind
from towpath.engine import comm
from towpath.engine.comm import make_stream
from towpath.engine.transfer_queues import Stream, StreamJob, Work

DEADLINE_SECONDS = 60.0


def job(run: Work, begin: Work | None = None) -> StreamJob:
    return StreamJob(workspace(), [run], begin)


@pytest.fixture
def stream() -> Generator[Stream]:
    made = make_stream("test", torch.device("cpu"), depth=2)
    yield made
    made.close()


def test_what_waits_for_nobody_begins_when_the_job_before_it_says_so(stream: Stream) -> None:
    """Queued before that or after: the running job need not look again."""
    seen: list[str] = []
    begun = Event()

    def first(workspace: Workspace) -> None:
        seen.append("first travels")
        workspace.links_free()
        assert begun.wait(DEADLINE_SECONDS)
        seen.append("first is shared out")

    def begin(_: Workspace) -> None:
        seen.append("second begins")
        begun.set()

    stream.submit(job(first))
    stream.submit(job(lambda _: seen.append("second goes on"), begin=begin))
    stream.submit(job(lambda _: seen.append("third goes on"), begin=lambda _: seen.append("third begins"))).wait()
    # Nobody said that the third might begin: it did when the second was through.
    assert seen == [
        "first travels",
        "second begins",
        "first is shared out",
        "second goes on",
        "third begins",
        "third goes on",
    ]


def test_it_does_not_begin_before_what_it_comes_after(stream: Stream) -> None:
    seen: list[str] = []
    begun, let_go = Event(), Event()
    other = make_stream("other", torch.device("cpu"), depth=1)

    def first(workspace: Workspace) -> None:
        workspace.links_free()  # too early: the other stream is not through
        let_go.set()
        assert begun.wait(DEADLINE_SECONDS)

    def begin(_: Workspace) -> None:
        seen.append("begins")
        begun.set()

    published = other.submit(job(lambda _: seen.append(f"published {let_go.wait(DEADLINE_SECONDS)}")))
    stream.submit(job(first))
    stream.submit(job(lambda _: seen.append("goes on"), begin=begin), [published]).wait()
    other.close()
    assert seen == ["published True", "begins", "goes on"]


def test_a_failure_to_begin_is_that_of_the_job_it_belongs_to(stream: Stream) -> None:
    seen: list[str] = []
    failed = Event()

    def first(workspace: Workspace) -> None:
        workspace.links_free()
        assert failed.wait(DEADLINE_SECONDS)
        seen.append("first")

    def failing(_: Workspace) -> None:
        failed.set()
        raise ConnectionError("lost")

    before = stream.submit(job(first))
    lost = stream.submit(job(lambda _: pytest.fail("it went on after it had failed to begin"), begin=failing))
    after = stream.submit(job(lambda _: seen.append("after")))
    before.wait()
    with pytest.raises(ConnectionError, match="lost"):
        lost.wait()
    after.wait()
    assert seen == ["first", "after"]


def test_the_queue_goes_on_behind_a_job_whose_precondition_failed(stream: Stream) -> None:
    """And what begins early then is the job behind the running one, not one that is over."""
    seen: list[str] = []
    begun = Event()

    def failing(_: Workspace) -> None:
        raise ConnectionError("lost")

    def going_on(workspace: Workspace) -> None:
        workspace.links_free()
        assert begun.wait(DEADLINE_SECONDS)

    def begin(_: Workspace) -> None:
        seen.append("begins")
        begun.set()

    lost = stream.submit(job(failing))
    stream.submit(job(lambda _: None), [lost])
    stream.submit(job(going_on))
    stream.submit(job(lambda _: seen.append("goes on"), begin=begin)).wait()
    assert seen == ["begins", "goes on"]


def test_threads_let_go_of_their_last_job_before_the_interpreter_ends() -> None:
    """A thread that drops a collective while the interpreter is finalized aborts the process."""
    script = """
import ctypes, hashlib, threading, time, torch
from tests.workspace import workspace
from towpath.engine.comm import make_stream
from towpath.engine.transfer_queues import StreamJob
from towpath import daemons

daemons._LIMIT_SECONDS = 60.0  # a second of work takes longer on a busy machine

class Collective:
    def __del__(self):
        time.sleep(0.5)
        print("let go")

def gloo():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop")  # PR_SET_NAME
    started.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # without the interpreter lock
    print("dropped")

stream = make_stream("test", torch.device("cpu"), depth=2)
stream.submit(StreamJob(workspace(), [lambda _, held=Collective(): None], None)).wait()
started = threading.Event()
threading.Thread(target=gloo, daemon=True).start()
started.wait()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    # Both are awaited. Which comes first depends on how fast the machine is.
    assert (ended.returncode, sorted(ended.stdout.split("\n"))) == (0, ["", "dropped", "let go"]), ended.stderr


def test_transfers_that_the_computation_waits_for_soon_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def stream(device: torch.device, *, priority: int) -> Any:
        made.append(priority)
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    found: dict[TransferKind, set[int]] = {}
    for kind in set(TransferKind) - set(BETWEEN_HOSTS):
        made.clear()
        make_stream(QUEUES[kind], torch.device("cuda"), MAX_IN_FLIGHT[QUEUES[kind]])
        assert len(made) == MAX_IN_FLIGHT[QUEUES[kind]]
        found[kind] = set(made)
    last = {TransferKind.GRAD_SYNC, TransferKind.OUTER, TransferKind.SLOW_WEIGHTS}
    assert {kind for kind, priorities in found.items() if priorities == {0}} == last
    assert all(priorities == {-1} for kind, priorities in found.items() if kind not in last)


@pytest.mark.parametrize(("connections", "warns"), [("1", True), ("32", False), ("", False)])
def test_one_hardware_queue_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, connections: str, warns: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: object())
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    comm._warn_of_one_connection.cache_clear()
    with caplog.at_level(logging.WARNING, "towpath"):
        make_stream("gather", torch.device("cpu"), 1).close()
        assert not caplog.records
        for _ in range(2):
            make_stream("gather", torch.device("cuda"), 1)
    assert [record.name for record in caplog.records] == ["towpath.engine"] * warns
    assert all("CUDA_DEVICE_MAX_CONNECTIONS" in record.getMessage() for record in caplog.records)
    comm._warn_of_one_connection.cache_clear()
