"""Draw docs/pictures/step.svg: a training step of a small GPT under three strategies, from a run on the lab.

python -m tools.docs.draw_step [-o docs/pictures/step.svg] [--inter 200mbit] [STRATEGY …]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lab
from lab import demo
from lab.report import Outcome
from towpath.cli.plots import draw_timelines, standalone_svg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategies", nargs="*", default=["zero3", "zero++", "paro-iig"])
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(__file__).parents[2] / "docs" / "pictures" / "step.svg"
    )
    parser.add_argument("--inter", default="200mbit")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    with lab.Lab(demo.TOPOLOGY, inter=options.inter) as cluster:
        for strategy in options.strategies:
            outcomes.append(cluster.call(demo.trained, strategy, 6, True, timeout_seconds=600)[0])
    steps = [(outcome.strategy, outcome.timeline) for outcome in outcomes]
    options.output.write_text(standalone_svg(draw_timelines, steps, (10, 0.8 + 0.8 * len(outcomes))))


if __name__ == "__main__":
    main()
