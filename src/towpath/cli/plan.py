"""`towpath plan`, `explain` and `simulate`: which strategy for a model on a cluster, and why, without training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from towpath.cli.plan_pipelines import Asked, simulated, with_pipelines
from towpath.cli.plan_pipelines import settings as of_stages
from towpath.cli.ranges import above_zero, whole
from towpath.core import presets
from towpath.core.formats import Precision
from towpath.core.pipeline import SCHEDULES
from towpath.core.strategy import Strategy
from towpath.errors import ConfigError, PlanError
from towpath.files import check_output_file
from towpath.planner import clusters, tables
from towpath.planner import model as models
from towpath.planner.cluster import GIB
from towpath.planner.pipelines import Layout, PricedPipeline
from towpath.planner.request import BF16, OPTIMIZERS, Optimizer, Request, codecs_for_both
from towpath.planner.solver import MOST, Batching, Infeasible, Priced, Ranking, Solver
from towpath.sim.lateness import Late, Uneven, lateness
from towpath.train.observe.bar import progress_bar

_IN_REPORT = 40  # strategies of which a report shows time against memory


class Dtype(StrEnum):
    BF16 = "bf16"
    FP32 = "fp32"


class Offload(StrEnum):
    OPTIMIZER = "optimizer"


_PER_RANK = whole(1, 1_000_000)
# A trace, and ranks that are not alike, take every micro-step of a step; all others are taken to be like the third.
_MOST_REPLAYED = 1_000
_PRECISIONS = {Dtype.BF16: BF16, Dtype.FP32: Precision()}

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A name (llama-3.1-8b, qwen3-8b, gpt-8.3b, …), a config.json or its folder, a .toml."
    ),
]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="A shipped one (p4d, ethernet-10g, …), a .toml file, or what `towpath probe` wrote.",
    ),
]
Nodes = Annotated[
    int | None, typer.Option(parser=whole(1, 100_000), help="So many nodes, in place of what the cluster says.")
]
Length = Annotated[int | None, typer.Option(parser=whole(1, 10_000_000), help="Tokens of a sequence.")]
Memory = Annotated[
    float | None, typer.Option(parser=above_zero(1e6), help="GiB that a rank may hold, in place of the cluster's.")
]
Dtypes = Annotated[Dtype, typer.Option(help="What computes and travels; masters are fp32.")]
OptimizerName = Annotated[str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.")]
MicroBatch = Annotated[int, typer.Option(parser=_PER_RANK, help="Sequences that a rank computes at once.")]
MicroSteps = Annotated[int, typer.Option(parser=_PER_RANK, help="Micro-steps of one optimizer step.")]
OffloadOf = Annotated[Offload | None, typer.Option(help="What lies in the host's memory: what the optimizer works on.")]
Checkpointing = Annotated[bool, typer.Option("--checkpointing", help="Recompute blocks in the backward pass.")]
Batch = Annotated[
    int, typer.Option(parser=whole(1, 1_000_000_000), help="Sequences of one optimizer step, over all ranks.")
]
MicroBatches = Annotated[
    list[int] | None, typer.Option(parser=_PER_RANK, help="May be given several times; else all that fit are tried.")
]
EitherCheckpointing = Annotated[
    bool | None, typer.Option("--checkpointing/--no-checkpointing", help="Else both are tried.")
]
Codecs = Annotated[str, typer.Option(metavar="CODECS", help="Such as int8,int4 (gradients only); else lossless.")]
Top = Annotated[int, typer.Option(parser=whole(1, 10_000), help="How many to show.")]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="The first one, as the TOML that `towpath train` takes.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]
PipelineSizes = Annotated[
    list[int] | None,
    typer.Option(
        "--pipeline", parser=whole(2, 100_000), help="Ranks with stages of their own; may be given several times."
    ),
]
TensorSizes = Annotated[
    list[int] | None,
    typer.Option("--tensor", parser=whole(1, 10_000), help="Ranks that share each layer of a stage; likewise."),
]
Schedules = Annotated[
    list[str] | None, typer.Option("--schedule", help=f"Of {', '.join(SCHEDULES)}; likewise. Default: 1F1B.")
]
Compressions = Annotated[
    list[str] | None, typer.Option("--compression", help="Of pipelines: optimus-cb, …; likewise. Default: none.")
]


def plan(
    model: ModelName,
    cluster: ClusterName,
    batch: Batch,
    nodes: Nodes = None,
    length: Length = None,
    memory: Memory = None,
    precision: Dtypes = Dtype.BF16,
    optimizer: OptimizerName = "adamw",
    offload: OffloadOf = None,
    micro_batch: MicroBatches = None,
    checkpointing: EitherCheckpointing = None,
    allow: Codecs = "",
    pipeline: PipelineSizes = None,
    tensor: TensorSizes = None,
    schedule: Schedules = None,
    compression: Compressions = None,
    top: Top = 10,
    output: Output = None,
    report: Annotated[Path | None, typer.Option(help="Write a page of plots there: which strategy when.")] = None,
    as_json: AsJson = False,
) -> None:
    """Rank every strategy for a model on a cluster: step time, memory, bytes.

    Example: `towpath plan llama-7b --cluster ethernet-25g --batch 64 --pipeline 4`

    Considers every placement of parameters, gradients and optimizer states, every route, codecs where you allow them,
    micro-batches, activation checkpointing. Needs no torch, no GPU, and no cluster. Exit code 1: nothing fits.
    """
    check_output_file("--output", output)
    check_output_file("--report", report)
    stages = Asked(pipeline or (), tensor or (), schedule or (), compression or ())
    if stages.pipelines and report is not None:
        raise ConfigError("--report draws what is planned without stages: leave out --pipeline, or --report.")
    solver = _solver(model, cluster, nodes, length, memory, precision, optimizer, batch)
    weights, gradients = codecs_for_both(name.strip() for name in allow.split(",") if name.strip())
    asked = replace(solver.request, weights=weights, gradients=gradients, checkpointing=checkpointing, offload=offload)
    if stages.pipelines and offload is not None:
        raise ConfigError("--offload is planned without stages: leave out --pipeline, or --offload.")
    solver = Solver(solver.model, solver.cluster, replace(asked, micro_batches=tuple(micro_batch or ())))
    began = time.monotonic()
    with progress_bar("Planning") as say:
        found = solver.solve(best=top if report is None else max(top, _IN_REPORT), most=max(top, MOST), say=say)
    if stages.pipelines:
        found = with_pipelines(found, solver, model, length, stages, top)
    if isinstance(found, Infeasible):
        raise PlanError(_what_would_fit(found, solver, [] if stages.pipelines else ["stages (--pipeline 4)"]))
    if report is not None:
        from towpath.cli.plan_report import write_plan_report  # with what draws: nobody else waits for it

        with progress_bar("Drawing") as say:
            write_plan_report(report, found, solver, _heading(solver), say)
        found = replace(found, ranked=found.ranked[:top])
    if output is not None:
        output.write_text(found.ranked[0].strategy.to_toml(), encoding="utf-8")
    if as_json:
        print(json.dumps(_found_as_json(found, solver), indent=2))
        return
    _show(found, solver, time.monotonic() - began, output, report)


def _show(found: Ranking, solver: Solver, took_seconds: float, output: Path | None, report: Path | None) -> None:
    console = Console(width=100, highlight=False)
    console.print(_heading(solver))
    table = Table(*tables.HEADINGS, box=None, pad_edge=False)
    for column in table.columns[3:]:
        column.justify = "right"
    for number, priced in enumerate(found.ranked, 1):
        table.add_row(*tables.row(number, priced, solver))
    console.print(table)
    rest = "no other can be quicker" if found.proven else "among the others one might be quicker, by a little"
    room = f"{solver.request.memory / GIB:.1f} GiB"
    console.print(
        f"{found.considered:,} were considered, {found.fitting:,} may fit into {room} a rank, "
        f"{found.replayed} were replayed, the most promising first; {rest}. {took_seconds:.1f} s.",
        style="dim",
    )
    if output is not None:
        batching = found.ranked[0].batching
        settings = [f"strategy.name={output}", f"train.micro_batch={batching.micro_batch}"]
        settings += [f"train.checkpointing={str(batching.checkpointing).lower()}"]
        first = found.ranked[0]
        settings += of_stages(first) if isinstance(first, PricedPipeline) else []
        console.print(f"The first, for training: towpath train CONFIG.toml {' '.join(settings)}", soft_wrap=True)
    if report is not None:
        print(f"Plots: {report}")


def explain(
    first: Annotated[str, typer.Argument(metavar="A", help="A strategy: a preset, or a .toml file of `towpath plan`.")],
    model: Annotated[str, typer.Option(metavar="MODEL", help="As for `towpath plan`.")],
    cluster: ClusterName,
    second: Annotated[
        str | None, typer.Argument(metavar="[B]", help="Another, to compare with. Default: A is explained alone.")
    ] = None,
    micro_batch: MicroBatch = 1,
    micro_steps: MicroSteps = 1,
    checkpointing: Checkpointing = False,
    nodes: Nodes = None,
    length: Length = None,
    memory: Memory = None,
    precision: Dtypes = Dtype.BF16,
    optimizer: OptimizerName = "adamw",
    offload: OffloadOf = None,
    as_json: AsJson = False,
) -> None:
    """Say where the time of one or two strategies goes, transfer by transfer, and what decides between two.

    Example: `towpath explain zero3 mics --model bert-10b --cluster p3dn --micro-batch 8 --micro-steps 4`
    """
    solver = _solver(model, cluster, nodes, length, memory, precision, optimizer, 1)
    batching = Batching(micro_batch, micro_steps, checkpointing)
    names = [first] if second is None else [first, second]
    sides: list[Priced] = []
    with progress_bar("Explaining") as say:
        for name in names:
            sides.append(solver.price(_strategy(name, solver, offload), batching))
            say(len(sides), len(names))
    if as_json:
        told = {"verdict": tables.verdict(sides, solver), "strategies": [tables.as_json(p, solver) for p in sides]}
        print(json.dumps(told, indent=2))
        return
    _show_step(sides, solver, tables.verdict(sides, solver))


def simulate(
    strategy: Annotated[str, typer.Argument(metavar="STRATEGY", help="A preset, or a .toml file of `towpath plan`.")],
    model: Annotated[str, typer.Option(metavar="MODEL", help="As for `towpath plan`.")],
    cluster: ClusterName,
    micro_batch: MicroBatch = 1,
    micro_steps: MicroSteps = 1,
    checkpointing: Checkpointing = False,
    nodes: Nodes = None,
    length: Length = None,
    memory: Memory = None,
    precision: Dtypes = Dtype.BF16,
    optimizer: OptimizerName = "adamw",
    offload: OffloadOf = None,
    trace: Annotated[Path | None, typer.Option(help="Write the step there, for https://ui.perfetto.dev.")] = None,
    jitter: Annotated[
        float, typer.Option(metavar="SHARE", help="Standard deviation of what each pass takes, on every rank.")
    ] = 0.0,
    straggler: Annotated[
        list[str] | None, typer.Option(metavar="RANK:TIMES", help="A rank that computes so many times as long.")
    ] = None,
    pipeline: Annotated[
        int, typer.Option(parser=whole(1, 100_000), help="Ranks with stages of their own; 1: no stages.")
    ] = 1,
    tensor: Annotated[int, typer.Option(parser=whole(1, 10_000), help="Ranks that share each layer of a stage.")] = 1,
    schedule: Annotated[str, typer.Option(help=f"Of {', '.join(SCHEDULES)}.")] = "1F1B",
    compression: Annotated[str, typer.Option(help="Of a pipeline: optimus-cb, …")] = "none",
    as_json: AsJson = False,
) -> None:
    """Replay one optimizer step on a described cluster, of up to thousands of ranks.

    Example: `towpath simulate zero3 --model llama-13b --cluster dgx-a100-200g --nodes 64 --jitter 0.05`
    """
    solver = _solver(model, cluster, nodes, length, memory, precision, optimizer, 1)
    batching = Batching(micro_batch, micro_steps, checkpointing)
    check_output_file("--trace", trace)
    if micro_steps > _MOST_REPLAYED and (trace is not None or jitter or straggler):
        raise ConfigError(
            f"--micro-steps {micro_steps}: --trace, --jitter and --straggler replay every micro-step. Expected at most "
            f"{_MOST_REPLAYED:,} with them."
        )
    if pipeline > 1:
        if jitter or straggler or offload:
            raise ConfigError("--jitter, --straggler and --offload are for steps without stages: leave out --pipeline.")
        Asked((pipeline,), (tensor,), (schedule,), (compression,))
        layout = Layout(pipeline, schedule, strategy, compression, tensor)
        _show_simulated(simulated(solver, model, length, layout, batching, trace), solver, None, trace, as_json)
        return
    made = _strategy(strategy, solver, offload)
    uneven = Uneven(jitter, dict(_straggler(text) for text in straggler or ()))
    uneven.check(made.topology.world)
    late = None
    with progress_bar("Simulating") as say:
        if trace is not None:
            _write_trace(trace, solver, made, batching, say)
        priced = solver.price(made, batching)
        if uneven != Uneven():
            moments = solver.timeline(made, batching, say).moments
            late = lateness(moments, uneven, made.topology.world, say=say)
    _show_simulated(priced, solver, late, trace, as_json)


def _show_simulated(priced: Priced, solver: Solver, late: Late | None, trace: Path | None, as_json: bool) -> None:
    if as_json:
        found = tables.as_json(priced, solver)
        print(json.dumps(found if late is None else found | {"late_seconds": asdict(late)}, indent=2))
        return
    speed, share = tables.tokens_per_second(priced, solver), tables.mfu(priced, solver)
    _show_step([priced], solver, f"{speed:,.0f} tokens/s, {share:.1%} of the peak.")
    if late is not None:
        mean, most = (tables.seconds(priced.seconds + more) for more in (late.mean, late.most))
        print(f"With ranks that are not alike: {mean} a step on average, {most} at most.")
    if trace is not None:
        print(f"The step, for https://ui.perfetto.dev: {trace}")


def _straggler(text: str) -> tuple[int, float]:
    rank, _, times = text.partition(":")
    try:
        return int(rank), float(times)
    except ValueError:
        raise ConfigError(f"--straggler {text}: expected RANK:TIMES, such as 3:1.5.") from None


def _show_step(sides: Sequence[Priced], solver: Solver, conclusion: str) -> None:
    """One strategy's step, or those of several side by side."""
    console = Console(width=100, highlight=False)
    console.print(_heading(solver))
    table = Table("one optimizer step", *(tables.title(p) for p in sides), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("P, G, OS", *(tables.extents(p.strategy) for p in sides))
    for cells in tables.comparison(sides, solver):
        table.add_row(*cells)
    console.print(table)
    console.print(conclusion)


def _solver(
    model: str,
    cluster: str,
    nodes: int | None,
    length: int | None,
    memory: float | None,
    precision: Dtype,
    optimizer: str,
    batch: int,
) -> Solver:
    found = clusters.load(cluster, nodes)
    limit = found.memory if memory is None else max(1, int(memory * GIB))
    asked = Request(batch, limit, _PRECISIONS[precision], optimizer=Optimizer.named(optimizer))
    return Solver(models.describe(model, length), found, asked)


def _strategy(name: str, solver: Solver, offload: Offload | None) -> Strategy:
    if not name.endswith(".toml"):
        return presets.strategy(name, solver.cluster.topology, offload=offload.value if offload else None)
    try:
        made = Strategy.from_toml(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"strategy: cannot read {name}: {error}.") from None
    if made.topology != solver.cluster.topology:
        raise ConfigError(
            f"strategy {name} is for {made.topology} ranks, and the cluster has {solver.cluster.topology}. Pass "
            "--nodes, or plan anew."
        )
    return made if offload is None else replace(made, offload=offload)


def _heading(solver: Solver) -> str:
    model, found, topology = solver.model, solver.cluster, solver.cluster.topology
    links = found.hardware
    return (
        f"{model.name}: {model.parameters / 1e9:.3g} billion parameters, sequences of {model.length:,} tokens\n"
        f"{found.name}: {topology.nodes} nodes × {topology.ranks_per_node} ranks, "
        f"{links.inter.rate * 8 / 1e9:.3g} Gbit/s a node"
    )


def _what_would_fit(found: Infeasible, solver: Solver, besides: Sequence[str]) -> str:
    memory = found.nearest.memory
    part = max(memory, key=lambda name: memory[name])
    needed = found.nearest.peak_bytes / GIB
    hints = []
    if part == "activations":
        hints.append("a smaller micro-batch, or --checkpointing")
    more = -(-found.nearest.peak_bytes // solver.request.memory) * solver.cluster.topology.nodes
    hints += [f"more nodes (about --nodes {more})", *besides]
    return (
        f"nothing fits into {solver.request.memory / GIB:.1f} GiB a rank: what comes nearest is "
        f"{tables.extents(found.nearest.strategy)} (P, G, OS) with {needed:.1f} GiB, {found.missing_bytes / GIB:.1f} "
        f"too many, most of it {part} ({memory[part] / GIB:.1f} GiB). What would help: {', or '.join(hints)}."
    )


def _found_as_json(found: Ranking, solver: Solver) -> dict[str, Any]:
    return {
        "model": solver.model.name,
        "parameters": solver.model.parameters,
        "cluster": solver.cluster.name,
        "nodes": solver.cluster.topology.nodes,
        "ranks_per_node": solver.cluster.topology.ranks_per_node,
        "considered": found.considered,
        "fitting": found.fitting,
        "replayed": found.replayed,
        "proven": found.proven,
        "plans": [tables.as_json(priced, solver) for priced in found.ranked],
    }


def _write_trace(
    path: Path, solver: Solver, strategy: Strategy, batching: Batching, say: Callable[[int, int], None]
) -> None:
    from towpath.train.observe import perfetto
    from towpath.train.observe.simulated import intervals_of  # with the engine's trace, and so with torch

    intervals = intervals_of(solver.timeline(strategy, batching, say).events)
    perfetto.write(path, {0: intervals}, {0: f"every rank of {solver.cluster.name}, simulated"})
