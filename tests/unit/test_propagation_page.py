"""The page of the suite `propagation`: what it compares with what."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from benchmarks.suites.propagation import BASELINE, LOSES, PROPAGATES, Training, TrainingCase, of_one_text
from benchmarks.suites.propagation_page import training_rows

FEW, MANY = (Training(count, 1, 100, 2e-3) for count in (6, 16))


def run(
    variant: str, training: Training, final: float, halfway: float, seconds: float = 1.0, python: str = "3.11.7"
) -> dict[str, Any]:
    case = TrainingCase(variant, 0, training)
    return {
        "case": asdict(case) | {"name": case.name},
        "final": final,
        "curve": [[1, 6.0], [50, halfway], [100, final]],
        "step_seconds": seconds,
        "versions": {"python": python},
    }


def test_a_variant_is_compared_with_the_uncompressed_run_of_its_own_layout() -> None:
    runs = [
        run(BASELINE, FEW, 4.0, 5.0),
        run(BASELINE, MANY, 3.0, 4.0, seconds=2.0),
        run(PROPAGATES, MANY, 3.0 + math.log(1.1), 4.0),
        run(LOSES, MANY, 3.5, 5.0),
    ]
    assert training_rows(runs, FEW) == []
    (variant, perplexity, _, _, times, _, to_last), (_, _, _, *slower) = training_rows(runs, MANY)
    assert (variant, perplexity, times) == (PROPAGATES, "+10.00%", "2.000")
    assert slower[1] == "2.000" and float(slower[0]) > 1
    # The uncompressed run has a loss of 3.5 halfway between its steps 50 and 100, and its steps take twice as long.
    assert slower[3] == f"{100 / 75 / 2:.3f}" and float(to_last) < float(slower[3])


def test_trainings_on_the_sources_of_another_python_are_not_compared() -> None:
    before = run(PROPAGATES, MANY, 3.0, 4.0, python="3.11.2")
    other = run(PROPAGATES, FEW, 3.0, 4.0, python="3.11.2")
    after = [run(BASELINE, MANY, 3.0, 4.0), run(LOSES, MANY, 3.1, 4.0)]
    assert of_one_text([before, other, *after]) == [other, *after]
    again = run(BASELINE, MANY, 3.2, 4.0)
    assert of_one_text([*after, again]) == [again, after[1]]
