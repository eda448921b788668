"""`towpath plan`: find the fastest strategy for a model on a cluster, without training."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from towpath.cli.terminal import above_zero, check_picture_file, table_of, whole
from towpath.core.formats import Precision
from towpath.core.pipeline import COMPRESSIONS, SCHEDULES, plain_walk
from towpath.errors import ConfigError, PlanError
from towpath.files import check_output_file, write_output_file
from towpath.planner import tables
from towpath.planner.catalog import describe_model, load_cluster, load_exact_shares, model_shape
from towpath.planner.cluster import GIB
from towpath.planner.islands import OuterPlanner, RateRow, by_rate, crossing
from towpath.planner.pipelines import Layout, PipelinePrediction, Pipelines
from towpath.planner.prediction import Infeasible, Ranking
from towpath.planner.request import BF16, OPTIMIZERS, OUTER, Optimizer, Request, codecs_for_both
from towpath.planner.solver import MOST, Solver
from towpath.train.progress import progress_bar

# The number of strategies whose time and memory a report shows.
_IN_REPORT = 40


class PrecisionName(StrEnum):
    """The values of --precision."""

    BF16 = "bf16"
    FP32 = "fp32"


class ExactName(StrEnum):
    """The values of --exact."""

    ON = "on"
    OFF = "off"
    AUTO = "auto"


class OffloadName(StrEnum):
    """The values of --offload."""

    OPTIMIZER = "optimizer"
    PARAMS = "params"
    BOTH = "optimizer+params"


PER_RANK = whole(1, 1_000_000)
_PRECISIONS = {PrecisionName.BF16: BF16, PrecisionName.FP32: Precision()}
# PyTorch plans the schedules with several stages on a rank.
_SCHEDULES_WITHOUT_TORCH = ("GPipe", "1F1B")


def _period(text: str) -> int:
    """Parse a number of steps between exchanges of islands. "auto", which leaves it to the planner, becomes 0."""
    return 0 if text == "auto" else whole(2, 100_000)(text)


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name (llama-3.1-8b, qwen3-8b, gpt-8.3b, …), a config.json or its folder, or a .toml file.",
    ),
]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="A shipped cluster (p4d, ethernet-10g, …), a .toml file, or a profile of `towpath probe`.",
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        metavar="N", parser=whole(1, 100_000), help="The number of nodes.", show_default="as in the cluster's file"
    ),
]
RanksPerNode = Annotated[
    int | None,
    typer.Option(
        metavar="N", parser=whole(1, 100_000), help="The ranks of each node.", show_default="as in the cluster's file"
    ),
]
Length = Annotated[
    int | None,
    typer.Option(
        metavar="N", parser=whole(1, 10_000_000), help="Tokens in a sequence.", show_default="as in the model's file"
    ),
]
Memory = Annotated[
    float | None,
    typer.Option(
        metavar="GIB", parser=above_zero(1e6), help="GiB that a rank may use.", show_default="as in the cluster's file"
    ),
]
PrecisionOption = Annotated[
    PrecisionName,
    typer.Option(metavar="bf16|fp32", help="The dtype of computation and transfers. Masters are fp32."),
]
OptimizerOption = Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(OPTIMIZERS)}.")]
MicroBatch = Annotated[
    int, typer.Option(metavar="N", parser=PER_RANK, help="Sequences that a rank computes at the same time.")
]
OffloadOption = Annotated[
    OffloadName | None,
    typer.Option(
        metavar="optimizer|params|optimizer+params",
        help="Keep in host memory: the optimizer's masters and states, or the shards of the weights, or both.",
        show_default="nothing",
    ),
]
ExactOption = Annotated[
    ExactName,
    typer.Option(
        metavar="on|off|auto",
        help="Send new weights, and over gloo gradients, in fewer bytes but the same bits. auto: where it is faster.",
    ),
]
ExactFrom = Annotated[
    str,
    typer.Option(
        metavar="RUN",
        help="A run's folder. Exact messages take what they took there, instead of what is expected on paper.",
        show_default="on paper",
    ),
]
Checkpointing = Annotated[bool, typer.Option("--checkpointing", help="Recompute blocks in the backward pass.")]
Batch = Annotated[
    int,
    typer.Option(metavar="N", parser=whole(1, 1_000_000_000), help="Sequences in one optimizer step, over all ranks."),
]
MicroBatches = Annotated[
    list[int] | None,
    typer.Option(
        metavar="N",
        parser=PER_RANK,
        help="Sequences that a rank computes at the same time. Can be repeated.",
        show_default="all that fit",
    ),
]
EitherCheckpointing = Annotated[
    bool | None,
    typer.Option(
        "--checkpointing/--no-checkpointing", help="Recompute blocks in the backward pass.", show_default="try both"
    ),
]
Codecs = Annotated[
    str, typer.Option(metavar="CODECS", help="Codecs to try, such as int8,int4.", show_default="lossless only")
]
Interleaved = Annotated[
    int | None,
    typer.Option(metavar="STEPS", parser=whole(2, 10**9), help="Compress gradients in the first half of these steps."),
]
Outers = Annotated[
    list[int] | None,
    typer.Option(
        "--outer",
        metavar="EVERY",
        parser=_period,
        help="Islands of nodes synchronize only every so many steps, or auto. Can be repeated.",
        show_default="in every step",
    ),
]
Top = Annotated[int, typer.Option(metavar="N", parser=whole(1, 10_000), help="How many strategies to show.")]
OutputFile = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Write the first strategy as TOML for `towpath train`."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PipelineSizes = Annotated[
    list[int] | None,
    typer.Option(
        "--pipeline",
        metavar="N",
        parser=whole(2, 100_000),
        help="Ranks of a pipeline. Can be repeated.",
        show_default="no pipeline",
    ),
]
TensorSizes = Annotated[
    list[int] | None,
    typer.Option(
        "--tensor",
        metavar="N",
        parser=whole(1, 10_000),
        help="Ranks that share each layer of a stage. Can be repeated.",
        show_default="1",
    ),
]
Schedules = Annotated[
    list[str] | None,
    typer.Option("--schedule", metavar="NAME", help=f"{', '.join(SCHEDULES)}. Can be repeated.", show_default="1F1B"),
]
Compressions = Annotated[
    list[str] | None,
    typer.Option("--compression", metavar="NAME", help="Of a pipeline: optimus-cb, … Can be repeated."),
]
ReportFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write an HTML page of plots: which strategy when.")
]


def plan(
    model: ModelName,
    cluster: ClusterName,
    batch: Batch,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    length: Length = None,
    memory: Memory = None,
    precision: PrecisionOption = PrecisionName.BF16,
    optimizer: OptimizerOption = "adamw",
    offload: OffloadOption = None,
    micro_batch: MicroBatches = None,
    checkpointing: EitherCheckpointing = None,
    allow: Codecs = "",
    exact: ExactOption = ExactName.AUTO,
    exact_from: ExactFrom = "",
    interleaved: Interleaved = None,
    pipeline: PipelineSizes = None,
    tensor: TensorSizes = None,
    schedule: Schedules = None,
    compression: Compressions = None,
    outer: Outers = None,
    top: Top = 10,
    output: OutputFile = None,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Rank all strategies for a model on a cluster by their step time, with memory and bytes.

    Example: `towpath plan llama-7b --cluster ethernet-25g --batch 64 --pipeline 4`

    It simulates all placements of parameters, gradients and optimizer states, routes, micro-batches, activation
    checkpointing, exact transports, and the codecs that you allow. With `--outer`, it also shows at which link rates
    outer steps pay. It needs neither PyTorch, nor a GPU, nor the cluster.

    Exit code: 0, or 1 if nothing fits in memory, or 2 for a mistake.
    """
    check_output_file("--output", output)
    check_picture_file("--report", report)
    stages = PipelineOptions(pipeline or (), tensor or (), schedule or (), compression or ())
    if stages.pipelines and report is not None:
        raise ConfigError("--report draws strategies without pipelines only: leave out --pipeline, or --report.")
    solver = solver_of(model, cluster, (nodes, ranks_per_node), length, memory, precision, optimizer, batch)
    request = replace(solver.request, checkpointing=checkpointing, offload=offload, **_codecs(allow, interleaved))
    request = replace(request, exact=None if exact is ExactName.AUTO else exact is ExactName.ON)
    if exact_from:
        request = replace(request, exact_shares=load_exact_shares(exact_from))
    if outer and 0 in outer and any(outer):
        raise ConfigError("--outer auto chooses the number of steps: leave out the other --outer.")
    if stages.pipelines and outer:
        raise ConfigError("--outer is planned without pipelines only: leave out --pipeline, or --outer.")
    if stages.pipelines and offload is not None:
        raise ConfigError("--offload is planned without pipelines only: leave out --pipeline, or --offload.")
    solver = Solver(solver.model, solver.cluster, replace(request, micro_batches=tuple(micro_batch or ())))
    began = time.monotonic()
    found = _ranking(solver, model, length, stages, top, top if report is None else max(top, _IN_REPORT))
    rates: list[RateRow] = []
    if outer:
        periods = [each for each in outer if each]
        found = _with_outer(found, solver, periods)
        with progress_bar("Link rates") as say:
            rates = by_rate(solver, periods, say)
    if report is not None:
        _write_report(report, found, solver, rates)
    found = replace(found, ranked=found.ranked[:top])
    write_output_file("--output", output, found.ranked[0].strategy.to_toml())
    if as_json:
        print(json.dumps(_facts(found, solver) | _facts_by_rate(rates), indent=2))
        return
    _show(found, solver, time.monotonic() - began, output, report)
    _show_rates(rates, solver)


def _codecs(allow: str, interleaved: int | None) -> dict[str, Any]:
    """Return the fields of a request that --allow and --interleaved describe."""
    if OUTER in allow.split(","):
        raise ConfigError("--allow outer: plan outer steps with --outer auto.")
    weights, gradients = codecs_for_both(name.strip() for name in allow.split(",") if name.strip())
    if interleaved and set(gradients) <= {"none"}:
        raise ConfigError("--interleaved needs codecs of gradients: add --allow int8,int4, or leave it out.")
    return {"weights": weights, "gradients": gradients, "interleaved": interleaved or 0}


def _ranking(
    solver: Solver, name: str, length: int | None, stages: PipelineOptions, top: int, without_stages: int
) -> Ranking:
    """Return the best strategies: `top` of them with pipelines, else `without_stages`. Raise if nothing fits."""
    with progress_bar("Planning") as say:
        found = solver.solve(best=without_stages, most=max(top, MOST), say=say)
    if stages.pipelines:
        found = _with_pipelines(found, solver, name, length, stages, top)
    if isinstance(found, Infeasible):
        raise PlanError(_what_would_fit(found, solver, [] if stages.pipelines else _other_hints(solver)))
    return found


def _write_report(report: Path, found: Ranking, solver: Solver, rates: Sequence[RateRow]) -> None:
    """Write the page of plots. matplotlib is imported here, because that takes a second."""
    from towpath.cli.plan_report import write_plan_report

    with progress_bar("Drawing") as say:
        write_plan_report(report, found, solver, heading(solver), say, rates)


def _facts(found: Ranking, solver: Solver) -> dict[str, Any]:
    """Return what `--json` prints."""
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


def _show(found: Ranking, solver: Solver, took_seconds: float, output: Path | None, report: Path | None) -> None:
    console = Console(width=100, highlight=False)
    console.print(heading(solver))
    table = table_of(*tables.HEADINGS, numbers=3)
    for number, priced in enumerate(found.ranked, 1):
        table.add_row(*tables.row(number, priced, solver))
    console.print(table)
    rest = (
        "no other can be faster"
        if found.open_bound is None
        else f"no other takes less than {tables.seconds(found.open_bound)}"
    )
    room = f"{solver.request.memory / GIB:.1f} GiB"
    console.print(
        f"{found.considered:,} were considered, {found.fitting:,} may fit into {room} a rank, "
        f"{found.replayed} were replayed, the most promising first; {rest}. {took_seconds:.1f} s.",
        style="dim",
    )
    for line in (*tables.exact_bits(found.ranked, solver), *tables.launches(found.ranked)):
        console.print(line)
    if output is not None:
        batching = found.ranked[0].batching
        settings = [f"strategy.name={output}", f"train.micro_batch={batching.micro_batch}"]
        settings += [f"train.checkpointing={str(batching.checkpointing).lower()}"]
        first = found.ranked[0]
        settings += _pipeline_settings(first.layout) if isinstance(first, PipelinePrediction) else []
        console.print(f"The first, for training: towpath train CONFIG.toml {' '.join(settings)}", soft_wrap=True)
    if report is not None:
        print(f"Plots: {report}")


def solver_of(
    model: str,
    cluster: str,
    ranks: tuple[int | None, int | None],
    length: int | None,
    memory: float | None,
    precision: PrecisionName,
    optimizer: str,
    batch: int,
) -> Solver:
    """Return the solver of a model on a cluster, as the options of a command describe them. `batch` is sequences."""
    found = load_cluster(cluster, *ranks)
    limit = found.memory if memory is None else max(1, int(memory * GIB))
    request = Request(batch, limit, _PRECISIONS[precision], optimizer=Optimizer.named(optimizer))
    return Solver(describe_model(model, length), found, request)


def heading(solver: Solver) -> str:
    """Return two lines that describe the model and the cluster."""
    model, found, topology = solver.model, solver.cluster, solver.cluster.topology
    links = found.hardware
    racks = ""
    if links.racks is not None and topology.nodes_per_rack is not None:
        racks = f", {links.racks.rate * 8 / 1e9:.3g} Gbit/s a rack of {topology.nodes_per_rack} nodes"
    return (
        f"{model.name}: {model.parameters / 1e9:.3g} billion parameters, sequences of {model.length:,} tokens\n"
        f"{found.name}: {topology.words}, "
        f"{links.inter.rate * 8 / 1e9:.3g} Gbit/s a node{racks}"
    )


def _what_would_fit(found: Infeasible, solver: Solver, more_hints: Sequence[str]) -> str:
    memory = found.nearest.memory
    needed = found.nearest.peak_bytes / GIB
    hints: list[str] = []
    if max(memory, key=lambda name: memory[name]) == "activations":
        hints.append("a smaller micro-batch, or --checkpointing")
    more = -(-found.nearest.peak_bytes // solver.request.memory) * solver.cluster.topology.nodes
    hints += [*more_hints, f"more nodes (about --nodes {more})"]
    return (
        f"nothing fits into {solver.request.memory / GIB:.1f} GiB a rank: what comes nearest is "
        f"{tables.extents(found.nearest.strategy)} (P, G, OS) with {needed:.1f} GiB, {found.missing_bytes / GIB:.1f} "
        f"too many. It needs {tables.parts(memory)}. What would help: {', or '.join(hints)}."
    )


def _other_hints(solver: Solver) -> list[str]:
    """Return what else would help: the offload with which the model fits, and a pipeline."""
    fitting: list[str] = []
    for offload in tables.further_offloads(solver, solver.request.offload):
        offloaded = Solver(solver.model, solver.cluster, replace(solver.request, offload=offload))
        if isinstance(offloaded.solve(best=1, most=1), Ranking):
            fitting.append(f"--offload {offload}, with which it fits")
            break
    return [*fitting, "a pipeline (--pipeline 4)"]


# --- outer steps ------------------------------------------------------------------------------------------------------


def _with_outer(found: Ranking, solver: Solver, periods: Sequence[int]) -> Ranking:
    """Return the ranking together with the best outer steps of each period."""
    steps = OuterPlanner(solver).solve(periods)
    if not steps:
        room = f"{solver.request.memory / GIB:.1f} GiB"
        raise PlanError(
            f"--outer: no island of whole nodes can hold the model and its slow weights in {room} a rank, with a batch "
            "that islands share equally. Take more memory, or leave out --outer."
        )
    counts = {name: getattr(found, name) + len(steps) for name in ("considered", "fitting", "replayed")}
    ranked = sorted((*found.ranked, *steps), key=lambda priced: priced.order)
    return replace(found, ranked=tuple(ranked), **counts)


def _show_rates(rates: Sequence[RateRow], solver: Solver) -> None:
    """Show at which link rates outer steps are faster."""
    if not rates:
        return
    console = Console(width=100, highlight=False)
    table = table_of("link of a node", "fastest synchronous", "step", "with outer steps", "step", "× faster", numbers=1)
    own = solver.cluster.hardware.inter.rate
    for row in rates:
        best, usual = row.best, row.synchronous
        table.add_row(
            tables.link(row.rate) + (" (this)" if row.rate == own else ""),
            tables.label(usual.strategy),
            tables.seconds(usual.seconds),
            tables.label(best.strategy),
            tables.seconds(best.seconds),
            f"{usual.seconds / best.seconds:.3g}",
        )
    console.print(table)
    console.print(f"{_conclusion(rates)} They change the algorithm: see docs/guides/outer-steps.md.")


def _conclusion(rates: Sequence[RateRow]) -> str:
    if (rate := crossing(rates)) is not None:
        return f"Outer steps take less time up to {tables.link(rate)}."
    first = rates[0]
    always = first.best.seconds < first.synchronous.seconds
    return f"Outer steps take {'less' if always else 'more'} time at all of these rates."


def _facts_by_rate(rates: Sequence[RateRow]) -> dict[str, Any]:
    """Return what `--json` prints about outer steps."""
    if not rates:
        return {}
    rows = [
        {
            "gbit": row.rate * 8 / 1e9,
            "synchronous": {"strategy": row.synchronous.strategy.name, "seconds": row.synchronous.seconds},
            "outer": [{"toml": step.strategy.to_toml(), "seconds": step.seconds} for step in row.outer],
        }
        for row in rates
    ]
    rate = crossing(rates)
    return {"outer_by_rate": rows, "outer_up_to_gbit": None if rate is None else rate * 8 / 1e9}


# --- pipelines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Sizes of pipelines and of tensor parallelism, schedules, and compressions. All combinations are planned."""

    pipelines: Sequence[int]
    tensors: Sequence[int]
    schedules: Sequence[str]
    compressions: Sequence[str]

    def __post_init__(self) -> None:
        for option, given, known in (
            ("--schedule", self.schedules, list(SCHEDULES)),
            ("--compression", self.compressions, list(COMPRESSIONS)),
        ):
            for name in given:
                if name not in known:
                    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                    raise ConfigError(f"{option} {name}: did you mean {close!r}? Known: {', '.join(known)}.")
        if not self.pipelines and (self.tensors or self.schedules or self.compressions):
            raise ConfigError("--tensor, --schedule and --compression are options of a pipeline: pass --pipeline, too.")


def _with_pipelines(
    found: Ranking | Infeasible, solver: Solver, name: str, length: int | None, options: PipelineOptions, best: int
) -> Ranking | Infeasible:
    """Plan the model with pipelines, and return the `best` of these and of `found`."""
    schedules = options.schedules or ("1F1B",)
    pipelines = pipelines_of(solver, name, length, schedules)
    with progress_bar("Planning stages") as say:
        staged = pipelines.solve(
            options.pipelines, schedules, options.compressions or ("none",), options.tensors or (1,), best, say
        )
    if not staged:
        return found
    if isinstance(found, Infeasible):
        return Ranking(tuple(staged), len(staged), len(staged), len(staged), False)
    ranked = sorted((*found.ranked, *staged), key=lambda priced: priced.order)
    return replace(found, ranked=tuple(ranked[:best]))


def pipelines_of(solver: Solver, name: str, length: int | None, schedules: Sequence[str]) -> Pipelines:
    """Return what predicts pipelines of the model on the cluster of `solver`."""
    if all(schedule in _SCHEDULES_WITHOUT_TORCH for schedule in schedules):
        walks = plain_walk
    else:
        from towpath.pipeline.schedules import walks
    shape, called, tokens = model_shape(name, length)
    return Pipelines(lambda count: shape.staged(called, tokens, count), solver.cluster, solver.request, walks)


def _pipeline_settings(layout: Layout) -> list[str]:
    """Return the settings of `towpath train` for a pipeline."""
    settings = [f"parallel.pipeline={layout.pipeline}", f"parallel.schedule={layout.schedule}"]
    settings += [] if layout.tensor == 1 else [f"parallel.tensor={layout.tensor}"]
    return settings + ([] if layout.compression == "none" else [f"parallel.compression={layout.compression}"])
