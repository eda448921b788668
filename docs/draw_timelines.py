"""Draws docs/timelines.svg: one step by the engine's trace and by the simulator, as benchmarks/planner.py kept them.

python docs/draw_timelines.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towpath.observing import Interval
from towpath.train.observe.plots import draw_timelines, svg

DOCS = Path(__file__).parent
PICTURE = DOCS / "timelines.svg"
RESULTS = DOCS.parent / "benchmarks" / "results" / "planner.jsonl"
ENVIRONMENT = "200mbit, 2 × 2, small, 1 micro-steps"


@dataclass(frozen=True, slots=True)
class Step:
    """As `draw_timelines` takes it."""

    strategy: str
    timeline: Sequence[Interval]


def last_run() -> dict[str, Any]:
    """Of the environment that is drawn, as far as its timelines were kept."""
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["case"]["name"] == ENVIRONMENT and line.get("drawn")][-1]


def picture() -> str:
    drawn = last_run()["drawn"]
    steps = [
        Step(f"{name}, {who}", [Interval(**interval, args={}) for interval in drawn[name][kept]])
        for name in drawn
        for who, kept in (("traced", "engine"), ("simulated", "simulated"))
    ]
    text = svg(draw_timelines, steps, (10, 0.8 + 0.8 * len(steps)))
    # Alone, without a page around it, it needs a ground to be seen on.
    return text.replace("<svg ", '<svg style="background: #fff" ', 1)


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE)
