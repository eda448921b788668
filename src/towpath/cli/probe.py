"""`towpath probe`: measure the links, processors and kernels of a cluster, on all its ranks."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from towpath.cli.terminal import check_launched, check_picture_file, load_torch, table_of
from towpath.core.routes import Grid
from towpath.files import check_output_file, write_output_file
from towpath.planner.profile import BROADCAST, Profile, collective_of, collective_seconds, slowdowns
from towpath.planner.tables import seconds
from towpath.sim.measured import Mesh

_LINKS = ("inter, one", "inter, all", "intra, one", "intra, all")


def probe(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The profile, for `towpath plan --cluster`.")
    ] = Path("profile.json"),
    budget: Annotated[
        float, typer.Option("--seconds", metavar="SECONDS", min=1, help="How long it may take, approximately.")
    ] = 60.0,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the measurements and the fitted lines, as .svg."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON instead of tables.")] = False,
) -> None:
    """Measure the cluster on which it runs: messages, collectives, codecs, memory, matrix products.

    Example: `torchrun --nnodes 2 --nproc-per-node 8 … -m towpath probe -o profile.json`

    Then: `towpath plan … --cluster profile.json`

    Exit code: 0, or 2 for a mistake.
    """
    load_torch()
    check_launched("probe")
    check_output_file("--output", output)
    check_picture_file("--picture", picture)
    profile = _measure(budget)
    if profile is None:
        return
    write_output_file("--output", output, profile.to_json())
    if picture is not None:
        write_output_file("--picture", picture, draw(profile))
    if as_json:
        sys.stdout.write(profile.to_json())
    else:
        show(profile, output)


def _measure(budget: float) -> Profile | None:
    """Measure on all ranks. Return the profile on rank 0, and None on other ranks."""
    import torch.distributed as dist

    from towpath.auto.probe import probe as measure
    from towpath.topology.init import init
    from towpath.train.progress import progress_bar

    init()
    try:
        if dist.get_rank():
            measure(budget_seconds=budget)
            return None
        with progress_bar("Probing") as say:
            return measure(budget_seconds=budget, say=say)
    finally:
        dist.destroy_process_group()


def show(profile: Profile, output: Path) -> None:
    """Print a profile as tables."""
    console = Console(width=100, highlight=False)
    console.print(f"{profile.topology.words} on {profile.host}")
    table = table_of("what", "sizes", "latency", "rate", "error of the fit", numbers=2)
    for what in dict.fromkeys(point.what for point in profile.singles()):
        points = profile.of(what)
        fit = profile.fit(what)
        sizes = f"{points[0].size:,} to {points[-1].size:,}" if len(points) > 1 else f"{points[0].size:,}"
        unit, scale = ("Gelements/s", 1e9) if "code " in what else ("GB/s", 1e9)
        if what.startswith("matmul"):
            side, usual = points[-1].size, points[-1].usual
            table.add_row(what, sizes, "", f"{2 * side**3 / usual / 1e9:.4g} GFLOP/s", "")
            continue
        table.add_row(what, sizes, f"{fit.latency * 1e6:.0f} µs", f"{fit.rate / scale:.4g} {unit}", f"{fit.error:.0%}")
    console.print(table)
    if profile.collectives():
        console.print(_collectives(profile))
    if profile.pairs():
        console.print(_pairs(profile))
    if profile.host_points():
        console.print(_host(profile))
    console.print(f"The profile: {output}", soft_wrap=True)


def _pairs(profile: Profile) -> Table:
    table = table_of("at the same time", "takes", "predicted", numbers=1)
    for slowdown in slowdowns(profile):
        table.add_row(slowdown.what, f"{slowdown.measured:.2f} ×", f"{slowdown.predicted:.2f} ×")
    return table


def _host(profile: Profile) -> str:
    hardware = profile.cluster().hardware
    host, launching = hardware.host, hardware.launching
    if launching is not None:
        each = ", ".join(f"{name} {seconds(cost)}" for name, cost in asdict(launching).items())
        return f"The thread that trains launches: {each}."
    forward, backward = host.forward, host.backward
    return (
        f"Processor time in addition: in a forward pass {seconds(forward.unit)} per unit and "
        f"{seconds(forward.parameter)} per parameter, in a backward pass {seconds(backward.unit)} and "
        f"{seconds(backward.parameter)}; {seconds(host.transfer)} per transfer; in the optimizer "
        f"{seconds(host.optimizer)} per parameter."
    )


def _collectives(profile: Profile) -> Table:
    """Compare the largest of each collective with its prediction from single messages."""
    table = table_of("collective", "bytes", "took", "from its messages", numbers=1)
    hardware = profile.cluster(measured_collectives=False).hardware
    for what in dict.fromkeys(point.what for point in profile.collectives()):
        point = profile.of(what)[-1]
        compared = "not used by plans"
        if collective_of(what)[0] != BROADCAST:
            predicted = collective_seconds(point, hardware)
            compared = f"{seconds(predicted)} ({predicted / point.usual - 1:+.0%})"
        table.add_row(what, f"{point.size:,}", seconds(point.usual), compared)
    return table


# --- the picture ------------------------------------------------------------------------------------------------------


def draw(profile: Profile) -> str:
    """Return an SVG: messages with the lines fitted to them, and collectives with their predictions from messages."""
    from towpath.cli.plots import standalone_svg  # imports torch

    return standalone_svg(_draw, profile, (10, 4.8))


def _draw(figure: Any, profile: Profile) -> None:
    from towpath.cli.plots import color

    links, collectives = figure.subplots(1, 2)
    links.set_title("messages: points measured, lines fitted")
    for number, what in enumerate(what for what in _LINKS if profile.has(what)):
        points, fit = profile.of(what), profile.fit(what)
        sizes = [point.size for point in points]
        usual = [point.usual for point in points]
        spread = [[u - min(p.seconds) for u, p in zip(usual, points, strict=True)]]
        spread.append([max(p.seconds) - u for u, p in zip(usual, points, strict=True)])
        links.errorbar(sizes, usual, yerr=spread, fmt="o", markersize=3, color=color(number), linewidth=0.8)
        fitted = [fit.latency + size / fit.rate for size in sizes]
        links.plot(sizes, fitted, color=color(number), linewidth=1.2, label=f"{what} (within {fit.error:.0%})")
    collectives.set_title("collectives over all ranks: points measured, lines from messages")
    hardware = profile.cluster(measured_collectives=False).hardware
    topology = profile.topology
    widest = Mesh(Grid(topology.nodes, topology.ranks_per_node))
    names = dict.fromkeys(point.what for point in profile.collectives())
    drawn = [name for name in names if collective_of(name)[1] == widest and collective_of(name)[0] != BROADCAST]
    for number, what in enumerate(drawn):
        points = profile.of(what)
        sizes = [point.size for point in points]
        collectives.plot(sizes, [point.usual for point in points], "o", markersize=3, color=color(number))
        predicted = [collective_seconds(point, hardware) for point in points]
        collectives.plot(sizes, predicted, color=color(number), linewidth=1.0, label=what)
    for axes in (links, collectives):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("bytes")
        axes.set_ylabel("seconds")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.legend(frameon=False, fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
