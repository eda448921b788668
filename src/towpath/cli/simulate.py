"""`towpath explain` and `simulate`: one optimizer step of a strategy on a described cluster, without training."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from towpath.cli.plan import (
    PER_RANK,
    AsJson,
    Checkpointing,
    ClusterName,
    Length,
    Memory,
    MicroBatch,
    Nodes,
    OffloadName,
    OffloadOption,
    OptimizerOption,
    PipelineOptions,
    PrecisionName,
    PrecisionOption,
    RanksPerNode,
    heading,
    pipelines_of,
    solver_of,
)
from towpath.cli.terminal import table_of, whole
from towpath.core import presets
from towpath.core.pipeline import SCHEDULES
from towpath.core.strategy import Strategy
from towpath.errors import ConfigError
from towpath.files import check_output_file
from towpath.planner import tables
from towpath.planner.pipelines import Layout
from towpath.planner.prediction import Batching, Prediction
from towpath.planner.solver import Solver
from towpath.sim.timeline import Delay, RankVariation, expected_delay
from towpath.train.progress import progress_bar

# A trace, and ranks of different speeds, need each micro-step. Otherwise the third stands for all later ones.
_MOST_REPLAYED = 1_000

MicroSteps = Annotated[int, typer.Option(metavar="N", parser=PER_RANK, help="Micro-batches in one optimizer step.")]
StepOption = Annotated[
    int | None, typer.Option(metavar="N", parser=whole(0, 10**9), help="The optimizer step, if codecs change.")
]
TraceFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for https://ui.perfetto.dev.")]
Jitter = Annotated[
    float, typer.Option(metavar="SHARE", help="Standard deviation of the compute time, as a share of it, on all ranks.")
]
Stragglers = Annotated[
    list[str] | None,
    typer.Option(metavar="RANK:TIMES", help="A rank that computes TIMES as long. Can be repeated."),
]
ModelOption = Annotated[str, typer.Option("--model", metavar="MODEL", help="A model, as for `towpath plan`.")]


def explain(
    first: Annotated[str, typer.Argument(metavar="A", help="A preset ('mics group=4x2'), or a .toml file.")],
    model: ModelOption,
    cluster: ClusterName,
    second: Annotated[str | None, typer.Argument(metavar="B", help="A second strategy to compare with.")] = None,
    micro_batch: MicroBatch = 1,
    micro_steps: MicroSteps = 1,
    checkpointing: Checkpointing = False,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    length: Length = None,
    memory: Memory = None,
    precision: PrecisionOption = PrecisionName.BF16,
    optimizer: OptimizerOption = "adamw",
    offload: OffloadOption = None,
    step: StepOption = None,
    as_json: AsJson = False,
) -> None:
    """Explain the step time of a strategy by its transfers, or what decides between two strategies.

    Example: `towpath explain zero3 mics --model bert-10b --cluster p3dn --micro-batch 8 --micro-steps 4`

    Exit code: 0, or 2 for a mistake.
    """
    solver = solver_of(model, cluster, (nodes, ranks_per_node), length, memory, precision, optimizer, 1)
    batching = Batching(micro_batch, micro_steps, checkpointing)
    strategies = [_strategy(name, solver, offload) for name in (first, second) if name is not None]
    sides: list[Prediction] = []
    with progress_bar("Explaining") as say:
        for made in strategies:
            sides.append(solver.predict(made if step is None else made.at(step), batching))
            say(len(sides), len(strategies))
    if as_json:
        facts = {"verdict": tables.explain(sides, solver), "strategies": [tables.as_json(p, solver) for p in sides]}
        print(json.dumps(facts, indent=2))
        return
    _show_step(sides, solver, tables.explain(sides, solver))
    for made in strategies:
        if step is None and made.changes:
            steps = ", ".join(map(str, made.changes))
            print(f"{made.name}: its codecs change at step {steps}. Here all are in use; --step N shows another step.")


def simulate(
    strategy: Annotated[str, typer.Argument(metavar="STRATEGY", help="A preset ('mics group=4x2'), or a .toml file.")],
    model: ModelOption,
    cluster: ClusterName,
    micro_batch: MicroBatch = 1,
    micro_steps: MicroSteps = 1,
    checkpointing: Checkpointing = False,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    length: Length = None,
    memory: Memory = None,
    precision: PrecisionOption = PrecisionName.BF16,
    optimizer: OptimizerOption = "adamw",
    offload: OffloadOption = None,
    step: StepOption = None,
    trace: TraceFile = None,
    jitter: Jitter = 0.0,
    straggler: Stragglers = None,
    pipeline: Annotated[
        int, typer.Option(metavar="N", parser=whole(1, 100_000), help="Ranks of a pipeline. 1 is no pipeline.")
    ] = 1,
    tensor: Annotated[
        int, typer.Option(metavar="N", parser=whole(1, 10_000), help="Ranks that share each layer of a stage.")
    ] = 1,
    schedule: Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(SCHEDULES)}.")] = "1F1B",
    compression: Annotated[str, typer.Option(metavar="NAME", help="Of a pipeline: optimus-cb, …")] = "none",
    as_json: AsJson = False,
) -> None:
    """Simulate one optimizer step on a described cluster of up to thousands of ranks.

    Example: `towpath simulate zero3 --model llama-13b --cluster dgx-a100-200g --nodes 64 --jitter 0.05`

    If codecs change during the run, it shows a step before each change and one after the last. With the strategy
    "zero++ interleaved=1000", it adds the mean step of the run.

    Exit code: 0, or 2 for a mistake.
    """
    solver = solver_of(model, cluster, (nodes, ranks_per_node), length, memory, precision, optimizer, 1)
    batching = Batching(micro_batch, micro_steps, checkpointing)
    check_output_file("--trace", trace)
    if micro_steps > _MOST_REPLAYED and (trace is not None or jitter or straggler):
        raise ConfigError(
            f"--micro-steps {micro_steps}: --trace, --jitter and --straggler simulate each micro-batch. Expected at "
            f"most {_MOST_REPLAYED:,} with them."
        )
    if pipeline > 1:
        if jitter or straggler or offload:
            raise ConfigError("--jitter, --straggler and --offload need no stages: leave out --pipeline, or them.")
        PipelineOptions((pipeline,), (tensor,), (schedule,), (compression,))
        layout = Layout(pipeline, schedule, strategy, compression, tensor)
        priced, late = _simulate_pipeline(solver, model, length, layout, batching, step, trace), None
    else:
        uneven = _variation(jitter, straggler or (), solver.cluster.topology.world)
        phases = _phases(_strategy(strategy, solver, offload), step, bool(trace or jitter or straggler))
        priced, late = _simulate(solver, phases, batching, uneven, trace)
    _show_simulated(priced, _steps_of_run(strategy, step), solver, late, trace, as_json)


def _simulate(
    solver: Solver, phases: dict[int, Strategy], batching: Batching, uneven: RankVariation, trace: Path | None
) -> tuple[dict[int, Prediction], Delay | None]:
    """Simulate a step of each phase. Return also how much later the first one ends if ranks are uneven."""
    first, late = next(iter(phases.values())), None
    with progress_bar("Simulating") as say:
        if trace is not None:
            _write_trace(trace, solver, first, batching, say)
        priced = {step: solver.predict(phase, batching) for step, phase in phases.items()}
        if uneven != RankVariation():
            events = solver.timeline(first, batching, say).thread_events
            late = expected_delay(events, uneven, first.topology.world, say=say)
    return priced, late


def _phases(made: Strategy, step: int | None, one_step: bool) -> dict[int, Strategy]:
    """Return the strategies to simulate, by the first optimizer step of each.

    There is one, unless codecs change and the user named no step. Raise if `one_step` is set and there are several.
    """
    if made.outer is not None and one_step:
        raise ConfigError(
            f"strategy {made.name} has outer steps: --trace, --jitter and --straggler simulate one step, and it is "
            "simulated over a period. Leave them out."
        )
    if step is not None:
        return {step: made.at(step)}
    if not made.changes:
        return {0: made}
    steps = (0, *made.changes)
    if one_step:
        choices = " or ".join(map(str, steps))
        raise ConfigError(
            f"strategy {made.name}: --trace, --jitter and --straggler simulate one step, and the codecs change at step "
            f"{', '.join(map(str, made.changes))}. Add --step {choices}."
        )
    return {first: made.at(first) for first in steps}


def _steps_of_run(strategy: str, step: int | None) -> int | None:
    """Return the number of optimizer steps of the run, if the text of the strategy has it and no step was named."""
    found = re.search(r"\binterleaved=(\d+)", strategy) if step is None else None
    return None if found is None else int(found[1])


def _show_simulated(
    phases: dict[int, Prediction],
    steps: int | None,
    solver: Solver,
    late: Delay | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Show the simulated step, or one for each phase of a run whose codecs change, and the mean step of the run."""
    firsts, sides = list(phases), list(phases.values())
    mean = None
    if steps is not None and len(sides) > 1:
        lasts = [*firsts[1:], steps]
        mean = sum((last - first) * p.seconds for first, last, p in zip(firsts, lasts, sides, strict=True)) / steps
    if as_json:
        found = [{"first_step": first} | tables.as_json(p, solver) for first, p in phases.items()]
        facts: dict[str, Any] = {"phases": found} if len(found) > 1 else tables.as_json(sides[0], solver)
        facts |= {} if mean is None else {"mean_seconds": mean}
        print(json.dumps(facts if late is None else facts | {"late_seconds": asdict(late)}, indent=2))
        return
    found = [
        f"{tables.tokens_per_second(p, solver):,.0f} tokens/s, {tables.mfu(p, solver):.1%} of the peak." for p in sides
    ]
    if len(sides) > 1:
        found = [f"From step {first}: {text}" for first, text in zip(firsts, found, strict=True)]
        found += [] if mean is None else [f"The mean over {steps:,} steps: {tables.seconds(mean)} a step."]
    _show_step(sides, solver, "\n".join(found), [f", from step {first}" for first in firsts if len(sides) > 1])
    if late is not None:
        usual, most = (tables.seconds(sides[0].seconds + more) for more in (late.mean, late.most))
        print(f"With ranks of different speeds: {usual} a step on average, {most} at most.")
    if trace is not None:
        print(f"The step, for https://ui.perfetto.dev: {trace}")


def _show_step(sides: Sequence[Prediction], solver: Solver, conclusion: str, steps: Sequence[str] = ()) -> None:
    """Print the step of each strategy, side by side. `steps` are added to the titles."""
    console = Console(width=100, highlight=False)
    console.print(heading(solver))
    titles = [tables.title(p) + step for p, step in zip(sides, steps or [""] * len(sides), strict=True)]
    table = table_of("one optimizer step", *titles, numbers=1)
    table.add_row("P, G, OS", *(tables.extents(p.strategy) for p in sides))
    for cells in tables.compare(sides, solver):
        table.add_row(*cells)
    console.print(table)
    for line in tables.exact_bits(sides, solver):
        console.print(line)
    console.print(conclusion)


def _variation(jitter: float, straggler: Sequence[str], world: int) -> RankVariation:
    """Return the variation that --jitter and --straggler describe. `straggler` has texts such as 3:1.5."""
    stragglers: dict[int, float] = {}
    for text in straggler:
        rank, _, times = text.partition(":")
        try:
            stragglers[int(rank)] = float(times)
        except ValueError:
            raise ConfigError(f"--straggler {text}: expected RANK:TIMES, such as 3:1.5.") from None
    variation = RankVariation(jitter, stragglers)
    variation.check(world)
    return variation


def _strategy(name: str, solver: Solver, offload: OffloadName | None) -> Strategy:
    """Return the strategy that a preset's name or a file describes, with all of its codecs in use."""
    if not name.endswith(".toml"):
        return presets.parse_strategy(name, solver.cluster.topology, offload.value if offload else None)
    try:
        made = Strategy.from_toml(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"strategy: cannot read {name}: {reason}. Check the path, or name a preset.") from None
    if made.job != solver.cluster.topology:
        raise ConfigError(
            f"strategy {name} is for {made.job} ranks, and the cluster has {solver.cluster.topology}. Pass "
            "--nodes and --ranks-per-node, or plan anew."
        )
    return made if offload is None else replace(made, offload=offload)


def _write_trace(
    path: Path, solver: Solver, strategy: Strategy, batching: Batching, say: Callable[[int, int], None]
) -> None:
    from towpath.tracing import simulated_intervals, write_intervals  # imports torch

    intervals = simulated_intervals(solver.timeline(strategy, batching, say).events)
    write_intervals(path, {0: intervals}, {0: f"every rank of {solver.cluster.name}, simulated"})


def _simulate_pipeline(
    solver: Solver,
    name: str,
    length: int | None,
    layout: Layout,
    batching: Batching,
    step: int | None,
    trace: Path | None,
) -> dict[int, Prediction]:
    """Simulate a step of a pipeline in each phase of its codecs. The trace shows one replica of each of its ranks."""
    pipelines = pipelines_of(solver, name, length, (layout.schedule,))
    pipelines.check(layout, batching)
    phases = _phases(pipelines.strategy(layout), step, trace is not None)
    layouts = {first: replace(layout, strategy=phase) for first, phase in phases.items()}
    if trace is not None:
        from towpath.tracing import simulated_intervals, write_intervals  # imports torch

        timeline = pipelines.replay(next(iter(layouts.values())), batching)
        ranks = {rank: simulated_intervals(each.events) for rank, each in enumerate(timeline.ranks)}
        write_intervals(trace, ranks, {rank: f"rank {rank} of {layout}, simulated" for rank in ranks})
    return {first: pipelines.predict(each, batching) for first, each in layouts.items()}
