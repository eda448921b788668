"""`towpath doctor`: find what is wrong with the network and the machines of a cluster, and what to do about it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from towpath.cli.terminal import table_of
from towpath.doctor.examination import Examination, Member
from towpath.doctor.findings import Finding, Severity
from towpath.doctor.gain import priced
from towpath.doctor.judge import per_second
from towpath.doctor.meeting import PORT, Leader, Place, follow, why_unreachable
from towpath.errors import ConfigError
from towpath.files import check_output_file, write_output_file
from towpath.plan.catalog import describe_model
from towpath.plan.model import Model
from towpath.progress import format_bytes, show_progress

_FOUND = 1
_HEADINGS = {
    Severity.BLOCKS: "Training does not run",
    Severity.SLOWS: "Training is slower",
    Severity.RISK: "It does no harm now",
}


def doctor(
    hosts: Annotated[
        str | None,
        typer.Option(metavar="A,B,…", help="Addresses of all machines, if there is no launcher. The first one leads."),
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="N", min=1, max=65535, help="With --hosts: the port at which the machines meet.")
    ] = PORT,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="How long the machines wait for one another to come.")
    ] = 20.0,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="For what training would gain: as for `towpath plan`.")
    ] = "qwen3-0.6b",
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write facts and findings as JSON. -: to stdout.")
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
        raise ConfigError(f"doctor asks the kernel of Linux; this is {sys.platform}.")
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if hosts is None and not launched:
        raise ConfigError(
            "doctor examines several machines: pass --hosts A,B with their addresses, and start it on each of them, or "
            "start it with torchrun … -m towpath doctor."
        )
    to_stdout = output is not None and str(output) == "-"
    if not to_stdout:
        check_output_file("--json", output)
    described = describe_model(model)
    if hosts is None:
        place = Place.of_launcher()
    else:
        place = Place.of_hosts(tuple(host.strip() for host in hosts.split(",") if host.strip()), port)
    member = Member(place)
    try:
        if place.number:
            text, status = follow(place, member.perform, member.hello, wait)
        else:
            text, status = _lead(place, member, wait, described, output)
    except OSError as error:
        console, text = _console()
        _print_findings(console, [why_unreachable(place, error)], described.name)
        print(text(), file=sys.stderr, end="", flush=True)
        raise typer.Exit(_FOUND) from None
    if not to_stdout and (place.hosts or place.number == 0):
        print(text, end="", flush=True)
    raise typer.Exit(status)


def _lead(place: Place, member: Member, wait: float, model: Model, output: Path | None) -> tuple[str, int]:
    """Examine all that come, and tell them the result. Return the report and the exit code."""
    with show_progress("Looking for the other machines") as say:
        leader = Leader(place, member.perform, member.hello)
        leader.gather(wait, say)
        facts, found = Examination(leader, say).run()
        say("what training would gain")
        found = priced(facts, found, model)
    status = _FOUND if found else 0
    text = report(facts, found, model.name)
    leader.dismiss(text, status)
    if output is not None:
        written = json.dumps(facts | {"model": model.name, "findings": [asdict(each) for each in found]}, indent=1)
        if str(output) == "-":
            print(written, flush=True)
        else:
            write_output_file("--json", output, written + "\n")
    return text, status


# The report -----------------------------------------------------------------------------------------------------------


def _console() -> tuple[Console, Callable[[], str]]:
    file = StringIO()
    return Console(file=file, width=100, highlight=False, markup=False), file.getvalue


def report(facts: Mapping[str, Any], findings: Sequence[Finding], model: str) -> str:
    """Return the causes, the pairs and the machines as text of 100 columns."""
    console, text = _console()
    _print_findings(console, findings, model)
    if facts["pairs"]:
        _print_pairs(console, facts)
    _print_machines(console, facts)
    if not findings:
        rates = [pair[way]["alone"] for pair in facts["pairs"] for way in ("out", "back")]
        slowest = f", each direction carries {per_second(min(rates))} or more, without loss" if rates else ""
        count = len(facts["machines"])
        console.print(f"Nothing is wrong: {count} machine{'s' if count > 1 else ''} in {facts['seconds']} s{slowest}.")
    return text()


def _print_findings(console: Console, findings: Sequence[Finding], model: str) -> None:
    heading = None
    for number, each in enumerate(findings, 1):
        if each.severity is not heading:
            heading = each.severity
            console.print(f"{_HEADINGS[heading]}:\n")
        console.print(f"{number}. {each.cause.upper()}: {each.summary}.")
        for line in each.evidence:
            _print_item(console, "", line)
        for line in each.remedy:
            _print_item(console, "→", line)
        if each.seconds is not None:
            now, then = each.seconds
            step = f"no step → {then:.3g} s" if now is None else f"step {now:.3g} → {then:.3g} s"
            _print_item(console, "=", f"{step} ({model}, one sequence a rank, simulated)")
        console.print()


def _print_item(console: Console, mark: str, text: str) -> None:
    table = table_of("", "", numbers=2, show_header=False, padding=(0, 1, 0, 0))
    table.add_row(f"   {mark:1}", text)
    console.print(table)


def _print_pairs(console: Console, facts: Mapping[str, Any]) -> None:
    names = [machine["name"] for machine in facts["machines"]]
    table = table_of("from → to", "address", "alone", "both ways", "lost", "packet", "latency", numbers=2)
    limits: list[float] = []
    for pair in facts["pairs"]:
        a, b = pair["machines"]
        for (one, other), way, reached in (((a, b), "out", 0), ((b, a), "back", 1)):
            told = pair[way]
            tried = next((each for each in pair["reach"][reached] if each["state"] == "open"), None)
            row = [f"{names[one]} → {names[other]}", tried["address"] if tried else "does not connect"]
            if told:
                latency = f"{pair['latency'] * 1e3:.3g} ms" if way == "out" else ""
                lost = "?" if told.get("loss") is None else f"{told['loss']:.2%}"
                rates = (per_second(told["alone"]), per_second(told["together"]))
                row += [*rates, lost, str(told["packet"] or "?"), latency]
                limits.append(told["alone"])
            table.add_row(*row)
    console.print(table)
    reached = min(machine["loopback"] for machine in facts["machines"])
    if limits and max(limits) > 0.4 * reached:
        console.print(f"Sockets reach {per_second(reached)} here. Faster cables were not tested to their limit.")
    console.print()


def _print_machines(console: Console, facts: Mapping[str, Any]) -> None:
    table = table_of("machine", "training uses", "link", "GFLOP/s of each rank", "copies", "torch", "towpath", numbers=6)
    for machine in facts["machines"]:
        used = machine["training"]
        of = next((each for each in machine["interfaces"] if each["name"] == used["interface"]), None)
        devices = [device for rank in machine["ranks"] for device in rank.get("devices", [])]
        link = "" if of is None else f"{of['megabits']} Mbit/s" if of["megabits"] else of["driver"] or "unknown"
        copied = min((device["copied"] for device in devices), default=0.0)
        table.add_row(
            machine["name"],
            f"{used['interface']} {used['address']}",
            link,
            ", ".join(f"{device['flops'] / 1e9:.4g}" for device in devices),
            f"{format_bytes(copied)}/s",
            machine["versions"].get("torch", "none"),
            machine["versions"]["towpath"],
        )
    console.print(table)
    for machine in facts["machines"]:
        for note in machine["notes"]:
            console.print(f"{machine['name']}: {note}")
    console.print()
