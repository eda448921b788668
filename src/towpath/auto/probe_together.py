"""How much things slow one another that a training step does at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import torch

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Doing:
    """`seconds`: what it takes alone. `alone`: no other rank takes part: it may be done as often as one likes."""

    name: str
    size: int
    seconds: float
    work: Work
    alone: bool = True


def beside(first: Doing, second: Doing, device: torch.device, seconds: float) -> tuple[float, float]:
    """What each of the two takes while the other goes on: `second` as often as would take `seconds` alone, `first` as
    long as that.

    What other ranks take part in is done as often on every rank: of two such things the quicker ends a little earlier.
    """
    times, at_least = (max(2, round(seconds / doing.seconds)) for doing in (second, first))
    took: list[float] = []
    failure: list[BaseException] = []

    def others() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
                marks = [time.perf_counter()]
                for _ in range(times):
                    second.work()
                    marks.append(time.perf_counter())
                _settle(device)
                each = [after - before for before, after in pairwise(marks)]
                took.append(usual_mean(each) if device.type == "cpu" else (time.perf_counter() - marks[0]) / times)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=others, name="towpath-probe", daemon=True)
    began, done = time.perf_counter(), 0
    thread.start()
    while done < 1 or (thread.is_alive() if first.alone else done < at_least):
        first.work()
        _settle(device)
        done += 1
    each = (time.perf_counter() - began) / done
    thread.join()
    if failure:
        raise failure[0]
    return each, took[0]


def usual_mean(seconds: Sequence[float]) -> float:
    """Without the longest and the shortest twentieth: now and then a thread waits so long for a processor that it would
    outweigh all the others."""
    left_out = len(seconds) // 20
    return fmean(sorted(seconds)[left_out : len(seconds) - left_out])


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
