"""`towpath lab`: run a script on a cluster of network namespaces with shaped cables."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from towpath.cli.terminal import Commands
from towpath.errors import LabError
from towpath.files import check_output_file, write_output_file
from towpath.lab import Lab, LabResult, Rate
from towpath.lab.runs import check_script, describe_exit
from towpath.progress import size
from towpath.topology.cluster import Topology

app = Commands()


@app.callback()
def group() -> None:
    """Emulate a cluster on this machine: network namespaces as nodes, joined by cables of a chosen rate.

    Example: `towpath lab run --nodes 2 --ranks 2 --inter 200mbit -- train.py`
    """


@app.command()
def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGS]", help="A Python script or -m MODULE, and its arguments. Write -- before it."
        ),
    ],
    nodes: Annotated[int, typer.Option(metavar="N", min=1, help="The number of nodes.")],
    ranks: Annotated[int, typer.Option(metavar="N", min=1, help="The number of ranks on each node.")],
    inter: Annotated[
        str, typer.Option(metavar="RATE", help="The rate of each node's cable, each way: 200mbit, 1gbit.")
    ],
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

    Example: `towpath lab run --nodes 2 --ranks 2 --inter 200mbit -- train.py --steps 20`

    It runs on Linux and needs network namespaces (root, or unprivileged user namespaces) and iproute2.

    Exit code: 0, or 1 if the script failed, or 2 if it could not be run.
    """
    cable, loopback = Rate.parse(inter), Rate.parse(intra) if intra is not None else None
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
    out.print(f"\nWhat each link carried in {result.seconds:.1f} s ({shaped}; % of the rate, on average)", style="bold")
    out.print(_table(result, cable, loopback))
    if result.racks:
        out.print(_rack_table(result, between_racks))
    write_output_file("--json", json_file, json.dumps(_record(result, lab), indent=2) + "\n")
    if result.returncode != 0:
        progress.print(f"towpath: {command[0]} failed: {describe_exit(result.returncode)}", style="bold red")
        raise typer.Exit(1)


def _table(result: LabResult, inter: Rate, intra: Rate | None) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="")
    for heading in ("node", "cable sent", "cable received", "loopback"):
        table.add_column(heading, justify="right")
    for node, link in enumerate(result.links):
        table.add_row(
            str(node),
            _carried(link.sent_bytes, result.seconds, inter),
            _carried(link.received_bytes, result.seconds, inter),
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
    text = size(count_bytes)
    return text if rate is None else f"{text} {count_bytes / seconds / rate.bytes_per_second:5.1%}"


def _record(result: LabResult, lab: Lab) -> dict[str, Any]:
    rates = {
        f"{link}_bits_per_second": rate.bits_per_second if rate else None
        for link, rate in (("inter", lab.rates.inter), ("intra", lab.rates.intra), ("spine", lab.rates.spine))
    }
    return {
        "nodes": lab.topology.nodes,
        "ranks_per_node": lab.topology.ranks_per_node,
        "racks": lab.topology.racks,
        **rates,
        "seconds": result.seconds,
        "returncode": result.returncode,
        "links": [{"node": node, **asdict(link)} for node, link in enumerate(result.links)],
        "rack_links": [{"rack": rack, **asdict(cable)} for rack, cable in enumerate(result.racks)],
    }
