"""Traces: intervals of time on tracks, traced or simulated, and their file for Perfetto.

    compute         what the training thread computes: the forward and backward of each unit, and the loop's phases
    waiting         what the training thread waited for
    between nodes   transfers that send bytes between nodes
    inside nodes    transfers that send bytes inside nodes
    codec NAME      encoding and decoding, one track per codec

Bytes are those that all ranks send together, as in `towpath.stats`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPUTE, WAITING, BETWEEN, INSIDE, CODEC = "compute", "waiting", "between nodes", "inside nodes", "codec "
_ORDER = (COMPUTE, WAITING, BETWEEN, INSIDE)  # the tracks of codecs come after these, by name

Args = dict[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One interval of time on a track of a trace.

    Args:
        track: The row of the trace, such as "compute".
        name: What ran, such as "forward blocks.3".
        start_seconds: Seconds since the start of the trace, which is the same moment on all ranks.
        seconds: The duration.
        args: Further facts, by name, such as the bytes of a transfer.
    """

    track: str
    name: str
    start_seconds: float
    seconds: float
    args: Args

    @property
    def end_seconds(self) -> float:
        """End of the interval, in seconds from the start of the trace."""
        return self.start_seconds + self.seconds


def write_intervals(
    path: Path, ranks: Mapping[int, Sequence[Interval]], names: Mapping[int, str] | None = None
) -> None:
    """Write the intervals of each rank, traced or simulated, as a trace file. `names` has names of the ranks."""
    found = {"displayTimeUnit": "ms", "traceEvents": list(_events(ranks, names or {}))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")


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
