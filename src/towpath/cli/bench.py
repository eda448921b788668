"""`towpath bench`: our strategies against DDP, HSDP and FSDP2, on this job's cluster or in the lab."""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from towpath.cli.terminal import load_torch
from towpath.errors import ConfigError
from towpath.files import check_output_file
from towpath.topology.cluster import Topology

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from towpath.bench import Comparison, Sample, TrainingSetup

_HEADINGS = ("candidate", "", "step", "speed-up", "interval", "waiting", "between nodes", "GPU memory")
_MARKS = (
    "+: Towpath. ~: lossy, a codec rounds what it sends. Speed-ups are over the fastest peer, whose row has 1.00. "
    "Waiting: the share of a step beyond its forward and backward pass (compute only)."
)


Strategies = Annotated[
    list[str] | None,
    typer.Argument(metavar="STRATEGY", help="Strategies.", show_default="zero3, mics, paro-iig and zero++"),
]
ModelName = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="tiny, 125m, 350m, 1b, 3b, 7b, or WIDTHxDEPTH.", show_default="125m; lab: tiny"),
]
Length = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Tokens per sequence.", show_default="1024; lab: 64")
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="bfloat16 or float32.", show_default="bfloat16 on GPUs, float32 on CPUs"),
]
Rounds = Annotated[
    int, typer.Option(metavar="N", min=1, help="Measurements per candidate. An interval at 95 % needs six.")
]
RanksPerNode = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Ranks per node of the lab.", show_default="2")
]
InterRate = Annotated[
    str | None,
    typer.Option(metavar="RATE", help="The rate of the lab's links between nodes.", show_default="200mbit"),
]


def bench(
    strategies: Strategies = None,
    model: ModelName = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences per rank and micro-batch.")] = 4,
    length: Length = None,
    micro_steps: Annotated[int, typer.Option(metavar="N", min=1, help="Micro-batches per optimizer step.")] = 1,
    dtype: Dtype = None,
    rounds: Rounds = 6,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Timed steps per measurement.")] = 5,
    peers: Annotated[
        str, typer.Option(metavar="NAME,…", help="Baselines to compare with.")
    ] = "fsdp2,hsdp,hsdp reshard=no,torch-ddp",
    lab: Annotated[bool, typer.Option("--lab", help="Emulate a cluster on this Linux machine.")] = False,
    nodes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Nodes of the lab.", show_default="2")] = None,
    ranks: RanksPerNode = None,
    inter: InterRate = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page.")] = Path("bench.html"),
) -> None:
    """Measure whether Towpath is faster than FSDP2, HSDP and DDP on your network, and with which strategy.

    Example: `towpath bench --lab mics "mics gradients=int4:64"`

    On a cluster: `torchrun --nnodes 2 --nproc-per-node 8 … -m towpath bench --model 1b`

    All candidates train the same GPT. Each round measures every candidate once, in a new order, with only one model in
    memory. The result is a table, and a page with every measurement. A candidate that fails is left out. If ranks
    wait for one that has failed, the comparison ends with the samples so far.

    Exit code: 0, or 1 if the comparison ended early, or no strategy or no baseline could be measured, or 2 if nothing
    could start.
    """
    load_torch()
    _check_launcher(lab, {"--nodes": nodes, "--ranks": ranks, "--inter": inter})
    if dtype not in (None, "bfloat16", "float32"):
        raise ConfigError(f"--dtype {dtype}: expected bfloat16 or float32.")
    if os.environ.get("RANK", "0") == "0":  # only this rank writes the page
        check_output_file("--output", output)
    from towpath.bench import STRATEGIES, Comparison, TrainingSetup, check_candidates, compare, parse_model

    width, depth, vocabulary = parse_model(model or ("tiny" if lab else "125m"))
    with _lab(Topology(nodes or 2, ranks or 2), inter or "200mbit") if lab else _job() as place:
        length = length or (64 if lab else 1024)
        dtype = dtype or place.dtype
        setup = TrainingSetup(width, depth, vocabulary, length, batch, micro_steps, dtype, steps)
        kinds = check_candidates(strategies or STRATEGIES, peers.split(",") if peers else (), place.topology, dtype)
        about = f"{place.topology.words}, {place.links}. {setup}"
        say = partial(Console(stderr=True, highlight=False, markup=False, quiet=not place.leads).print, style="dim")
        say(about)
        found = Comparison(kinds, [], {}, {})
        report = partial(_report, place, output, about, found)
        compare(kinds, rounds, lambda name: place.measure(name, setup, report), say, found)
    report()
    if (peers and found.fastest("peer") is None) or found.fastest("ours", "ours, lossy") is None:
        raise typer.Exit(1)


def _report(place: _Place, output: Path, about: str, found: Comparison, error: str = "") -> None:
    """Print the error that ended a comparison, if any. On the rank that leads, also print and write the results."""
    if error:
        print(f"towpath: {error}", file=sys.stderr, flush=True)
    if place.leads:
        show(found)
        write_page(output, about, found)
        print(f"Page: {output}", flush=True)


def _check_launcher(lab: bool, lab_options: dict[str, Any]) -> None:
    """Raise `ConfigError` if options and the way in which this process was started do not fit."""
    from towpath.topology.groups import launched

    if lab and launched():
        raise ConfigError("--lab starts its own ranks, but a launcher started this process. Leave out one of them.")
    if not lab and not launched():
        raise ConfigError(
            "bench measures between ranks, and no launcher started this process. On your cluster, start torchrun … -m "
            "towpath bench on every node. To emulate a cluster on this machine, add --lab."
        )
    if not lab and (names := [name for name, value in lab_options.items() if value is not None]):
        raise ConfigError(f"{', '.join(names)}: only for --lab. A job has the ranks and links that it was started on.")


_Measure: TypeAlias = "Callable[[str, TrainingSetup, Callable[[str], None]], Sample]"


class _Place(NamedTuple):
    """A cluster for candidates. `leads` is whether this process prints, and `dtype` what its device prefers.

    `measure` returns the sample of a candidate. Its last argument reports an error that ends the process.
    """

    topology: Topology
    links: str
    dtype: str
    leads: bool
    measure: _Measure


@contextmanager
def _lab(topology: Topology, inter: str) -> Generator[_Place]:
    import lab
    from towpath.bench import measure_in_lab

    if (reason := lab.available()) is not None:
        raise ConfigError(f"--lab: this machine cannot emulate a cluster: {reason}")
    rate = None if inter == "unshaped" else inter
    with lab.Lab(topology, inter=rate, preload=(*lab.PRELOAD, "towpath.bench")) as cluster:
        links = f"emulated, {inter} between nodes, gloo (whose reduce-scatter sends twice the bytes)"
        measure: _Measure = lambda name, setup, _: measure_in_lab(cluster, name, setup)  # noqa: E731
        yield _Place(topology, links, "float32", True, measure)


@contextmanager
def _job() -> Generator[_Place]:
    import torch.distributed as dist

    from towpath.bench import measure_in_job
    from towpath.topology.groups import Groups, detect_shape
    from towpath.topology.init import init

    device = init()
    try:
        groups = Groups()
        topology = Topology(*detect_shape(groups))
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        links = f"links as they are, {groups.describe_backends()}"
        yield _Place(topology, links, dtype, groups.rank == 0, partial(measure_in_job, groups, topology))
    finally:
        dist.destroy_process_group()


def show(found: Comparison) -> None:
    """Print the table of a comparison in 100 columns, and what can be concluded."""
    headings, *rows = _filled(found)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < 2 else "right", no_wrap=i != 0)
    for row in rows:
        table.add_row(*row)
    console = Console(width=100, highlight=False, markup=False)
    console.print(table)
    for text in (*found.verdicts(), *(f"{name}: left out: {why}" for name, why in found.failures.items()), _MARKS):
        console.print(text)


def _filled(found: Comparison) -> list[tuple[str, ...]]:
    """Return the headings and the rows of the table, without empty columns."""
    rows = _rows(found)
    shown = [i for i in range(len(_HEADINGS)) if i < 2 or any(row[i] for row in rows)]
    return [tuple(row[i] for i in shown) for row in (_HEADINGS, *rows)]


def _rows(found: Comparison) -> list[tuple[str, ...]]:
    """Return the rows under `_HEADINGS`, the fastest candidate first."""
    from towpath.bench import COMPUTE
    from towpath.progress import size

    peer, rows = found.fastest("peer"), list[tuple[str, ...]]()
    for name in sorted(found.samples, key=found.step):
        kind, samples = found.kinds.get(name, ""), found.samples[name]
        ratio = interval = waiting = ""
        if peer is not None and kind:
            speedup, bounds = found.speedup(name, peer)
            has_interval = name != peer and bounds.coverage > 0  # one round has none
            ratio, interval = f"{speedup:.2f}", f"{bounds.low:.2f} – {bounds.high:.2f}" if has_interval else ""
        if COMPUTE in found.samples and kind:
            waiting = f"{max(0.0, 1 - found.step(COMPUTE) / found.step(name)):.0%}"
        marks = "+" * kind.startswith("ours") + "~" * kind.endswith("lossy")
        sent = [each.sent_bytes for each in samples if each.sent_bytes is not None]
        memory = max((each.memory_bytes or 0 for each in samples), default=0)
        figures = (f"{found.step(name):.4g} s", ratio, interval, waiting)
        rows.append((name, marks, *figures, size(median(sent)) if sent else "", size(memory) if memory else ""))
    return rows


def write_page(path: Path, about: str, found: Comparison) -> None:
    """Write one HTML file with the table, a picture, and every measurement. It fetches nothing."""
    import torch

    import towpath
    from towpath.cli.plots import figure_html, svg, table_html, write_page

    names = sorted(found.samples, key=found.step)
    numbers = [str(number) for number in range(1, len(found.order) + 1)]
    # A comparison that ended early lacks samples of its last round.
    raw = [
        (name, *(f"{s:.4g}" for s in found.seconds(name)), *[""] * (len(numbers) - len(found.samples[name])))
        for name in names
    ]
    order = [(number, ", ".join(names)) for number, names in zip(numbers, found.order, strict=True)]
    parts = [
        ("Seconds of a step", "A dot per round, and a line at the median.", svg(_draw_steps, found, (10.4, 3.6))),
        ("Every measurement", "Seconds of a step, by round.", table_html(("candidate", *numbers), raw)),
        ("Order", "The order of the candidates in each round.", table_html(("round", "order"), order)),
    ]
    if found.failures:
        failed = table_html(("candidate", "reason"), list(found.failures.items()))
        parts.append(("Left out", "Candidates that failed in a round.", failed))
    verdicts = "".join(f"<p>{html.escape(text)}</p>" for text in found.verdicts())
    best = {found.fastest("ours"), found.fastest("ours, lossy"), found.fastest("peer")}
    headings, *rows = _filled(found)
    table = table_html(headings, rows, ["best" if name in best else "" for name in names])
    about = f"{about} Towpath {towpath.__version__}, PyTorch {torch.__version__}. {_MARKS}"
    figures = [figure_html(title, text, content, wide=True) for title, text, content in parts]
    write_page(path, "Towpath against FSDP2, HSDP and DDP", about, f"{verdicts}{table}", figures)


def _draw_steps(figure: Any, found: Comparison) -> None:
    from towpath.cli.plots import axes_of, color

    names = sorted(found.samples, key=found.step)
    axes = axes_of(figure, "seconds of a step", "")
    for place, name in enumerate(names):
        paint = color(0) if found.kinds.get(name, "").startswith("ours") else "#868e96"
        axes.plot(seconds := found.seconds(name), [place] * len(seconds), "o", color=paint, markersize=4, alpha=0.6)
        axes.plot([found.step(name)] * 2, [place - 0.35, place + 0.35], "-", color=paint, linewidth=2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
