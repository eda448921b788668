"""`python -m lab`: run a script, or the demo, on a cluster of network namespaces with shaped cables."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lab import Cable, Lab, LabResult, Rate, available
from lab.errors import LabError
from lab.runs import check_script, describe_exit
from towpath.cli.terminal import CommandGroup, check_picture_file, load_torch, table_of
from towpath.files import check_output_file, write_output_file
from towpath.progress import format_bytes
from towpath.topology.cluster import Topology

app = CommandGroup()


@app.callback()
def group() -> None:
    """Emulate a cluster on this machine: network namespaces as nodes, joined by cables of a chosen rate.

    Example: `python -m lab run --nodes 2 --ranks 2 --inter 200mbit -- train.py`
    """


def _ranks(text: str) -> int | tuple[int, ...]:
    """Parse the ranks on each node, or one number for each node, such as "1+3"."""
    numbers = text.split("+")
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise typer.BadParameter(
            f"got {text}; expected a whole number of at least 1, or one for each node, such as 1+3"
        )
    return int(text) if len(numbers) == 1 else tuple(map(int, numbers))


@app.command()
def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGS]",
            help="A Python script, a bash script (.sh) or -m MODULE, and its arguments. Write -- before it.",
        ),
    ],
    nodes: Annotated[int, typer.Option(metavar="N", min=1, help="The number of nodes.")],
    ranks: Annotated[
        Any, typer.Option(metavar="N", parser=_ranks, help="The ranks on each node. If nodes differ, of each: 1+3.")
    ],
    inter: Annotated[
        str,
        typer.Option(metavar="RATE", help="The rate of each node's cable, each way (200mbit, 1gbit), or flat."),
    ],
    up: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="The rate at which nodes send, if it differs.", show_default="as --inter"),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(metavar="TIME", help="The round trip between two nodes: 20ms.", show_default="none")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(metavar="SHARE", help="The share of lost packets: 1%.", show_default="none")
    ] = None,
    intra: Annotated[
        str | None, typer.Option(metavar="RATE", help="The rate of each node's loopback.", show_default="unlimited")
    ] = None,
    racks: Annotated[
        int, typer.Option(metavar="N", min=1, help="The number of racks, with equally many nodes each.")
    ] = 1,
    spine: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="The rate of each rack's cable to other racks.", show_default="unlimited"),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the table to this file, as JSON.")
    ] = None,
    direct: Annotated[
        bool, typer.Option("--direct", help="Start the ranks without torchrun, which is faster.")
    ] = False,
) -> None:
    """Run a script under torchrun on an emulated cluster, and print how many bytes each link carried.

    Example: `python -m lab run --nodes 2 --ranks 2 --inter 200mbit -- train.py --steps 20`

    With `--inter flat`, each node has the internet access of a flat: 100mbit down, 40mbit up, and 20 ms between nodes.

    It runs on Linux and needs network namespaces (root, or unprivileged user namespaces) and iproute2.

    Exit code: 0, or 1 if the script failed, or 2 if it could not be run.
    """
    cable = Cable.parse(inter, up, latency, loss)
    loopback = Rate.parse(intra) if intra is not None else None
    between_racks = Rate.parse(spine) if spine is not None else None
    if nodes % racks:
        raise LabError(f"--racks {racks} does not divide {nodes} nodes. Choose a divisor, so that racks are equal.")
    if spine is not None and racks == 1:
        raise LabError("--spine limits the cables between racks. Choose --racks of at least 2.")
    check_script(command)
    check_output_file("--json", json_file)
    progress = Console(stderr=True, highlight=False)
    grouped = f", in {racks} racks" if racks > 1 else ""
    topology = Topology(nodes, ranks, nodes // racks)
    progress.print(f"Raising {topology.words}{grouped}, {cable} between them", style="dim")
    with Lab(topology, inter=cable, intra=loopback, spine=between_racks) as lab:
        how = "its ranks" if direct else "torchrun"
        progress.print(f"Starting {how} on each node for {command[0]} (loading torch takes seconds)", style="dim")
        result = lab.run(command, launcher="direct" if direct else "torchrun")
    shaped = f"cables {cable}" + (f", loopbacks {loopback}" if loopback else "")
    shaped += f", between racks {between_racks}" if between_racks else ""
    out = Console(highlight=False)
    out.print(f"\nWhat each link carried in {result.seconds:.1f} s ({shaped}; % of the rate)", style="bold")
    out.print(_table(result, cable, loopback))
    if result.racks:
        out.print(_rack_table(result, between_racks))
    write_output_file("--json", json_file, json.dumps(_record(result, lab), indent=2) + "\n")
    if result.returncode != 0:
        progress.print(f"towpath: {command[0]} failed: {describe_exit(result.returncode)}", style="bold red")
        raise typer.Exit(1)


@app.command()
def demo(
    inter: Annotated[str, typer.Option(metavar="RATE", help="The rate of each node's cable, each way.")] = "200mbit",
    steps: Annotated[int, typer.Option(metavar="N", min=3, help="Optimizer steps under each strategy.")] = 16,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The report.")] = Path("report.html"),
    strategies: Annotated[
        list[str] | None,
        typer.Argument(metavar="STRATEGY", help="The strategies to compare.", show_default="seven common ones"),
    ] = None,
) -> None:
    """Train a small GPT on an emulated cluster, under one strategy after the other, and compare them.

    Example: `python -m lab demo --inter 100mbit zero3 mics zero++`

    The cluster has two nodes with two ranks each. They are Linux network namespaces, joined by cables of the given
    rate. The strategy `auto` first measures this cluster for about 15 seconds, and then trains with the strategy that
    the planner ranks first. If this machine allows no namespaces, the ranks share its loopback, and the demo reports
    it. The report has plots, which a browser shows without a network.
    """
    load_torch()
    from lab import demo as story
    from lab.report import HEADINGS, MARKS, fastest_first, rows_of, wins, write_report

    check_picture_file("--output", output)
    names = strategies or list(story.STRATEGIES)
    console = Console(width=100, highlight=False)
    rate, reason = Rate.parse(inter), available()
    where = f"2 nodes × 2 ranks, their cables {rate}" if reason is None else "4 ranks on one loopback, unshaped"
    if reason is not None:
        console.print(f"No shaped cluster here ({reason})")
    console.print(f"{where}; a small GPT learns the Python standard library's sources, {steps} steps a strategy.")
    outcomes: list[story.Outcome] = []
    with story.cluster(inter, reason) as launch:
        for number, name in enumerate(names, 1):
            console.print(f"  {number}/{len(names)} {name} …", style="dim")
            outcomes.append(launch(story.trained, name, steps, reason is None)[0])
    table = table_of(
        *HEADINGS, numbers=1, title="One optimizer step of each", title_justify="left", padding=(0, 1), pad_edge=True
    )
    for outcome, row in zip(fastest_first(outcomes), rows_of(outcomes), strict=True):
        table.add_row(*row, style="bold" if wins(outcome, outcomes) else None)
    console.print(table)
    console.print(MARKS)
    console.print(
        "MB: the bytes that left one node over its cable, as the kernel counted them and as towpath.schedule() "
        "predicted them. Lossless strategies reach the same loss: they change what is sent, not what is learned."
    )
    about = f"{where}. A small GPT on the Python standard library's sources, {steps} optimizer steps."
    write_report(output, "The same training, by strategy", about, outcomes)
    console.print(f"Plots: {output}")


def _table(result: LabResult, cable: Cable, intra: Rate | None) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="")
    for heading in ("node", "cable sent", "cable received", "loopback"):
        table.add_column(heading, justify="right")
    for node, link in enumerate(result.links):
        table.add_row(
            str(node),
            _carried(link.sent_bytes, result.seconds, cable.up),
            _carried(link.received_bytes, result.seconds, cable.down),
            _carried(link.loopback_bytes, result.seconds, intra),
        )
    return table


def _rack_table(result: LabResult, spine: Rate | None) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="")
    for heading in ("rack", "sent to racks", "received from racks"):
        table.add_column(heading, justify="right")
    for rack, cable in enumerate(result.racks):
        sent, received = (_carried(n, result.seconds, spine) for n in (cable.sent_bytes, cable.received_bytes))
        table.add_row(str(rack), sent, received)
    return table


def _carried(count_bytes: int, seconds: float, rate: Rate | None) -> str:
    text = format_bytes(count_bytes)
    return text if rate is None else f"{text} {count_bytes / seconds / rate.bytes_per_second:5.1%}"


def _record(result: LabResult, lab: Lab) -> dict[str, Any]:
    cable, *_ = lab.wiring.cables
    rates = {"inter": cable.down, "up": cable.up, "intra": lab.wiring.intra, "spine": lab.wiring.spine}
    return {
        "nodes": lab.topology.nodes,
        "ranks_per_node": lab.topology.ranks_per_node,
        "racks": lab.topology.racks,
        **{f"{link}_bits_per_second": rate.bits_per_second if rate else None for link, rate in rates.items()},
        "latency_seconds": cable.latency_seconds,
        "loss": cable.loss,
        "seconds": result.seconds,
        "returncode": result.returncode,
        "links": [{"node": node, **asdict(link)} for node, link in enumerate(result.links)],
        "rack_links": [{"rack": rack, **asdict(cable)} for rack, cable in enumerate(result.racks)],
    }
