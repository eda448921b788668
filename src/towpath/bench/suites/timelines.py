"""One step by the engine's trace and by the simulator, task by task."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from towpath.core.schedule import QUEUES
from towpath.core.strategy import WITH_TRANSPORT, Strategy, TransferKind
from towpath.observing import BETWEEN, COMPUTE, INSIDE, Interval
from towpath.sim.timeline import Event

# A task: its kind, its unit and its micro-step.
Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Span:
    start: float
    end: float


def of_trace(intervals: Iterable[Interval]) -> dict[Key, Span]:
    """A task may be several messages, and one message goes over two classes of links."""
    found: dict[Key, Span] = {}
    for interval in intervals:
        if interval.track in (BETWEEN, INSIDE):
            args = interval.args
            key = (str(args["kind"]), str(args["unit"]), int(args["micro_step"]))
            before = found.get(key, Span(interval.start_seconds, interval.end_seconds))
            start, end = min(before.start, interval.start_seconds), max(before.end, interval.end_seconds)
            found[key] = Span(start, end)
    return found


def of_replay(events: Iterable[Event], strategy: Strategy) -> dict[Key, Span]:
    """Of the tasks that send something."""
    sending = {TransferKind.UNUSED_PARAMS, *(kind for kind in WITH_TRANSPORT if getattr(strategy.moves, kind.value))}
    return {
        (
            TransferKind(event.kind).value,
            "root" if event.kind is TransferKind.UNUSED_PARAMS else event.unit or "root",
            event.micro_step,
        ): Span(event.start, event.end)
        for event in events
        if event.kind in sending and event.track in QUEUES.values()
    }


def usual(steps: Sequence[Mapping[Key, Span]]) -> dict[Key, Span]:
    """Of several traced steps: the median of each task that all of them have."""
    shared = [key for key in steps[0] if all(key in step for step in steps)]
    return {
        key: Span(*(statistics.median(getattr(step[key], end) for step in steps) for end in ("start", "end")))
        for key in shared
    }


def compared(engine: Mapping[Key, Span], simulated: Mapping[Key, Span], step_seconds: float) -> dict[str, Any]:
    """`start_error`: how far apart they begin in the mean, as a share of the step that was measured."""
    shared = [key for key in engine if key in simulated]
    return {
        "tasks": len(shared),
        "only_in_engine": sorted(map(str, set(engine) - set(simulated))),
        "only_in_simulator": sorted(map(str, set(simulated) - set(engine))),
        "same_order": all(
            _order(engine, shared, queue) == _order(simulated, shared, queue) for queue in set(QUEUES.values())
        ),
        "start_error": statistics.fmean(abs(engine[k].start - simulated[k].start) for k in shared) / step_seconds,
    }


def _order(spans: Mapping[Key, Span], keys: Iterable[Key], queue: str) -> list[Key]:
    mine = [key for key in keys if QUEUES[TransferKind(key[0])] == queue]
    return sorted(mine, key=lambda key: spans[key].start)


def drawn(intervals: Iterable[Interval]) -> list[dict[str, Any]]:
    """What a picture needs."""
    wanted = (COMPUTE, BETWEEN, INSIDE)
    return [
        {name: value for name, value in asdict(interval).items() if name != "args"}
        for interval in intervals
        if interval.track in wanted
    ]
