"""Compare two ways of pricing plans on the raw runs of the suite `planner`: `python -m benchmarks.pricing`.

Every run keeps the profile of its cluster and the measured steps of all strategies. Each strategy is predicted twice:
with the collectives that the profile has, and by messages alone. The last run of each case counts. Results go to
`results/planner-pricing.json`.

Runs of earlier commits were not priced when they were measured. Their profiles have all-gathers and reduce-scatters
only, over all ranks, in nodes and across nodes. Their times of units were not kept: the measured seconds of computation
are divided among the units by their FLOPs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import towpath
from benchmarks.harness import results
from benchmarks.harness.figures import medians
from benchmarks.peers import CandidateSpec
from benchmarks.suites.planner import CHOSEN, CHOSEN_BY_MESSAGES, LOSSY, Plan
from benchmarks.workload import Workload
from towpath.core.routes import Grid
from towpath.core.strategy import Strategy
from towpath.plan.hardware import GroupMesh
from towpath.plan.live import describe_module
from towpath.plan.model import LinearSeconds, MeasuredPasses, Model, ModelUnit
from towpath.plan.profile import Profile, collective_name

FILE = results.FOLDER / "planner-pricing.json"
_WITH_CODECS = (*LOSSY, CHOSEN[1], CHOSEN_BY_MESSAGES[1])
FIGURES = ("mean error", "regret, lossless", "regret, with codecs")


def compared(line: results.Line) -> dict[str, Any]:
    """Return both predictions of a run, and their figures."""
    by_messages = line.get("by_messages")
    if by_messages is not None:
        both = line["predicted_seconds"], by_messages["predicted_seconds"]
    else:
        both = tuple(predicted(line, measured) for measured in (True, False))
    steps = medians(line["measured_seconds"])
    return {
        "case": line["case"]["name"],
        "commit": results.measured_at(line),
        "priced": "when it was measured" if by_messages is not None else "afterwards",
        "with measured collectives": judged(both[0], steps),
        "by messages": judged(both[1], steps),
    }


def judged(seconds: Mapping[str, float], steps: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a prediction. The regret is that of the strategy which it ranks first among all measured.

    The planner's own choices are among them.
    """
    lossless = [name for name in steps if name not in _WITH_CODECS]

    def order(name: str) -> tuple[float, bool]:
        return round(seconds[name], 9), name not in (*CHOSEN, *CHOSEN_BY_MESSAGES)  # of equals, the planner's own

    def regret(names: Iterable[str]) -> float:
        names = list(names)
        return steps[min(names, key=order)] / min(steps[name] for name in names) - 1

    error = statistics.fmean(abs(seconds[name] / step - 1) for name, step in steps.items())
    return dict(zip(FIGURES, (error, regret(lossless), regret(steps)), strict=True))


def predicted(line: results.Line, measured_collectives: bool) -> dict[str, float]:
    """Return the step that today's planner predicts for each strategy of a recorded run."""
    case: dict[str, Any] = dict(line["case"]["workload"])
    workload = Workload(towpath.Topology(**case.pop("topology")), **case)
    profile = _renamed(Profile.from_json(line["profile"]))
    chosen = {name: Strategy.from_toml(text) for name, text in line["chosen"].items()}
    named = [name for name in line["measured_seconds"] if name not in chosen]
    strategies = {name: CandidateSpec.parse(name).strategy(workload.topology) for name in named} | chosen
    model = _model(workload, line["computing_seconds"] / workload.micro_steps)
    plan = Plan(profile, model, workload, measured_collectives)
    return {name: plan.seconds(strategy) for name, strategy in strategies.items()}


def _renamed(profile: Profile) -> Profile:
    """Return a profile with the names that collectives have today."""
    nodes, width = profile.topology.nodes, profile.topology.ranks_per_node
    meshes = {"all ranks": Grid(nodes, width), "in nodes": Grid(1, width), "across nodes": Grid(nodes, 1)}
    points = list(profile.points)
    for index, point in enumerate(points):
        op, _, rest = point.what.partition(" by ")
        route, _, mesh = rest.partition(", ")
        if mesh in meshes:
            points[index] = replace(point, what=collective_name(op, GroupMesh(meshes[mesh]), route))
    return replace(profile, points=tuple(points))


def _model(workload: Workload, seconds: float) -> Model:
    """Return the model of a workload, with `seconds` of computation in a micro-step divided among its units."""
    tokens = workload.batch * workload.length
    module = replace(workload, wait_seconds=None).model()
    # At the commits that kept no model, each block was a unit of its own.
    model = describe_module(module, next(workload.data(0)), tokens, units=[*module.blocks])
    waiting = 3 * (workload.wait_seconds or 0.0)
    left = max(0.0, seconds - waiting * workload.depth)
    computing = sum(unit.flops for unit in model.units if not waiting or unit.spec.root)

    def measured(unit: ModelUnit) -> ModelUnit:
        waits = bool(waiting) and not unit.spec.root
        took = waiting if waits else left * unit.flops / computing
        forward, backward = (LinearSeconds(0.0, part * took / tokens) for part in (1 / 3, 2 / 3))
        return replace(unit, measured=MeasuredPasses(forward, backward, 0.0 if waits else 1.0))

    return replace(model, units=tuple(map(measured, model.units)))


def table() -> str:
    """Return the committed comparison as a table in Markdown."""
    found: Sequence[Mapping[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    heads = ("case", *(head for what in FIGURES for head in (what, "by messages")), "commit")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    # Cases with exact transports have none with codecs, and a mean of their own.
    for exact in (False, True):
        rows: list[list[float]] = []
        for case in found:
            if case["case"].endswith("exact") == exact:
                ways = case["with measured collectives"], case["by messages"]
                rows.append([way[what] for what in FIGURES for way in ways])
                lines.append(f"| {case['case']} | {_shares(rows[-1])} | {case['commit']} |")
        if rows:
            means = [statistics.fmean(column) for column in zip(*rows, strict=True)]
            lines.append(f"| mean of {len(rows)}{', exact' if exact else ''} | {_shares(means)} | |")
    return "\n".join(lines)


def _shares(values: Iterable[float]) -> str:
    return " | ".join(f"{value:.1%}" for value in values)


def main() -> None:
    """Compare the last run of each case, write the results, and print the table."""
    lines = results.last(line for line in results.read(results.file_of("planner")) if "timelines" in line)
    FILE.write_text(json.dumps([compared(line) for line in lines.values()], indent=1) + "\n", encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main()
