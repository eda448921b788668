"""A simulated step as intervals: what the engine's own trace of a step is made of."""

from __future__ import annotations

from collections.abc import Iterable

from towpath.observing import BETWEEN, COMPUTE, INSIDE, WAITING, Interval
from towpath.sim.timeline import Event

_TRACKS = {"compute": COMPUTE, "waiting": WAITING}


def intervals_of(events: Iterable[Event]) -> list[Interval]:
    return [
        Interval(
            track=_TRACKS.get(event.track, BETWEEN if event.crosses else INSIDE),
            name=event.name,
            start_seconds=event.start,
            seconds=event.end - event.start,
            args={"queue": event.track, "micro-step": event.micro_step},
        )
        for event in events
    ]
