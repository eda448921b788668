"""`towpath doctor`: find what is wrong with the network and the machines of a cluster, and what to do about it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from towpath.cli.terminal import table_of
from towpath.doctor.examination import Examination, Examinee
from towpath.doctor.findings import Finding, Severity
from towpath.doctor.gain import priced
from towpath.doctor.gathering import PORT, Leader, Place, follow, why_unreachable
from towpath.doctor.judge import OF_LOOPBACK
from towpath.errors import ConfigError
from towpath.files import check_output_file, write_output_file
from towpath.plan.catalog import describe_model
from towpath.plan.model import Model
from towpath.progress import format_bytes, format_rate, show_progress
from towpath.topology.cluster import counted
from towpath.topology.launcher import launched

_FOUND = 1
_HEADINGS = {
    Severity.BLOCKS: "Training does not run, or hangs:",
    Severity.SLOWS: "Training is slower than it could be:",
    Severity.RISK: "This does no harm to what was measured, and may later:",
}


def doctor(
    hosts: Annotated[
        str | None,
        typer.Option(metavar="A,B,…", help="Addresses of all machines, if there is no launcher. The first one leads."),
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="N", min=1, max=65535, help="The port at which the machines meet.")
    ] = PORT,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="How long the machines wait for one another to come.")
    ] = 30.0,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="For what training would gain: as for `towpath plan`.")
    ] = "qwen3-0.6b",
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write facts and findings as JSON.")
    ] = None,
) -> None:
    """Find what is wrong with a cluster: its network, its machines, and what differs between them.

    Example: `towpath doctor --hosts 192.168.1.10,192.168.1.11`, on each of these machines

    Under a launcher: `torchrun --nnodes 2 --nproc-per-node 8 … -m towpath doctor`

    It needs no process group, so it works where training hangs. Within a minute it measures which interfaces, ports and
    packet sizes work between each two machines, how much each direction carries, and how fast each rank computes. It
    prints the causes, the machine and cable of each, what to do, and how much faster a step would be.

    Exit code: 0 if nothing is wrong, 1 if something is, or 2 for a mistake.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"doctor asks the kernel of Linux; this is {sys.platform}. Run it on Linux machines.")
    if hosts is None and not launched():
        raise ConfigError(
            "doctor examines several machines: pass --hosts A,B with their addresses, and start it on each of them, or "
            "start it with torchrun … -m towpath doctor."
        )
    check_output_file("--json", output)
    described = describe_model(model)
    listed = tuple(filter(None, (host.strip() for host in (hosts or "").split(","))))
    place = Place.of_launcher(port) if hosts is None else Place.of_hosts(listed, port)
    member = Examinee(place)
    if place.number == 0:
        status = _lead(place, member, wait, described, output)
    else:
        try:
            text, status = follow(place, member.perform, member.hello, wait)
        except OSError as error:
            print(report({}, [why_unreachable(place, error)]), end="", file=sys.stderr, flush=True)
            raise typer.Exit(_FOUND) from None
        if place.hosts:
            print(text, end="", flush=True)
    raise typer.Exit(status)


def _lead(place: Place, member: Examinee, wait: float, model: Model, output: Path | None) -> int:
    """Examine all that come, and tell them and the user the result. Return the exit code."""
    with show_progress("Looking for the other machines") as say:
        leader = Leader(place, member.perform, member.hello)
        leader.gather(wait, say)
        facts, found = Examination(leader, say).run()
        say("what training would gain")
        found = priced(facts, found, model)
    text, status = report(facts, found, model.name), _FOUND if found else 0
    leader.dismiss(text, status)
    print(text, end="", flush=True)  # before the file, which may fail
    as_json = {**facts, "model": model.name, "findings": [asdict(each) for each in found]}
    write_output_file("--json", output, json.dumps(as_json, indent=1) + "\n")
    return status


def report(facts: Mapping[str, Any], findings: Sequence[Finding], model: str = "") -> str:
    """Return the causes, the pairs and the machines as text of 100 columns."""
    console = Console(file=(file := StringIO()), width=100, highlight=False, markup=False)
    _print_findings(console, findings, model)
    if facts.get("ways"):
        _print_ways(console, facts)
    if facts:
        _print_machines(console, facts)
    if not findings:
        slowest = min((way["alone"] for way in facts["ways"]), default=0.0)
        rates = f", and each direction carries {format_rate(slowest)} or more" if slowest else ""
        examined = counted(len(facts["machines"]), "machine")
        console.print(f"Nothing is wrong: {examined} in {facts['seconds']} s{rates}.")
    return file.getvalue()


def _print_findings(console: Console, findings: Sequence[Finding], model: str) -> None:
    heading = None
    for number, each in enumerate(findings, 1):
        if each.severity is not heading:
            heading = each.severity
            console.print(f"{_HEADINGS[heading]}\n")
        console.print(textwrap.fill(f"{number}. {each.cause.upper()}: {each.summary}.", 100, subsequent_indent="   "))
        lines = [*each.evidence, *(f"→ {line}" for line in each.remedy)]
        if each.seconds is not None:
            now, then = (f"{seconds:.3g}" if seconds else "none" for seconds in each.seconds)
            lines.append(f"= step {now} → {then} s ({model}, one sequence a rank, simulated)")
        for line in lines:
            indent = " " * (5 if line[:1] in "→=" else 7)
            console.print(textwrap.fill(line, 100, initial_indent=indent, subsequent_indent=indent + "  "))
        console.print()


def _print_ways(console: Console, facts: Mapping[str, Any]) -> None:
    names = [machine["name"] for machine in facts["machines"]]
    table = table_of("from → to", "over", "alone", "both ways", "lost", "packet", "latency", numbers=2)
    for way in facts["ways"]:
        over = (f"{each['interface']} to {each['address']}" for each in way["reach"] if each["state"] == "open")
        row = [f"{names[way['from']]} → {names[way['to']]}", next(over, "does not connect")]
        if "alone" in way:
            row += [format_rate(way["alone"]), format_rate(way["together"])]
            row += ["?" if way["loss"] is None else f"{way['loss']:.2%}"]
            row += [str(way["packet"] or "?"), f"{way['latency'] * 1e3:.3g} ms"]
        table.add_row(*row)
    console.print(table)
    # 0 is that of a machine that was lost before it was measured.
    limit = OF_LOOPBACK * min(machine["loopback"] or float("inf") for machine in facts["machines"])
    if any(way.get("alone", 0.0) > limit for way in facts["ways"]):
        console.print(
            f"What carries more than {format_rate(limit)} was not tested to its limit, which is that of sockets here."
        )
    console.print()


def _print_machines(console: Console, facts: Mapping[str, Any]) -> None:
    table = table_of("machine", "training uses", "copies of each rank", "GFLOP/s of each rank", numbers=2)
    for machine in facts["machines"]:
        devices = [device for rank in machine["ranks"] for device in rank["devices"]]
        copied = ", ".join(f"{format_bytes(device['copied'])}/s" for device in devices)
        flops = ", ".join(f"{device['flops'] / 1e9:.4g}" for device in devices)
        used = machine["training"]
        table.add_row(machine["name"], f"{used['interface']} {used['address']}", copied, flops)
    console.print(table)
    for machine in facts["machines"]:
        for note in machine["notes"]:
            console.print(f"{machine['name']}: {note}")
    console.print()
