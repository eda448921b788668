"""What `towpath plan` prints and writes: tables, JSON, strategies and traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from towpath.cli.terminal import table_of
from towpath.errors import ConfigError
from towpath.files import write_output_file
from towpath.observe.trace import write_intervals
from towpath.plan import tables
from towpath.plan.hardware import GIB
from towpath.plan.pipelines import Layout, PipelinePrediction, Pipelines
from towpath.plan.request import Prediction, Ranking
from towpath.plan.solver import Solver

# A trace has each micro-step. Otherwise the third one stands for all later ones.
_MOST_TRACED = 1_000


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
            settings = " ".join(_settings(first, self.output))
            print(f"The first, for training: towpath train CONFIG.toml {settings}")
        if self.report is not None:
            print(f"Plots: {self.report}")
        if self.trace is not None:
            print(f"The first, for https://ui.perfetto.dev: {self.trace}")


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


def facts_of(found: Ranking, solver: Solver) -> dict[str, Any]:
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


def print_ranking(found: Ranking, solver: Solver, took_seconds: float) -> None:
    """Print the best strategies as a table, and what they need to be read with."""
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
    for line in (*tables.exact_bits(found.ranked, solver), *tables.launches(found.ranked)):
        console.print(line)


def print_steps(shown: Sequence[tuple[int | None, Prediction]], solver: Solver, as_json: bool) -> None:
    """Print steps side by side. A step of a phase comes with the first optimizer step of that phase."""
    steps = [step for _, step in shown]
    whole = all(first is None for first, _ in shown)
    conclusions = [tables.explain(steps, solver)] if len(steps) <= 2 and whole else []
    if as_json:
        facts = [
            ({} if first is None else {"first_step": first}) | tables.as_json(step, solver) for first, step in shown
        ]
        print(json.dumps({"strategies": facts, "conclusions": conclusions}, indent=2))
        return
    console = Console(width=100, highlight=False)
    console.print(heading(solver))
    titles = [tables.title(step) + ("" if first is None else f", from step {first}") for first, step in shown]
    table = table_of("one optimizer step", *titles, numbers=1)
    for cells in tables.compare(steps, solver):
        table.add_row(*cells)
    console.print(table)
    for line in (*tables.exact_bits(steps, solver), *conclusions):
        console.print(line)


def _settings(first: Prediction, output: Path) -> list[str]:
    """Return the settings of `towpath train` for a predicted step whose strategy is in a file."""
    settings = [f"strategy.name={output}", f"train.micro_batch={first.batching.micro_batch}"]
    settings += [f"train.checkpointing={str(first.batching.checkpointing).lower()}"]
    if isinstance(first, PipelinePrediction):
        layout = first.layout
        settings += [f"parallel.pipeline={layout.pipeline}", f"parallel.schedule={layout.schedule}"]
        settings += [] if layout.tensor == 1 else [f"parallel.tensor={layout.tensor}"]
        settings += [] if layout.compression == "none" else [f"parallel.compression={layout.compression}"]
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
