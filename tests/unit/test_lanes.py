"""Lanes of threads: jobs in order, and what may begin before its turn."""

from __future__ import annotations

from collections.abc import Generator
from threading import Event

import pytest
import torch

from towpath.engine.streams import Job, Lane, make_lane

DEADLINE_SECONDS = 60.0


@pytest.fixture
def lane() -> Generator[Lane]:
    made = make_lane("test", torch.device("cpu"), turns=2)
    yield made
    made.close()


def test_what_waits_for_nobody_begins_when_the_job_before_it_says_so(lane: Lane) -> None:
    """Queued before that or after: the running job need not look again."""
    seen: list[str] = []
    begun = Event()

    def first() -> None:
        seen.append("first travels")
        lane.begin_next()
        assert begun.wait(DEADLINE_SECONDS)
        seen.append("first is shared out")

    def begin() -> None:
        seen.append("second begins")
        begun.set()

    lane.submit(Job(first))
    lane.submit(Job(lambda: seen.append("second goes on"), begin=begin))
    lane.submit(Job(lambda: seen.append("third goes on"), begin=lambda: seen.append("third begins"))).wait()
    # Nobody said that the third might begin: it did when the second was through.
    assert seen == [
        "first travels",
        "second begins",
        "first is shared out",
        "second goes on",
        "third begins",
        "third goes on",
    ]


def test_it_does_not_begin_before_what_it_comes_after(lane: Lane) -> None:
    seen: list[str] = []
    begun, let_go = Event(), Event()
    other = make_lane("other", torch.device("cpu"), turns=1)

    def first() -> None:
        lane.begin_next()  # too early: the other lane is not through
        let_go.set()
        assert begun.wait(DEADLINE_SECONDS)

    def begin() -> None:
        seen.append("begins")
        begun.set()

    published = other.submit(Job(lambda: seen.append(f"published {let_go.wait(DEADLINE_SECONDS)}")))
    lane.submit(Job(first))
    lane.submit(Job(lambda: seen.append("goes on"), begin=begin), [published]).wait()
    other.close()
    assert seen == ["published True", "begins", "goes on"]


def test_jobs_run_one_after_the_other_though_each_has_a_thread(lane: Lane) -> None:
    seen: list[str] = []
    second_waits = Event()

    def first() -> None:
        lane.begin_next()
        assert second_waits.wait(DEADLINE_SECONDS)
        seen.append("first")

    lane.submit(Job(first))
    lane.submit(Job(lambda: seen.append("second"), begin=second_waits.set))
    lane.submit(Job(lambda: seen.append("third"))).wait()
    assert seen == ["first", "second", "third"]


def test_a_failure_to_begin_is_that_of_the_job_it_belongs_to(lane: Lane) -> None:
    seen: list[str] = []
    failed = Event()

    def first() -> None:
        lane.begin_next()
        assert failed.wait(DEADLINE_SECONDS)
        seen.append("first")

    def failing() -> None:
        failed.set()
        raise ConnectionError("lost")

    before = lane.submit(Job(first))
    lost = lane.submit(Job(lambda: pytest.fail("it went on after it had failed to begin"), begin=failing))
    after = lane.submit(Job(lambda: seen.append("after")))
    before.wait()
    with pytest.raises(ConnectionError, match="lost"):
        lost.wait()
    after.wait()
    assert seen == ["first", "after"]


def test_the_queue_goes_on_behind_a_job_whose_precondition_failed(lane: Lane) -> None:
    """And what begins early then is the job behind the running one, not one that is over."""
    seen: list[str] = []
    begun = Event()

    def failing() -> None:
        raise ConnectionError("lost")

    def going_on() -> None:
        lane.begin_next()
        assert begun.wait(DEADLINE_SECONDS)

    def begin() -> None:
        seen.append("begins")
        begun.set()

    lost = lane.submit(Job(failing))
    lane.submit(Job(lambda: None), [lost])
    lane.submit(Job(going_on))
    lane.submit(Job(lambda: seen.append("goes on"), begin=begin)).wait()
    assert seen == ["begins", "goes on"]
