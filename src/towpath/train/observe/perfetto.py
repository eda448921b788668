"""A trace of all ranks as one JSON file in Chrome's trace format, which https://ui.perfetto.dev opens.

A process is a rank; its threads are tracks. Intervals of one thread must not overlap, so a track on which some do gets
further rows: "between nodes", "between nodes (2)", ... Each interval takes the first row that is free.

One time for all: every rank counts seconds from where it left a barrier that all had entered (`towpath.api.tracing`).
They leave it apart by what its last messages take on the network, so across ranks the picture is true to about that;
within a rank it is true to the clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from towpath.observing import BETWEEN, COMPUTE, INSIDE, WAITING, Interval

Event = dict[str, Any]

_ORDER = (COMPUTE, WAITING, BETWEEN, INSIDE)  # codecs come after, by name


def write(path: Path, ranks: Mapping[int, Sequence[Interval]], names: Mapping[int, str] | None = None) -> None:
    """`ranks`: the intervals of each. `names`: of the ranks, such as 'rank 3 (node 1)'."""
    found = {"displayTimeUnit": "ms", "traceEvents": list(events(ranks, names or {}))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")


def events(ranks: Mapping[int, Sequence[Interval]], names: Mapping[int, str]) -> Iterator[Event]:
    for rank, intervals in sorted(ranks.items()):
        yield _named("process_name", rank, 0, {"name": names.get(rank, f"rank {rank}")})
        yield _named("process_sort_index", rank, 0, {"sort_index": rank})
        for thread, (row, inside) in enumerate(_rows(intervals), start=1):
            yield _named("thread_name", rank, thread, {"name": row})
            yield _named("thread_sort_index", rank, thread, {"sort_index": thread})
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


def _named(what: str, rank: int, thread: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": what, "ts": 0, "pid": rank, "tid": thread, "args": args}


def _rows(intervals: Iterable[Interval]) -> Iterator[tuple[str, list[Interval]]]:
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
    """Whole ones: neighbours that touch must not come to overlap by rounding."""
    return round(interval.start_seconds * 1e9), round(interval.end_seconds * 1e9)
