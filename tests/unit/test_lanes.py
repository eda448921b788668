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
    seen: list[str] = []
    queued = Event()

    def first() -> None:
        assert queued.wait(DEADLINE_SECONDS)
        seen.append("first travels")
        lane.begin_next()
        seen.append("first is shared out")

    lane.submit(Job(first))
    second = lane.submit(Job(lambda: seen.append("second goes on"), begin=lambda: seen.append("second begins")))
    lane.submit(Job(lambda: seen.append("third"), begin=lambda: seen.append("third begins")))
    queued.set()
    second.wait()
    lane.submit(Job(lambda: None)).wait()
    # The third had no chance: nobody said that it might.
    assert seen == ["first travels", "second begins", "first is shared out", "second goes on", "third"]


def test_it_begins_once_and_not_before_what_it_comes_after(lane: Lane) -> None:
    seen: list[str] = []
    queued, let_go = Event(), Event()
    other = make_lane("other", torch.device("cpu"), turns=1)

    def first() -> None:
        assert queued.wait(DEADLINE_SECONDS)
        lane.begin_next()  # too early: the other lane is not through
        let_go.set()
        published.join()  # pyright: ignore[reportAttributeAccessIssue]
        lane.begin_next()
        lane.begin_next()

    published = other.submit(Job(lambda: seen.append(f"published {let_go.wait(DEADLINE_SECONDS)}")))
    lane.submit(Job(first))
    last = lane.submit(Job(lambda: seen.append("goes on"), begin=lambda: seen.append("begins")), [published])
    queued.set()
    last.wait()
    other.close()
    assert seen == ["published True", "begins", "goes on"]


def test_a_failure_to_begin_is_that_of_the_job_it_belongs_to(lane: Lane) -> None:
    queued = Event()

    def first() -> None:
        assert queued.wait(DEADLINE_SECONDS)
        lane.begin_next()

    def failing() -> None:
        raise ConnectionError("lost")

    before = lane.submit(Job(first))
    after = lane.submit(Job(lambda: pytest.fail("it went on after it had failed to begin"), begin=failing))
    queued.set()
    before.wait()
    with pytest.raises(ConnectionError, match="lost"):
        after.wait()


def test_the_queue_goes_on_behind_a_job_whose_precondition_failed(lane: Lane) -> None:
    """And what begins early then is the job behind the running one, not one that is over."""
    seen: list[str] = []
    queued = Event()

    def failing() -> None:
        raise ConnectionError("lost")

    def going_on() -> None:
        assert queued.wait(DEADLINE_SECONDS)
        lane.begin_next()

    lost = lane.submit(Job(failing))
    lane.submit(Job(lambda: None), [lost])
    lane.submit(Job(going_on))
    last = lane.submit(Job(lambda: seen.append("goes on"), begin=lambda: seen.append("begins")))
    queued.set()
    last.wait()
    assert seen == ["begins", "goes on"]
