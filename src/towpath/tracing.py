"""Record when each transfer and each computation of some steps runs, and write it as a file for Perfetto.

    from towpath import tracing

    with tracing.trace(model) as trace:  # on every rank, around the same steps
        train_one_step()
    tracing.write_trace(Path("trace.json"), model, trace)  # on every rank; rank 0 writes

The file has Chrome's trace format, which https://ui.perfetto.dev opens. A process of the file is a rank, and its
threads are tracks. Intervals of one thread must not overlap. So a track on which some overlap gets further rows:
"between nodes", "between nodes (2)", and so on.

Every rank counts seconds from the end of a barrier (`trace`). Ranks leave a barrier at slightly different
times, as long apart as its last messages take on the network. The times of different ranks are comparable up to that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from towpath.observe.stats import Observable, Trace, intervals_of_ranks, trace
from towpath.observe.trace import BETWEEN, COMPUTE, INSIDE, WAITING, Interval
from towpath.plan.prediction import Event

__all__ = ["Trace", "trace", "write_trace"]

_ORDER = (COMPUTE, WAITING, BETWEEN, INSIDE)  # the tracks of codecs come after these, by name
_SIMULATED_TRACKS = {"compute": COMPUTE, "waiting": WAITING}


def write_trace(path: Path, model: nn.Module | Observable, trace: Trace) -> None:
    """Write the traces of all ranks in one file, on rank 0. Every rank must call it.

    Args:
        path: The file. Its folder is made if there is none.
        model: A model that `shard` returned, or a `Pipeline`.
        trace: This rank's trace, after its `trace` context has ended.

    Raises:
        ShardError: The model is not sharded.
    """
    if ranks := intervals_of_ranks(model, trace):
        write_intervals(path, ranks)


def write_intervals(
    path: Path, ranks: Mapping[int, Sequence[Interval]], names: Mapping[int, str] | None = None
) -> None:
    """Write the intervals of each rank, traced or simulated, as a trace file. `names` has names of the ranks."""
    found = {"displayTimeUnit": "ms", "traceEvents": list(_events(ranks, names or {}))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")


def simulated_intervals(events: Iterable[Event]) -> list[Interval]:
    """Return the events of a simulated step, a `Timeline`'s, as the intervals of a traced one."""
    return [
        Interval(
            track=_SIMULATED_TRACKS.get(event.track, BETWEEN if event.crosses else INSIDE),
            name=event.name,
            start_seconds=event.start,
            seconds=event.end - event.start,
            args={"queue": event.track, "micro-step": event.micro_step},
        )
        for event in events
    ]


def _events(ranks: Mapping[int, Sequence[Interval]], names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    def metadata(name: str, rank: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "ts": 0, "pid": rank, "tid": thread, "args": args}

    for rank, intervals in sorted(ranks.items()):
        yield metadata("process_name", rank, 0, {"name": names.get(rank, f"rank {rank}")})
        yield metadata("process_sort_index", rank, 0, {"sort_index": rank})
        for thread, (row, inside) in enumerate(_rows(intervals), start=1):
            yield metadata("thread_name", rank, thread, {"name": row})
            yield metadata("thread_sort_index", rank, thread, {"sort_index": thread})
            for interval in inside:
                start, end = _nanoseconds(interval)
                yield {
                    "ph": "X",
                    "name": interval.name,
                    "cat": interval.track,
                    "ts": start / 1e3,  # microseconds
                    "dur": (end - start) / 1e3,
                    "pid": rank,
                    "tid": thread,
                    "args": interval.args,
                }


def _rows(intervals: Iterable[Interval]) -> Iterator[tuple[str, list[Interval]]]:
    """Yield the name and the intervals of each row. An interval takes the first free row of its track."""
    tracks: dict[str, list[Interval]] = {}
    for interval in sorted(intervals, key=_nanoseconds):
        tracks.setdefault(interval.track, []).append(interval)
    for track in sorted(tracks, key=lambda t: (_ORDER.index(t) if t in _ORDER else len(_ORDER), t)):
        rows: list[list[Interval]] = []
        for interval in tracks[track]:
            start, _ = _nanoseconds(interval)
            free = next((row for row in rows if _nanoseconds(row[-1])[1] <= start), None)
            if free is None:
                rows.append([interval])
            else:
                free.append(interval)
        for number, row in enumerate(rows, start=1):
            yield (track if number == 1 else f"{track} ({number})"), row


def _nanoseconds(interval: Interval) -> tuple[int, int]:
    """Return whole nanoseconds: intervals that touch must not overlap after rounding."""
    return round(interval.start_seconds * 1e9), round(interval.end_seconds * 1e9)
