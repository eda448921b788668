"""What must not get worse while code is removed: the planner's regret, its choices, and the launches of a step.

    python -m tools.freeze --write before.json       before a change
    python -m tools.freeze --against before.json     after it: prints the differences, and fails if there are any
    python -m benchmarks checkouts --against COMMIT  the step time, on a quiet machine

Regret is what the planner's first choice costs against the fastest measured strategy. Every recorded run of the suite
`planner` has the profile of its cluster, so today's planner predicts its strategies again. The first runs had
another form of profiles, and do not count. Choices are what the
planner finds for the shipped clusters. Launches are counted on one rank of 2 × 8, without the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import towpath
from benchmarks import pricing
from benchmarks.harness import results
from benchmarks.harness.fake_world import fake_world
from towpath import planning
from towpath.plan.profile import VERSION

# A regret may differ by this much from the one before: half a point.
MOST_REGRET = 0.005
MODELS = {"llama-7b": 64, "llama-3.1-8b": 64, "gpt-8.3b": 128}
CLUSTERS = ("ethernet-10g", "ethernet-25g", "p4d", "h100-100g")
WIDTH = 96
OPTIONS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "paro-iig": {"exact": True},
    "mics": {"gradients": "int8"},
    "zero1": {"gradients": "int4:64", "feedback": "both"},
}
Figures = dict[str, Any]


def regrets() -> Iterator[tuple[str, Figures]]:
    """Yield the figures of every recorded run: the mean error of predictions and the regret of the choice."""
    found = [line for line in results.read(results.file_of("planner")) if _readable(line)]
    for number, line in enumerate(found):
        print(f"planner: run {number + 1} of {len(found)}", file=sys.stderr)
        predicted = pricing.predicted(line, measured_collectives=True)
        steps = {name: statistics.median(seconds) for name, seconds in line["measured_seconds"].items()}
        judged = pricing.judged(predicted, steps)
        name = f"{line['case']['name']}, {line['date']}"
        yield name, {"predicted": {n: round(s, 6) for n, s in predicted.items()}} | judged


def _readable(line: results.Line) -> bool:
    return "profile" in line and json.loads(line["profile"])["version"] == VERSION


def choices() -> Iterator[tuple[str, Figures]]:
    """Yield the planner's first choice for shipped clusters and published models."""
    for cluster_name in CLUSTERS:
        for model_name, batch in MODELS.items():
            print(f"plan: {model_name} on {cluster_name}", file=sys.stderr)
            cluster = planning.load_cluster(cluster_name)
            model = planning.describe_model(model_name, length=2048)
            request = planning.Request(batch=max(batch, cluster.topology.world), memory=cluster.memory)
            found = planning.Solver(model, cluster, request).solve(best=1)
            if isinstance(found, planning.Ranking):
                best = found.ranked[0]
                figures: Figures = {"seconds": round(best.seconds, 6), "placement": str(best.strategy.placement)}
            else:
                figures = {"missing_bytes": found.missing_bytes}
            yield f"{model_name} on {cluster_name}", figures


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def launches() -> Iterator[tuple[str, Figures]]:
    """Yield the launches of two optimizer steps of two micro-steps each, by strategy."""
    settings = [(name, {}) for name in towpath.strategies()] + [(n, o) for n, o in OPTIONS.items() if o]
    for name, options in settings:
        # The model is small, and exact transport would leave all its transfers alone.
        with fake_world(2, 8) as (topology, counted), mock.patch("towpath.core.transport.SMALLEST_BYTES", 1):
            model: Any = towpath.shard(_Net(), towpath.strategy(name, topology, **options), topology=topology)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                with model.no_sync():
                    model(torch.ones(2, WIDTH)).sum().backward()
                model(torch.ones(2, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        total = sum((counts for _, counts in counted.jobs), Counter[str]())
        said = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        yield said, dict(sorted(total.items())) | {"jobs": len(counted.jobs)}


def differences(before: Figures, now: Figures) -> Iterator[str]:
    """Yield what differs: names on one side are reported too, because a strategy may have been removed."""
    for part, figures in before.items():
        for name, old in figures.items():
            new = now[part].get(name)
            if new is None:
                yield f"{part}: {name} is gone"
            elif part == "regret":
                for key in pricing.FIGURES:
                    if abs(new[key] - old[key]) > MOST_REGRET:
                        yield f"{part}: {name}: {key} was {old[key]:.4f}, is {new[key]:.4f}"
            elif new != old:
                yield f"{part}: {name}: was {old}, is {new}"


def _mean(figures: Figures, key: str) -> float:
    return statistics.fmean(each[key] for each in figures.values())


def main() -> int:
    """Print the figures, and compare or write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with written figures")
    asked = parser.parse_args()
    now: Figures = {"regret": dict(regrets()), "choices": dict(choices()), "launches": dict(launches())}
    for key in pricing.FIGURES:
        print(f"{key:24} {_mean(now['regret'], key):.4f}, the mean of {len(now['regret'])} recorded runs")
    print(f"{'launches':24} {sum(sum(each.values()) for each in now['launches'].values())}")
    if asked.write is not None:
        asked.write.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    if asked.against is None:
        return 0
    before = json.loads(asked.against.read_text(encoding="utf-8"))
    changed = sum(
        new["predicted"] != before["regret"].get(name, {}).get("predicted") for name, new in now["regret"].items()
    )
    print(f"{'changed predictions':24} in {changed} of {len(now['regret'])} runs")
    found = list(differences(before, now))
    print("\n".join(found) or "nothing differs")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
