"""`towpath plan`: rank strategies for a model on a cluster, or show the step of given ones, without training."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from towpath.cli.terminal import above_zero, check_picture_file, table_of
from towpath.core import presets
from towpath.core.formats import Precision
from towpath.core.passes import COMPRESSIONS, SCHEDULES, asked_of_micro_batches, plain_walk
from towpath.core.strategy import Offload, Strategy
from towpath.errors import ConfigError, PlanError
from towpath.files import check_output_file, write_output_file
from towpath.observe.trace import write_intervals
from towpath.outer.proposal import OuterPlanner
from towpath.plan import tables
from towpath.plan.catalog import describe_model, load_cluster, model_shape
from towpath.plan.hardware import GIB
from towpath.plan.pipelines import Layout, PipelinePrediction, Pipelines
from towpath.plan.pytorch import NOTE, predict_wrappers
from towpath.plan.request import BF16, OUTER, Batching, Infeasible, Prediction, Ranking, Request, codecs_for_both
from towpath.plan.solver import MOST, Solver
from towpath.progress import format_rate, show_progress
from towpath.topology.cluster import Topology

# The number of strategies whose time and memory a report shows.
_IN_REPORT = 40
# PyTorch plans the schedules with several stages on a rank.
_SCHEDULES_WITHOUT_TORCH = ("GPipe", "1F1B")

# A trace has each micro-step. Otherwise the third one stands for all later ones.
_MOST_TRACED = 1_000
_PRECISIONS = {"bf16": BF16, "fp32": Precision()}


@dataclass(frozen=True, slots=True)
class PlannedStages:
    """The layouts of pipelines to plan, and what predicts them."""

    layouts: Sequence[Layout]
    pipelines: Pipelines


@dataclass(frozen=True, slots=True)
class PlanFiles:
    """The files to write, and whether stdout gets JSON."""

    output: Path | None
    report: Path | None
    trace: Path | None
    as_json: bool

    def write(self, first: Prediction, solver: Solver, stages: PlannedStages | None) -> None:
        """Write the strategy and the trace of the first step."""
        write_output_file("--output", self.output, first.strategy.to_toml())
        _write_trace(self.trace, first, solver, stages)

    def print_names(self, first: Prediction) -> None:
        """Print the names of the written files, and what to do with them."""
        if self.output is not None:
            print(f"The first, for training: towpath train CONFIG.toml {_settings(first, self.output)}")
        if self.report is not None:
            print(f"Plots: {self.report}")
        if self.trace is not None:
            print(f"The first, for https://ui.perfetto.dev: {self.trace}")


def _nodes(text: str, example: str = "4, or 4x8 with the ranks of each node") -> tuple[int, int | None]:
    """Parse a whole number, or two that "x" joins."""
    found = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text)
    if found is None:
        raise typer.BadParameter(f"got {text}; expected {example}, with whole numbers from 1 to 99,999")
    return int(found[1]), int(found[2]) if found[2] else None


def _shape(text: str) -> tuple[int, int | None]:
    """Parse nodes, and the ranks of each. Refuse nodes of unequal size, such as "1+3"."""
    if re.fullmatch(r"[1-9]\d{0,4}(\+[1-9]\d{0,4})+", text):
        Topology.parse(text).check_equal("towpath plan")
    return _nodes(text)


def _layout(text: str) -> Layout:
    """Parse the ranks of a pipeline, its tensor-parallel ranks, and its schedule, such as 4x2:Interleaved1F1B."""
    ranks, _, schedule = text.partition(":")
    pipeline, tensor = _nodes(ranks, "4, or 4x2 with tensor-parallel ranks")
    if pipeline == 1:
        raise typer.BadParameter(f"got {text}; expected at least 2 ranks")
    if schedule and schedule not in SCHEDULES:
        raise typer.BadParameter(f"got {text}; expected a schedule of {', '.join(SCHEDULES)}")
    return Layout(pipeline, schedule or "1F1B", tensor=tensor or 1)


def _number(help: str, parser: Callable[[str], object], default: str | None = None) -> Any:
    """Return an option with a number, or with several that make one thing. `default` is what help shows."""
    return typer.Option(metavar="N", parser=parser, help=help, show_default=default or True)


_MODEL = "A name (llama-3.1-8b, qwen3-8b, gpt-8.3b, …), a config.json or its folder, or a .toml file."
_CLUSTER = "A shipped cluster (p4d, ethernet-10g, …), a .toml file, or a profile of `towpath probe`."
_MICRO_BATCH = "Sequences that a rank computes at the same time. Can be repeated."
_OFFLOAD = "Keep in host memory: optimizer (masters and states), params (shards), or optimizer+params."
_ALLOW = "Lossy codecs (int8,int4), compression of a pipeline (optimus-cb), and outer steps (outer)."
_PIPELINE = (
    "Ranks of a pipeline, as 4; with tensor-parallel ranks, as 4x2; with a schedule, as 4:Interleaved1F1B. "
    "Can be repeated."
)
_STRATEGY = "Show the step of this preset ('mics group=4x2') or .toml file. Can be repeated, to compare."
_IN_CLUSTER, _IN_MODEL = "as in the cluster's file", "as in the model's file"


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)],
    cluster: Annotated[str, typer.Option(metavar="NAME", help=_CLUSTER)],
    batch: Annotated[int, _number("Sequences in one optimizer step, over all ranks.", above_zero(int, 10**9))],
    nodes: Annotated[Any, _number("Nodes, or nodes and the ranks of each, as 4x8.", _shape, _IN_CLUSTER)] = None,
    length: Annotated[int | None, _number("Tokens in a sequence.", above_zero(int, 10**7), _IN_MODEL)] = None,
    memory: Annotated[float | None, _number("GiB that a rank may use.", above_zero(float, 1e6), _IN_CLUSTER)] = None,
    precision: Annotated[
        Literal["bf16", "fp32"],
        typer.Option(metavar="bf16|fp32", help="The dtype of computation and transfers. Masters are fp32."),
    ] = "bf16",
    offload: Annotated[Offload | None, typer.Option(metavar="WHAT", help=_OFFLOAD)] = None,
    micro_batch: Annotated[list[int] | None, _number(_MICRO_BATCH, above_zero(int, 10**6), "all that fit")] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option("--checkpointing/--no-checkpointing", help="Recompute blocks.", show_default="try both"),
    ] = None,
    allow: Annotated[str, typer.Option(metavar="NAMES", help=_ALLOW)] = "",
    pipeline: Annotated[list[Any] | None, _number(_PIPELINE, _layout)] = None,
    strategy: Annotated[list[str] | None, typer.Option(metavar="NAME", help=_STRATEGY)] = None,
    top: Annotated[int, _number("How many strategies to show.", above_zero(int, 10_000))] = 10,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the first strategy as TOML for `towpath train`."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page of plots: which strategy when.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the first step as a trace for https://ui.perfetto.dev.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Rank all strategies for a model on a cluster by their step time.

    Example: `towpath plan llama-7b --cluster ethernet-25g --batch 64`

    It simulates all placements of parameters, gradients and optimizer states, routes, micro-batches, activation
    checkpointing, exact transports, and what you allow. Below them are FSDP2, HSDP and DDP, as they are and with
    `towpath.wires`. With `--strategy`, it shows what a step of that strategy takes, next to the best one. It needs
    neither PyTorch, nor a GPU, nor the cluster.

    Exit code: 0, or 1 if nothing fits in memory, or 2 for a mistake.
    """
    check_output_file("--output", output)
    check_output_file("--trace", trace)
    check_picture_file("--report", report)
    names = [name.strip() for name in allow.split(",") if name.strip()]
    compressions = dict.fromkeys(("none", *(name for name in names if name in COMPRESSIONS)))
    if len(compressions) > 1 and not pipeline:
        raise ConfigError(f"--allow {list(compressions)[-1]} compresses what pipeline stages send: add --pipeline.")
    try:
        weights, gradients = codecs_for_both(name for name in names if name not in COMPRESSIONS)
    except ConfigError as error:
        raise ConfigError(f"--allow: {error} For a pipeline: {', '.join(COMPRESSIONS)}.") from None
    for option, given in (("--report", report), ("--offload", offload), ("--allow outer", OUTER in names or None)):
        if pipeline and given is not None:
            raise ConfigError(f"{option} is planned without pipelines only: leave out --pipeline, or {option}.")
    if strategy and report is not None:
        raise ConfigError("--report shows which strategy is the best: leave out --strategy, or --report.")
    found = load_cluster(cluster, *(nodes or ()))
    request = Request(
        batch,
        found.memory if memory is None else max(1, int(memory * GIB)),
        _PRECISIONS[precision],
        weights=weights,
        gradients=gradients,
        micro_batches=tuple(micro_batch or ()),
        checkpointing=checkpointing,
        offload=offload,
        outer=OUTER in names,
    )
    solver = Solver(describe_model(model, length), found, request)
    stages = None
    if pipeline:
        layouts = [replace(each, compression=name) for each in pipeline for name in compressions]
        stages = _stages(model, length, solver, layouts)
    files = PlanFiles(output, report, trace, as_json)
    if strategy:
        _show_steps(strategy, solver, stages, files)
    else:
        _show_ranking(solver, stages, top, files)


def _stages(name: str, length: int | None, solver: Solver, layouts: Sequence[Layout]) -> PlannedStages:
    if all(layout.schedule in _SCHEDULES_WITHOUT_TORCH for layout in layouts):
        walks = plain_walk
    else:
        from towpath.pipeline.schedules import walks
    shape, called, tokens = model_shape(name, length)
    made = Pipelines(lambda count: shape.staged(called, tokens, count), solver.cluster, solver.request, walks)
    for each in layouts:
        made.copies(each)  # raises at once if the ranks cannot be divided so
    return PlannedStages(layouts, made)


def _show_ranking(solver: Solver, stages: PlannedStages | None, top: int, files: PlanFiles) -> None:
    """Rank all strategies, write the files, and print the best ones."""
    began = time.monotonic()
    found = _solve(solver, stages, top if files.report is None else max(top, _IN_REPORT), max(top, MOST))
    if isinstance(found, Infeasible):
        raise PlanError(_what_would_fit(found, solver, stages))
    if solver.request.outer:
        found = _with_outer(found, solver)
    if files.report is not None:
        from towpath.cli.plan_report import write_plan_report  # imports matplotlib, which takes a second

        with show_progress("Drawing"):
            write_plan_report(files.report, found, solver, heading(solver))
    found = replace(found, ranked=found.ranked[:top])
    files.write(found.ranked[0], solver, stages)
    took_seconds = time.monotonic() - began
    with show_progress("Simulating FSDP2 and DDP"):
        wrappers = predict_wrappers(solver)
    if files.as_json:
        print(json.dumps(facts_of(found, wrappers, solver), indent=2))
    else:
        print_ranking(found, wrappers, solver, took_seconds)
        files.print_names(found.ranked[0])


def _show_steps(texts: Sequence[str], solver: Solver, stages: PlannedStages | None, files: PlanFiles) -> None:
    """Print the steps of strategies side by side. A strategy alone stands next to the best one."""
    layouts = [None] if stages is None else stages.layouts
    with show_progress("Simulating"):
        shown = [each for text in texts for layout in layouts for each in _phases(text, solver, stages, layout)]
    first = shown[0][1]
    if len(shown) == 1:
        found = _solve(solver, stages, 1, MOST)
        if isinstance(found, Ranking) and found.ranked[0] != first:
            shown.append((None, found.ranked[0]))
    files.write(first, solver, stages)
    print_steps(shown, solver, files.as_json)
    if not files.as_json:
        files.print_names(first)


def _solve(solver: Solver, stages: PlannedStages | None, best: int, most: int) -> Ranking | Infeasible:
    """Return the best strategies, with and without stages."""
    with show_progress("Planning"):
        found = solver.solve(best=best, most=most)
        if stages is None:
            return found
        staged = stages.pipelines.solve(stages.layouts, best)
    if not staged:
        return found
    if isinstance(found, Infeasible):
        return Ranking(tuple(staged), len(staged), len(staged), len(staged), None)
    ranked = sorted((*found.ranked, *staged), key=lambda priced: priced.order)
    return replace(found, ranked=tuple(ranked[:best]))


def _with_outer(found: Ranking, solver: Solver) -> Ranking:
    """Return the ranking together with the best outer steps."""
    step = OuterPlanner(solver).solve()
    if step is None:
        room = f"{solver.request.memory / GIB:.1f} GiB"
        raise PlanError(
            f"--allow outer: no island of whole nodes can hold the model and its slow weights in {room} a rank, with a "
            "batch that islands share equally. Take more memory, or leave out outer."
        )
    counts = {name: getattr(found, name) + 1 for name in ("considered", "fitting", "replayed")}
    return replace(found, ranked=tuple(sorted((*found.ranked, step), key=lambda priced: priced.order)), **counts)


def _phases(
    text: str, solver: Solver, stages: PlannedStages | None, layout: Layout | None
) -> list[tuple[int | None, Prediction]]:
    """Return the predicted step of a strategy, with the batching that is the fastest.

    If its codecs change in a run, there is one for each phase, with the first optimizer step of that phase.
    """
    memory = solver.request.memory
    if stages is None or layout is None:
        made, batchings = _strategy(text, solver), solver.request.batchings(solver.cluster.topology.world)
        predict = solver.predict
    else:
        own = _from_file(text) if text.endswith(".toml") else text
        pipelines, layout = stages.pipelines, replace(layout, strategy=own)
        made, batchings = pipelines.strategy(layout), solver.request.batchings(pipelines.copies(layout))
        allowed = [b for b in batchings if not asked_of_micro_batches(layout.schedule, layout.pipeline, b.micro_steps)]
        if not allowed:
            pipelines.check(layout, batchings[0])
        staged, batchings = layout, allowed

        def predict(strategy: Strategy, batching: Batching) -> Prediction:
            return pipelines.predict(replace(staged, strategy=strategy), batching)

    # The fastest that fits into memory, or the smallest if none does.
    steps = [predict(made, batching) for batching in batchings]
    best = min(steps, key=lambda step: (step.peak_bytes > memory and step.peak_bytes, *step.order))
    if made.outer is not None or not made.changes:
        return [(None, best)]
    return [(first, predict(made.at(first), best.batching)) for first in (0, *made.changes)]


def _strategy(text: str, solver: Solver) -> Strategy:
    """Return the strategy that a preset's name or a file describes, with all of its codecs in use."""
    topology, offload = solver.cluster.topology, solver.request.offload
    if not text.endswith(".toml"):
        return presets.parse_strategy(text, topology, offload=offload)
    made = _from_file(text)
    if made.job != topology:
        raise ConfigError(
            f"strategy {text} is for {made.job} ranks, and the cluster has {topology}. Pass --nodes, or plan anew."
        )
    return made if offload is None else replace(made, offload=offload)


def _from_file(text: str) -> Strategy:
    try:
        return Strategy.from_toml(Path(text).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"strategy: cannot read {text}: {error}. Check the path, or name a preset.") from None


def _what_would_fit(found: Infeasible, solver: Solver, stages: PlannedStages | None) -> str:
    memory = found.nearest.memory
    needed = found.nearest.peak_bytes / GIB
    hints: list[str] = []
    if max(memory, key=lambda name: memory[name]) == "activations":
        hints.append("a smaller micro-batch, or --checkpointing")
    for offload in tables.further_offloads(solver, solver.request.offload) if stages is None else ():
        offloaded = Solver(solver.model, solver.cluster, replace(solver.request, offload=offload))
        if isinstance(offloaded.solve(best=1, most=1), Ranking):
            hints.append(f"--offload {offload}, with which it fits")
            break
    more = -(-found.nearest.peak_bytes // solver.request.memory) * solver.cluster.topology.nodes
    hints += [*([] if stages else ["a pipeline (--pipeline 4)"]), f"more nodes (about --nodes {more})"]
    return (
        f"nothing fits into {solver.request.memory / GIB:.1f} GiB a rank: what comes nearest is "
        f"{tables.extents(found.nearest.strategy)} (P, G, OS) with {needed:.1f} GiB, {found.missing_bytes / GIB:.1f} "
        f"too many. It needs {tables.parts(memory)}. What would help: {', or '.join(hints)}."
    )


# What is printed and written ------------------------------------------------------------------------------------------


def heading(solver: Solver) -> str:
    """Return two lines that describe the model and the cluster."""
    model, found, topology = solver.model, solver.cluster, solver.cluster.topology
    links, racks = found.hardware, ""
    if links.racks is not None and topology.nodes_per_rack is not None:
        racks = f", {format_rate(links.racks.rate)} a rack of {topology.nodes_per_rack} nodes"
    return (
        f"{model.name}: {model.parameters / 1e9:.3g} billion parameters, sequences of {model.length:,} tokens\n"
        f"{found.name}: {topology.words}, {format_rate(links.inter.rate)} a node{racks}"
    )


def facts_of(found: Ranking, wrappers: Sequence[Prediction], solver: Solver) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "model": solver.model.name,
        "parameters": solver.model.parameters,
        "cluster": solver.cluster.name,
        "nodes": solver.cluster.topology.nodes,
        "ranks_per_node": solver.cluster.topology.ranks_per_node,
        **{name: getattr(found, name) for name in ("considered", "fitting", "replayed", "proven")},
        "plans": [tables.as_json(priced, solver) for priced in found.ranked],
        "pytorch": [tables.wrapper_as_json(step, solver) for step in wrappers],
    }


def print_ranking(found: Ranking, wrappers: Sequence[Prediction], solver: Solver, took_seconds: float) -> None:
    """Print the best strategies as a table, what they need to be read with, and PyTorch's own steps."""
    console = Console(width=100, highlight=False)
    console.print(heading(solver))
    table = table_of(*tables.HEADINGS, numbers=3)
    for number, priced in enumerate(found.ranked, 1):
        table.add_row(*tables.row(number, priced, solver))
    console.print(table)
    rest = "no other can be faster"
    if found.open_bound is not None:
        rest = f"no other takes less than {tables.seconds(found.open_bound)}"
    console.print(
        f"{found.considered:,} were considered, {found.fitting:,} fit into {solver.request.memory / GIB:.1f} GiB "
        f"a rank, {found.replayed} were replayed, the most promising first; {rest}. {took_seconds:.1f} s.",
        style="dim",
    )
    ranked = found.ranked
    for line in (*tables.exact_bits(ranked, solver), *tables.launches(ranked), *tables.protection(ranked, solver)):
        console.print(line)
    if wrappers:
        table = table_of(*tables.WRAPPER_HEADINGS, numbers=2)
        for step in wrappers:
            table.add_row(*tables.wrapper_row(step, solver))
        console.print()
        console.print(table)
        console.print(NOTE)


def print_steps(shown: Sequence[tuple[int | None, Prediction]], solver: Solver, as_json: bool) -> None:
    """Print steps side by side. A step of a phase comes with the first optimizer step of that phase."""
    steps = [step for _, step in shown]
    whole = all(first is None for first, _ in shown)
    conclusions = [tables.explain(steps, solver)] if len(steps) <= 2 and whole else []
    if as_json:
        phases = [{} if first is None else {"first_step": first} for first, _ in shown]
        facts = [phase | tables.as_json(step, solver) for phase, step in zip(phases, steps, strict=True)]
        print(json.dumps({"strategies": facts, "conclusions": conclusions}, indent=2))
        return
    console = Console(width=100, highlight=False)
    console.print(heading(solver))
    titles = [tables.title(step) + ("" if first is None else f", from step {first}") for first, step in shown]
    table = table_of("one optimizer step", *titles, numbers=1)
    for cells in tables.compare(steps, solver):
        table.add_row(*cells)
    console.print(table)
    for line in (*tables.exact_bits(steps, solver), *conclusions, *tables.protection(steps[:1], solver)):
        console.print(line)


def _settings(first: Prediction, output: Path) -> str:
    """Return the settings of `towpath train` for a predicted step whose strategy is in a file."""
    batching = first.batching
    settings = f"strategy.name={output} train.micro_batch={batching.micro_batch}"
    settings += f" train.checkpointing={str(batching.checkpointing).lower()}"
    if isinstance(first, PipelinePrediction):
        layout = first.layout
        settings += f" parallel.pipeline={layout.pipeline} parallel.schedule={layout.schedule}"
        settings += f" parallel.tensor={layout.tensor}" if layout.tensor > 1 else ""
        settings += f" parallel.compression={layout.compression}" if layout.compression != "none" else ""
    return settings


def _write_trace(path: Path | None, step: Prediction, solver: Solver, stages: PlannedStages | None) -> None:
    """Write every micro-step of a predicted step as a trace. Of a pipeline, it has one copy of each of its ranks."""
    if path is None:
        return
    if step.strategy.outer is not None:
        raise ConfigError("--trace shows one step, and outer steps are simulated over a period. Leave it out.")
    if step.batching.micro_steps > _MOST_TRACED:
        raise ConfigError(
            f"--trace shows each micro-step, and there are {step.batching.micro_steps:,}. Expected at most "
            f"{_MOST_TRACED:,}: take a smaller --batch."
        )
    if stages is not None and isinstance(step, PipelinePrediction):
        ranks = stages.pipelines.replay(step.layout, step.batching).ranks
        names = {rank: f"rank {rank} of {step.layout}, simulated" for rank in range(len(ranks))}
    else:
        ranks = [solver.timeline(step.strategy, step.batching)]
        names = {0: f"every rank of {solver.cluster.name}, simulated"}
    write_intervals(path, {rank: each.intervals for rank, each in enumerate(ranks)}, names)
